"""Does the federation pay for this client? Its models from the federation beside one that it trains alone."""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hyperbloom.client.work.client import Client, enough_memory
from hyperbloom.client.work.evaluation import count_score, keep_scored, personal_model
from hyperbloom.client.work.networks import Loaded, load, load_alone, loaded_network
from hyperbloom.client.work.own_network import Fixed, tensors_of
from hyperbloom.client.work.scoring import EVALUATION_BATCH, evaluate, respond, score_of, settle_norms
from hyperbloom.client.work.sgd import Flat, train
from hyperbloom.common.config import decay
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import WireError
from hyperbloom.common.gains import MIXTURES, MODELS, RESAMPLES, SURE, Gain, interval, sentence, share_interval
from hyperbloom.common.layout import Layout
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.tasks.measures import ACCURACY
from hyperbloom.common.wire.orders import REFINED, CompareOrder, CompareResult, SplitScore

log = logging.getLogger("hyperbloom.client")

TUNING_ROUNDS = 10  # most rounds of fine-tuning
FEWEST = 6  # test examples or groups that can show a difference: five are all on one side in 1 of 16 cases by chance
MOST_COMPARED = 10**6  # most steps that a client trains alone


class _Trial:
    """One of the models that are compared: scores and answers on validation and test examples, losses, and tensors."""

    failed = False  # training diverged before it had learned anything

    def __init__(self, network: Loaded, module: nn.Module, val: Examples, test: Examples, metrics: tuple[str, ...]):
        found = [(data, *respond(module, data)) for data in (val, test)]
        self.val, self.test = (score_of(*each, metrics, disclose=False) for each in found)
        self.answers, self.outputs = [answers.cpu() for _, answers, _, _ in found], found[0][2]
        self.losses = _losses(module, val)
        whole = network.module if module is network.tail else module
        self.tensors = {name: tensor.detach().clone() for name, tensor in tensors_of(whole).items()}


@enough_memory()
def compare(client: Client, order: CompareOrder) -> CompareResult:
    """Compare with training alone, tell this client's user, and keep the best model for `flower-client export`.

    Raises:
        HyperbloomError: the user allows no more scores. The user is told, and the model kept, all the same.
    """
    sgd = order.sgd
    if not order.metrics:
        raise WireError("order: expected metrics to compare by")
    if min(order.rounds, sgd.steps, sgd.batch_size) < 1 or order.rounds * sgd.steps > MOST_COMPARED:
        raise WireError(f"order: expected 1 to {MOST_COMPARED} steps, found {order.rounds} rounds of {sgd.steps}")
    module = loaded_network(client, order.target, order.weights).module
    return count_score(client, order, module, partial(_compared, client, order))


def _compared(client: Client, order: CompareOrder) -> CompareResult:
    with client.hide_own_model():
        trials = dict(_trials(client, order))
    gain, name = _gain(trials, client.test_data, order.metrics[0]), client.settings.client_id
    chosen, text = (gain.chosen, sentence(name, gain, order.metrics[0])) if gain else ("personal", "")
    why = f"the test examples ({len(client.test_data)}) are too few or too alike for {title_of(order.metrics[0])}"
    why = f"no comparison: {why if 'alone' in trials else 'training alone diverged'}"
    # A line of the log begins with the client's name. The run's id ends with the strategy.
    log.info("%s [run %s]", text.removeprefix(name).lstrip(": ") or why, order.scope.run_id)
    keep_scored(client, order, trials[chosen].tensors, trials[chosen].test, text, lone=chosen == "alone")
    disclosed = client.settings.disclose_gain
    if disclosed:  # that there is no gain tells something of the examples, too
        client.releases.spend("scores", len(trials))
    return CompareResult(trials["personal"].val, trials["personal"].test, gain=gain if disclosed else None)


