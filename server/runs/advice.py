"""Which strategy is for whom: advice from a run with baselines, by what clients disclosed and scored on validation."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import mean_and_interval
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.server.runs.course import read_course
from hyperbloom.server.runs.lines import CLIENTS, phase_folder, read_lines
from hyperbloom.server.runs.recorded import Member, has_ended, read_config, read_members, read_summary, sound
from hyperbloom.strategies import find_strategy

SIMPLEST = ("local", "fedavg")  # what to take of strategies that cannot be told apart
FEW, UNLIKE = 100, 0.5  # training examples that are few, and the distance of class shares that are unlike

_OWN = "{} of {} clients have their own networks: ghn lets these learn together (flower-server advise --strategy ghn)"
_NOVEL = "{} % of the clients are newcomers: fedavg has a model for them; odpfl makes one for each, from many clients"
_SHARES = "class shares of two clients differ by {:.2f} on average (0: alike, 1: no class in common; {} of {} tell): {}"
Scores = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Advice:
    """A strategy, and in sentences what this rests on; `better_by`: than each other one, with the 95 % interval."""

    strategy: str
    sure: bool
    says: tuple[str, ...]
    scores: Mapping[str, float]
    better_by: Mapping[str, tuple[float, float, float]]


def advise_on(folder: Path, own_code: bool = True) -> Advice:
    """Return the advice of a run; ConfigError if it has no baselines, is not over or damaged, or names code unasked."""
    config, summary, members = read_config(folder, own_code), read_summary(folder), read_members(folder).clients
    if not has_ended(folder):
        raise ConfigError(f"{folder}: the run is not over; go on with --resume")
    known = {member.name for member in members if not config.is_novel(member.row)}
    scores, rising, metric = dict[str, dict[str, float]](), set[str](), ""
    for name in (config.strategy, *config.baselines):
        place = phase_folder(folder, config, name)
        with sound(folder):
            course = read_course(name, place, summary.get(name))
            last = max(course.curve, default=None)
            lines = [line for line in read_lines(place / CLIENTS) if line["round"] == course.selected]
            scored = [row for row in lines if row["client"] in known and row.get(f"val_{course.metric}") is not None]
            scores[name] = {line["client"]: course.scale.factor * line[f"val_{course.metric}"] for line in scored}
        if course.selected is None:
            raise ConfigError(f"{folder}: no round of {name} can be selected")
        metric, rising = course.metric, rising | ({name} if course.selected == last else set())
    return advise(members, metric, scores, rising, config.novel)


def advise(
    members: Sequence[Member], metric: str, scores: Scores, rising: Set[str] = frozenset(), novel: int = 0
) -> Advice:
    """Recommend the best strategy, or of those that cannot be told from it the simplest.

    `scores` are the selecting metric on validation examples by strategy and client, shares in percent. `rising` are the
    strategies whose last evaluation was their best. Only clients' own networks count if there are any.
    """
    clients = sorted(set.intersection(*map(set, scores.values())))
    own, scale = sum(member.own for member in members), scale_of(metric)
    fits = [name for name in scores if not own or find_strategy(name).own_models != "no"]
    if min(len(clients), len(scores)) < 2 or not fits:
        raise ConfigError("expected two strategies (--baselines) that scored two clients, and one for their networks")
    table = {name: np.array([each[client] for client in clients]) for name, each in scores.items()}
    means = {name: float(values.mean()) for name, values in table.items()}
    better = scale.sign
    best = max(fits, key=lambda name: better * means[name])
    tied = [name for name in fits if name == best or mean_and_interval(better * (table[best] - table[name]))[1] <= 0]
    take = next((name for name in SIMPLEST if name in tied), best)
    gaps = {name: mean_and_interval(better * (table[take] - table[name])) for name in table if name != take}
    says = [*_of_clients(members), f"{title_of(metric)} on validation examples, mean over {len(clients)} clients: "]
    says[-1] += ", ".join(f"{name} {scale.show(mean)}" for name, mean in means.items())
    for name, gap in gaps.items():
        first, second = (take, name) if gap[0] > 0 else (name, take)
        clear = not gap[1] <= 0 <= gap[2]
        mean, low, high = map(scale.cell, (abs(gap[0]), *sorted(map(abs, gap[1:]))) if clear else gap)
        verdict = (
            f"{first} is better than {second} by" if clear else f"no difference between {take} and {name} can be seen:"
        )
        says.append(f"{verdict} {mean}{' points' * scale.percent} ({low} to {high})")
    if take != best:
        says.append(f"the simplest of those that cannot be told from the best ({', '.join(tied)}) is {take}")
    says += [f"{name} was best at its end: more rounds may say otherwise" for name in gaps if name in rising]
    says += [_OWN.format(own, len(members))] if own else []
    says += [_NOVEL.format(novel)] if novel else []
    return Advice(take, all(low > 0 for _, low, _ in gaps.values()), tuple(says), means, gaps)


def _of_clients(members: Sequence[Member]) -> Iterator[str]:
    """Yield what the clients' sizes and class shares suggest before any training."""
    sizes, told = [member.examples for member in members], [each.shares for each in members if each.shares]
    hint = "few, and others help most where they are few" if median(sizes) < FEW else "the scores say if others help"
    span = f"{min(sizes)} to {max(sizes)} training examples, the median is {median(sizes):g}"
    yield f"{len(sizes)} clients have {span}: {hint}"
    if len(told) < 2:
        yield "class shares are not known (flower-client --disclose-class-shares tells them)"
        return
    # Half the sum of |a - b| over all pairs, without a look at each pair: in order, a share is above those before it.
    above = 2 * np.arange(len(told)) - (len(told) - 1)
    distance = float(above @ np.sort(told, axis=0).sum(axis=1)) / (len(told) * (len(told) - 1))
    hint = "a model for each suits that" if distance >= UNLIKE else "one model may suit all, if their labels agree"
    yield _SHARES.format(distance, len(told), len(sizes), hint)
