"""Advice is a function of what clients disclose and how they score; a folder of made-up rounds gives both."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.gains import mean_and_interval
from hyperbloom.common.wire.orders import EvaluateResult
from hyperbloom.server.loop.exchange import Evaluated
from hyperbloom.server.loop.listener import RoundReport, Selection
from hyperbloom.server.runs.advice import Advice, advise, advise_on
from hyperbloom.server.runs.recorded import Member, read_members

from ...scores import right
from ..recorded import Recording, some_config

BETTER = {"local": (80, 79, 82, 81, 78, 80), "fedavg": (90, 91, 92, 90, 89, 91), "pfedhn": (84, 83, 85, 86, 83, 84)}


def members(
    examples: int = 60, shares: Sequence[tuple[float, ...]] = (), own: Sequence[bool] = (False,) * 6
) -> list[Member]:
    """Return clients `a`, `b`, ... of so many training examples each."""
    told = [*shares, *[()] * (len(own) - len(shares))]
    return [Member("abcdefgh"[n], n, examples, "M", told[n], each) for n, each in enumerate(own)]


def of(scores: dict[str, Sequence[float]], clients: Sequence[Member] | None = None, **more: object) -> Advice:
    """Return the advice on scores that are given by strategy, in the order of the clients."""
    by_client = {name: dict(zip("abcdefgh", map(float, values), strict=False)) for name, values in scores.items()}
    metric = str(more.pop("metric", "accuracy"))
    return advise(clients or members(), metric, by_client, **more)  # type: ignore[arg-type]


def test_the_best_is_recommended_where_the_scores_show_it() -> None:
    advice = of(BETTER)
    assert (advice.strategy, advice.sure) == ("fedavg", True)
    assert advice.scores == {name: pytest.approx(np.mean(values)) for name, values in BETTER.items()}
    assert "accuracy on validation examples, mean over 6 clients: local 80.0 %, fedavg 90.5 %, pfedhn 84.2 %" in (
        advice.says
    )
    swapped = {"local": BETTER["local"], "fedavg": BETTER["pfedhn"], "pfedhn": BETTER["fedavg"]}
    assert (of(swapped).strategy, of(swapped).sure) == ("pfedhn", True)


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    advice = of(BETTER)
    for name in ("local", "pfedhn"):
        found = ttest_rel(BETTER["fedavg"], BETTER[name]).confidence_interval(0.95)
        mean = np.mean(BETTER["fedavg"]) - np.mean(BETTER[name])
        assert advice.better_by[name] == pytest.approx((mean, found.low, found.high))
        shown = f"fedavg is better than {name} by {mean:.1f} points ({found.low:.1f} to {found.high:.1f})"
        assert shown in advice.says


def test_where_no_difference_can_be_seen_clients_train_alone() -> None:
    scores = {"local": (80, 90, 70, 85), "fedavg": (60, 71, 49, 66), "pfedhn": (83, 86, 77, 84)}
    advice = of(scores, members(own=[False] * 4))
    assert (advice.strategy, advice.sure) == ("local", False)
    (said,) = [line for line in advice.says if "no difference" in line]
    assert said.startswith("no difference between local and pfedhn can be seen: -1.2 points (")
    assert any(line.startswith("local is better than fedavg by ") for line in advice.says)
    assert "the simplest of those that cannot be told from the best (local, pfedhn) is local" in advice.says
    assert not any("simplest" in line for line in of(BETTER).says)
    # The same means, but every client tells the same: now it can be seen.
    alike = {name: [float(np.mean(values)) + step for step in (0, 0.1, 0.2, 0.3)] for name, values in scores.items()}
    found = of(alike, members(own=[False] * 4))
    assert (found.strategy, found.sure) == ("pfedhn", True)


def test_of_two_federations_that_are_alike_the_simpler_one_is_taken() -> None:
    scores = {"pfedhn": (91, 90, 92, 92, 88, 93), "local": BETTER["local"], "fedavg": BETTER["fedavg"]}
    advice = of(scores)
    assert (advice.strategy, advice.sure) == ("fedavg", False)
    # Of all others it is the best one.
    others = {"ditto": scores["fedavg"], "pfedhn": scores["pfedhn"], "local": scores["local"]}
    assert of(others).strategy == "pfedhn"


def test_the_interval_holds_the_truth_also_for_four_clients() -> None:
    generator, held, held_by_bootstrap = np.random.default_rng(0), 0, 0
    for _ in range(1000):
        differences = generator.normal(2.0, 3.0, 4)
        _, low, high = mean_and_interval(differences)
        held += low <= 2.0 <= high
        held_by_bootstrap += differences.min() <= 2.0 <= differences.max()  # none of its intervals is wider
    assert 930 <= held <= 970
    assert held_by_bootstrap < 900


def test_less_is_better_for_an_error() -> None:
    advice = of({"local": (3.0, 4.0, 5.0), "pfedhn": (1.0, 2.1, 2.9)}, members(own=[False] * 3), metric="rmse")
    assert (advice.strategy, advice.sure) == ("pfedhn", True)
    assert advice.better_by["local"][0] == pytest.approx(2.0)
    assert any(line.startswith("pfedhn is better than local by 2.000 (") for line in advice.says)


def test_only_strategies_that_use_the_clients_own_networks_are_for_them() -> None:
    own = members(own=[True, True, False, False, False, False])
    advice = of(BETTER, own)
    assert (advice.strategy, advice.sure) == ("local", False)
    assert any(line.startswith("2 of 6 clients have their own networks: ghn lets") for line in advice.says)
    low, high = ttest_rel(BETTER["fedavg"], BETTER["local"]).confidence_interval(0.95)
    assert any(line == f"fedavg is better than local by 10.5 points ({low:.1f} to {high:.1f})" for line in advice.says)
    probed = of({**BETTER, "ghn": (85, 84, 86, 87, 84, 85)}, own)
    assert probed.strategy == "ghn"
    with pytest.raises(ConfigError, match="and one for their networks"):
        of({"fedavg": BETTER["fedavg"], "pfedhn": BETTER["pfedhn"]}, own)


def test_sizes_and_class_shares_are_reasons() -> None:
    few, shares = of(BETTER).says[:2]
    assert (
        few
        == "6 clients have 60 to 60 training examples, the median is 60: few, and others help most where they are few"
    )
    assert shares == "class shares are not known (flower-client --disclose-class-shares tells them)"
    unlike = [(1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.5, 0.5, 0.0)]  # distances 1, 1/2 and 1/2
    many, shares = of(BETTER, members(500, unlike)).says[:2]
    assert many.endswith("the median is 500: the scores say if others help")
    assert "differ by 0.67 on average" in shares and "3 of 6 tell): a model for each suits that" in shares
    alike = of(BETTER, members(500, [(0.5, 0.5)] * 2)).says[1]
    assert "differ by 0.00 on average" in alike and "2 of 6 tell): one model may suit all" in alike


def test_the_distance_of_class_shares_is_the_mean_over_pairs_also_of_many_clients() -> None:
    shares = np.random.default_rng(1).dirichlet(np.ones(10), size=4000)
    clients = [Member(f"client-{n}", n, 60, "M", tuple(each)) for n, each in enumerate(shares.tolist())]
    pairs = [np.abs(shares - np.roll(shares, shift, axis=0)).sum(1).mean() / 2 for shift in range(1, 4000)]
    begun = time.process_time()
    told = of(BETTER, clients).says[1]
    assert time.process_time() - begun < 5  # a look at each of eight million pairs takes a minute
    assert f"differ by {np.mean(pairs):.2f} on average" in told


def test_newcomers_and_what_was_still_rising_are_named() -> None:
    said = of(BETTER, rising={"pfedhn", "fedavg"}, novel=25).says[-2:]
    assert said[0] == "pfedhn was best at its end: more rounds may say otherwise"
    assert said[1].startswith("25 % of the clients are newcomers: fedavg has a model for them; odpfl")
    assert not [line for line in of(BETTER).says if "newcomers" in line or "at its end" in line]


@pytest.mark.parametrize(
    "scores", [{"local": (80, 90)}, {"local": (80,), "fedavg": (90,)}, {"local": (), "fedavg": ()}]
)
def test_nothing_to_compare_is_an_error(scores: dict[str, Sequence[float]]) -> None:
    with pytest.raises(ConfigError, match="expected two strategies"):
        of(scores)


# ---------------------------------------------------------------------- a run's folder


class Scored(Recording):
    """A run in which clients are right on so many of 100 validation examples; on test examples it is the reverse."""

    scores: dict[str, dict[int, Sequence[int]]]

    def report(self, number: int, **refused: str) -> RoundReport:
        """Return a round, evaluated where there are scores. Client `b` is left out of every training."""
        report = super().report(number, b="too slow")
        if rights := self.scores[self.name].get(number):
            each = {
                name: EvaluateResult(right(value, 100), right(100 - value, 100))
                for name, value in zip(self.names, rights, strict=True)
            }
            report.outcome.evaluation = Evaluated(each, frozenset({"c"}) if self.config.novel else frozenset())
        return report

    def go(self, number: int, **refused: str) -> None:
        """Let a round be over, and select it if its validation examples say so."""
        report = self.report(number)
        self.folder.round_done(report)
        metrics = report.outcome.evaluation.metrics() if report.outcome.evaluation else {}
        if metrics and metrics["val_mean"] > self.best:
            self.best = metrics["val_mean"]
            self.folder.selected(Selection(number, metrics, {}), self.state, self.roster)

    def begin(self, name: str) -> None:
        """Begin a strategy."""
        super().begin(name)
        self.best = 0.0


def recorded(path: Path, **changes: object) -> Scored:
    """Return a run that is not over: fedavg is best on validation examples, and so worst on test examples."""
    run = Scored(path, config=some_config(**changes))
    falls = {2: (40, 41, 42), 4: (50, 50, 53), 6: (45, 47, 44)}
    rises = {2: (40, 41, 42), 4: (50, 50, 53), 6: (90, 89, 91)}
    run.scores = {"pfedhn": falls, "local": falls, "fedavg": rises}
    return run


def test_a_folder_is_read_by_validation_examples_at_the_selected_round(tmp_path: Path) -> None:
    advice = advise_on(recorded(tmp_path / "run", baselines=("local", "fedavg")).whole())
    assert (advice.strategy, advice.sure) == ("fedavg", True)
    assert advice.scores == {"pfedhn": pytest.approx(51), "local": pytest.approx(51), "fedavg": pytest.approx(90)}
    assert not any("at its end" in line for line in advice.says), "only what was not chosen counts"


def test_novel_clients_have_no_say(tmp_path: Path) -> None:
    advice = advise_on(recorded(tmp_path / "run", baselines=("local", "fedavg"), clients=3, novel=33).whole())
    assert advice.scores["fedavg"] == pytest.approx(89.5), "clients a and b"


def test_a_run_that_is_not_over_gives_no_advice(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    run.begin("pfedhn")
    for number in range(1, 7):
        run.go(number)
    run.begin("local")
    for number in range(1, 6):
        run.go(number)
    with pytest.raises(ConfigError, match=r"^[^:]*/run: the run is not over; go on with --resume$"):
        advise_on(run.path)
    run.folder.end()
    assert advise_on(run.path).strategy == "local"
    with pytest.raises(ConfigError, match="expected two strategies"):
        advise_on(recorded(tmp_path / "alone", baselines=()).whole())


def test_who_brings_a_network_is_in_the_roster(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run").whole()
    path = run / "roster.json"
    roster = json.loads(path.read_text())
    assert [member.own for member in read_members(run).clients] == [False] * 3
    roster["clients"][0]["about"] |= {"types": []}  # told that there is one
    roster["clients"][2]["about"] |= {"graph": "{}"}
    path.write_text(json.dumps(roster))
    assert [member.own for member in read_members(run).clients] == [True, False, True]


def test_a_damaged_folder_is_told_in_one_line(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run").whole()
    with (run / "clients.jsonl").open("a") as file:
        file.write('{"round": 4, "client": "a", "val_accuracy": "much"}\n')
    with pytest.raises(ConfigError, match=r"^[^:]*/run is damaged \(TypeError"):
        advise_on(run)