def _trials(client: Client, order: CompareOrder) -> Iterator[tuple[str, _Trial]]:
    """Yield the models that can be compared, by their names in `MODELS`."""
    network, as_sent = load(client, order.scope, order.target, order.weights), replace(order, refinement=None)
    tuning, ends = min(order.rounds, TUNING_ROUNDS), dict[str, _Trial]()

    def score(asked: CompareOrder) -> _Trial:
        module, (_, val, test) = personal_model(client, asked, network)
        return _Trial(network, module, val, test, order.metrics)

    def tune() -> _Trial:
        return _trained(client, as_sent, network, tuning, "tune")

    refinement, copied = order.refinement, order.target.private == "copy"
    distilled = refinement is not None and refinement.part not in REFINED
    given = order.common or (order.weights if copied else None)
    if refinement and not distilled:
        ends["common"], ends["personal"] = score(as_sent), score(order)
        ends["common-tuned"] = tune()
    else:
        if copied:
            network.shared.load(network.personal.values)
        ends |= {"personal": score(order)} if distilled else {"personal": score(order), "tuned": tune()}
        if given is not None:
            given.check(network.shared.layout, torch.float32)
            network.shared.load(given.values)
            ends["common"], ends["common-tuned"] = score(as_sent), tune()
    yield from ends.items()
    for name, (first, second, share) in MIXTURES.items():
        if {first, second} <= ends.keys():
            yield name, _mixed(client, order, network, ends[first], ends[second], share)
    rounds = order.rounds + (0 if distilled else tuning)  # no fewer steps than the others
    if alone := _alone(client, order, rounds):
        yield "alone", alone


@torch.no_grad()
def _mixed(client: Client, order: CompareOrder, network: Loaded, first: _Trial, second: _Trial, share: float) -> _Trial:
    """Return the model whose weights lie between those of two others."""
    base, data = network.on_features(client, client.train_data, client.val_data, client.test_data)
    base = base.network if isinstance(base, Fixed) else base
    names = [name for name, _ in base.named_parameters() if name in first.tensors]
    module = Fixed(base, {name: torch.lerp(first.tensors[name], second.tensors[name], share) for name in names})
    settle_norms(module, data[0])
    return _Trial(network, module, data[1], data[2], order.metrics)


def _alone(client: Client, order: CompareOrder, rounds: int) -> _Trial | None:
    """Return the model that the client trains alone, or None if it diverges; runs and baselines that agree share it."""
    target = replace(order.target, private="all", hypernetwork=None)
    key = order.scope.seed, order.sgd, order.decays, rounds, target, order.metrics
    if client.lone is None or client.lone[0] != key:
        network = load_alone(client, order.scope, order.target)
        client.lone = key, _trained(client, replace(order, refinement=None), network, rounds)
    trial: _Trial = client.lone[1]
    return None if trial.failed else trial


def _trained(client: Client, order: CompareOrder, network: Loaded, rounds: int, *purpose: str) -> _Trial:
    """Train a network in place, as often as is best on validation examples. Alone, its batches are those of `local`."""
    network.holds, network.personal.momentum = None, None
    if network.has_copy:
        network = replace(network, personal=Flat(Layout(()), network.personal.values.new_empty(0)))
    module, (data, val, test) = personal_model(client, order, network)
    best, kept, at, failed = None, list[Tensor](), 0, False
    for number in range(rounds + 1):
        if number:
            rate = order.sgd.learning_rate * (decay(number, rounds) if order.decays else 1.0)
            sgd, seed = replace(order.sgd, learning_rate=rate), client.seed(order.scope, number, *purpose)
            if not math.isfinite(train(replace(network, module=module), data, sgd, seed)):
                failed = not at
                break
        if number % 2 ** max(0, number.bit_length() - 3) == 0 or number == rounds:  # ever rarer, 4 for each doubling
            settle_norms(module, data)
            rank = _rank(evaluate(module, val, order.metrics), order.metrics[0])
            if best is None or rank > best:
                best, kept, at = rank, [part.values.clone() for part in network.parts], number
    for part, values in zip(network.parts, kept, strict=True):
        part.load(values)
    settle_norms(module, data)
    trial = _Trial(network, module, val, test, order.metrics)
    trial.failed = failed
    return trial


def _rank(score: SplitScore, metric: str) -> tuple[float, float]:
    """Return what is larger for better scores: by the selecting metric, and the loss where that is equal."""
    value = score.value(metric)
    signed = -math.inf if value is None else scale_of(metric).sign * value
    return signed, -score.loss if math.isfinite(score.loss) else -math.inf


