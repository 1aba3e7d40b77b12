"""Hostile clients harm the honest ones, whose scores alone are reported."""

import pytest

from figures import robust
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.mark.slow
def test_hostile_clients_harm_the_honest_ones() -> None:
    data = DataConfig(split="shares", max_train=20)
    local = LocalConfig(steps=15, learning_rate=0.005, schedule="constant")  # as in the study
    config = RunConfig(clients=10, cohort=10, rounds=4, eval_every=4, checkpoint_every=0, data=data, local=local)
    scores = {attack: robust.accuracy(attack, "none", config) for attack in robust.ATTACKS}
    assert scores.keys() == {"none", "sign", "labels"}
    assert max(scores["sign"], scores["labels"]) < scores["none"] < 100
    assert robust.accuracy("sign", "clip", config) != scores["sign"]


def test_a_cell_is_the_mean_over_seeds_and_each_of_them() -> None:
    line = {"start": "common", "attack": "sign", "defence": "clip"}
    lines = [line | {"accuracy": 40.0}, line | {"accuracy": 50.0}, line | {"start": "hypernetwork", "accuracy": 0.0}]
    assert robust.table(lines, "common").splitlines()[2:] == [
        "| none |  |  |",
        "| signs flipped, times five |  | 45.0 (40.0, 50.0) |",
        "| labels flipped |  |  |",
    ]
