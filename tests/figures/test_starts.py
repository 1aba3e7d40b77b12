"""The table of starts and rates: means over the seeds that a row's variants share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperbloom
from figures.starts import (
    AS_WRITTEN,
    BODY,
    DEFAULT,
    EARLIER,
    FIXED,
    LARGE,
    MEAN,
    NEAR,
    SAME,
    SMALL,
    STEPS,
    changed,
    stops,
    table,
    variants,
)
from hyperbloom.common import models
from hyperbloom.common.config import make_run_config
from hyperbloom.common.wire.orders import TrainOrder, TrainResult
from tests.strategies.conftest import introduction, joined, play, turn

TOP = Path(__file__).parents[2]


def line(variant: str, seed: int, selected: float) -> dict[str, Any]:
    """Return a result on the first set with large networks."""
    return {"set": LARGE[0], "variant": variant, "rounds": 40, "seed": seed, "selected": selected}


def test_a_row_has_the_seeds_of_all_its_variants() -> None:
    lines = [line(EARLIER, seed, 90.0 + seed) for seed in range(3)]
    lines += [line("0.001, constant", 2, 89.5), line(AS_WRITTEN, 0, 88.0), line(SAME, 0, 88.5), line(SAME, 2, 89.0)]
    starts, rates, _, steps, _ = table(lines).split("\n\n")
    assert starts.splitlines()[2].startswith(f"| {LARGE[0]} | 40 | 1 |") and "| 88.0 |" in starts
    assert "| 40 | 1 | 89.5 |" in rates and "| 92.0 |" in rates
    assert LARGE[0] not in steps


def test_large_networks_are_run_with_other_rates_with_the_first_seed() -> None:
    assert "0.02, cosine" in variants(LARGE[0], 0) and variants(LARGE[0], 1) == [
        AS_WRITTEN,
        SAME,
        FIXED,
        EARLIER,
        DEFAULT,
    ]


def test_short_runs_compare_whether_training_begins_nearer_as_the_rate_decays_and_long_ones_the_steps() -> None:
    assert variants(SMALL[0], 0, 10) == [FIXED, EARLIER] and variants(LARGE[0], 0, 10) == []
    assert (
        variants(SMALL[0], 0, 80) == []
        and variants(SMALL[0], 0, 200) == [DEFAULT]
        and variants(LARGE[-1], 0, 80) == list(STEPS)
    )


@pytest.mark.parametrize(
    ("variant", "examples", "body", "head"),
    [
        (FIXED, 100, 0.0, 0.0),
        (DEFAULT, 100, 0.5, 0.5),
        (EARLIER, 100, 0.5, 0.5),
        (EARLIER, 4000, 0.875, 0.875),
        (BODY, 4000, 0.0, 0.875),
        (MEAN, 4000, 0.0, 0.875),
        (NEAR, 4000, 0.125, 0.875),
    ],
)
def test_training_begins_where_a_variant_says(variant: str, examples: int, body: float, head: float) -> None:
    """In the third of four rounds, where the cosine has half of the rate."""
    config = make_run_config({"clients": 1, "rounds": 4}, {}, "test")
    algorithm = joined(config, introduction("a", size=config.sizes[0], train_examples=examples))
    client, sent = algorithm.clients[0], list[Any]()

    def train(name: str, order: TrainOrder) -> TrainResult:
        assert order.weights is not None
        sent.append(order.weights)
        return TrainResult(0.1, replace(order.weights, values=torch.ones_like(order.weights.values)))

    with changed(variant):
        for number in (1, 2):
            play(algorithm.round(turn(algorithm, number)), train)
        written = algorithm.learner.generate([client.row], algorithm.head_of(client))[0]
        own = sent[1].values + 1  # the only client: the network for all has moved by all of its change
        used = algorithm.personal([client])[0].values
        play(algorithm.round(turn(algorithm, 3)), train)
    last = models.head_layout(algorithm.setting.spec).numel
    shares = torch.full_like(own, body)
    shares[len(own) - last :] = head
    torch.testing.assert_close(sent[2].values, torch.lerp(written, own, shares))
    scored = torch.full_like(own, 0.25 if variant == NEAR else 1.0)
    scored[len(own) - last :] = 1.0
    torch.testing.assert_close(used, torch.lerp(written, own, scored))


def test_rounds_of_fedavg_are_fedavgs_and_deviations_begin_at_zero_after_them() -> None:
    """The oracle is the strategy `fedavg` itself, with clients of unlike sizes."""
    used: dict[str, list[torch.Tensor]] = {}
    with changed("10 rounds of FedAvg first"):
        for strategy in ("fedavg", "pfedhn"):
            config = make_run_config({"strategy": strategy, "clients": 2, "rounds": 40}, {}, "test")
            sizes = {"a": 100, "b": 300}
            about = [introduction(n, size=config.sizes[0], train_examples=examples) for n, examples in sizes.items()]
            algorithm = joined(config, *about)

            def train(name: str, order: TrainOrder) -> TrainResult:
                assert order.weights is not None
                moved = order.weights.values * 0.1 + (1.0 if name == "a" else 2.0)
                returned = moved if order.reply == "weights" else moved - order.weights.values
                return TrainResult(0.1, replace(order.weights, values=returned))

            used[strategy] = []
            for number in range(1, 13):
                play(algorithm.round(turn(algorithm, number)), train)
                used[strategy].append(algorithm.personal(list(algorithm.clients.values()))[1].values.clone())
    for number in range(10):
        torch.testing.assert_close(used["pfedhn"][number], used["fedavg"][number])
    assert not torch.allclose(used["pfedhn"][10], used["fedavg"][10])


def test_a_run_with_patience_ends_where_the_scores_of_the_whole_run_say() -> None:
    values = {"clients": 4, "cohort": 2, "rounds": 30, "eval_every": 1, "gains": False, "local": {"steps": 2}}
    values |= {"data": {"name": "heart-disease", "split": "owner"}}
    whole = hyperbloom.run(values)
    scores = {row["round"]: row["val_mean"] for row in whole.metrics if "val_mean" in row}
    for patience, (end, best) in stops(make_run_config(values, {}, "test"), scores).items():
        ended = hyperbloom.run({**values, "patience": int(patience)})
        found = {row["round"]: row["val_mean"] for row in ended.metrics if "val_mean" in row}
        assert (max(found), round(max(found.values()), 2)) == (end, best)