def _gain(trials: Mapping[str, _Trial], test: Examples, metric: str) -> Gain | None:
    """Return the gain of the chosen model; None if the metric is not defined on the test examples, or none is alone."""
    found = {name: trials[name].test.value(metric) for name in MODELS if name in trials}
    values = {name: value for name, value in found.items() if value is not None}
    if "alone" not in trials or len(values) < len(found) or len(_units(test)) < 2:
        return None
    chosen = _choose(trials, metric)
    gained = scale_of(metric).sign * (values[chosen] - values["alone"])
    bounds = (0.0, 0.0) if chosen == "alone" else _bounds(trials[chosen], trials["alone"], test, metric)
    return Gain(chosen, gained, *bounds, tuple(values), tuple(values.values()))


def _choose(trials: Mapping[str, _Trial], metric: str) -> str:
    """Return the federation's model with the smallest validation loss, if it is surely smaller than that of alone.

    The best of many on a few examples is often so by chance, and a site must not lose by the choice. The loss tells two
    models apart with fewer examples than the metric does, which must only be no worse.
    """
    ranks = {name: _rank(trials[name].val, metric) for name in MODELS if name in trials}
    best = max((name for name in ranks if name != "alone"), key=lambda name: ranks[name][1])
    gained = (trials["alone"].losses - trials[best].losses).numpy()
    sure = len(gained) > 1 and gained.mean() > SURE * gained.std(ddof=1) / math.sqrt(len(gained))
    return best if sure and ranks[best][0] >= ranks["alone"][0] else "alone"


@torch.no_grad()
def _losses(module: nn.Module, data: Examples) -> Tensor:
    """Return the mean loss over the labels of each example, or of each group, `(N,)`, in double precision."""
    found = []
    for start in range(0, len(data), EVALUATION_BATCH):
        some = slice(start, start + EVALUATION_BATCH)
        losses, present = data.task.losses(module(data.inputs[some]).cpu(), data.labels[some].cpu())
        counted = (torch.ones_like(losses) if present is None else present).double().view(len(losses), -1)
        found.append((losses.double().view_as(counted) * counted).sum(1) / counted.sum(1).clamp_min(1))
    losses = torch.cat(found)
    return losses if data.groups is None else torch.stack([losses[rows].mean() for rows in _units(data)])


def _units(data: Examples) -> list[np.ndarray]:
    """Return the rows of each group, such as a patient's, or each row by itself if there are no groups."""
    groups = np.arange(len(data)) if data.groups is None else data.groups
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def _bounds(mine: _Trial, alone: _Trial, data: Examples, metric: str) -> tuple[float, float]:
    """Return the 95 % interval of what a model gains over training alone on test examples."""
    sign, labels, task = scale_of(metric).sign, data.labels.cpu(), data.task
    both, units = [(each.answers[1], each.outputs) for each in (mine, alone)], _units(data)
    of_counts, counts = task.metrics[metric].counted, list[Tensor]()
    if of_counts and labels.ndim == 3:  # masks have too many pixels to count them in each resample
        masks = [slice(row, row + 1) for row in range(len(data))]
        counts = [torch.stack([task.counts(a[mask], labels[mask], k) for mask in masks]) for a, k in both]

    def gained(drawn: np.ndarray) -> float:
        some = torch.from_numpy(drawn if data.groups is None else np.concatenate([units[unit] for unit in drawn]))
        if of_counts and counts:
            values = [float(of_counts(each[some].sum(0)).nanmean()) for each in counts]
        else:
            found = [task.measure(answers[some], labels[some], outputs, (metric,)) for answers, outputs in both]
            values = [each.values.get(metric, math.nan) for each in found]
        return sign * (values[0] - values[1])

    if task.metrics[metric] is ACCURACY and labels.ndim == 1 and data.groups is None:  # an answer is right or wrong
        low, high = share_interval(np.array([gained(np.array([row])) for row in range(len(data))]))
    else:
        few = task.metrics[metric].scored is not None  # such metrics take milliseconds
        low, high = interval(gained, len(units), RESAMPLES // (5 if few else 1))
    return (low, high) if len(units) >= FEWEST else (min(low, 0.0), max(high, 0.0))
