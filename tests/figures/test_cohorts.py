"""The study of cohorts plays rounds, and asynchronous replies, without a grid."""

from itertools import islice

import pytest
import torch

from figures.cohorts import Study, table
from hyperbloom.common.data import DataSpec, load_client_data


@pytest.fixture
def study() -> Study:
    """Return three clients with few digits each."""
    specs = [DataSpec(partition=index, partitions=3, max_train=40) for index in range(3)]
    return Study([load_client_data(spec) for spec in specs], "mlp", 0)


def test_rounds_and_replies_are_learned_from(study: Study) -> None:
    states = [study.learner.state()["embeddings"].clone()]
    assert study.round(1, 2, "mean") > 0
    states.append(study.learner.state()["embeddings"].clone())
    seconds = list(islice(study.asynchronous(2, corrected=True), 4))
    assert seconds == sorted(seconds)
    states.append(study.learner.state()["embeddings"].clone())
    assert not torch.equal(states[0], states[1]) and not torch.equal(states[1], states[2])
    assert 0 < study.accuracy() < 100


def test_rows_of_asynchronous_replies_come_last_and_have_no_rounds() -> None:
    def line(rule: str, cohort: int) -> dict[str, object]:
        curve = {"client_steps": [0.0, 10, 20], "seconds": [0.0, 1.0, 2.4], "accuracy": [1.0, 50.0, 60.0]}
        return {"data": "mnist", "late": False, "rule": rule, "cohort": cohort, **curve}

    lines = [line("asynchronous, plain", 10), line("mean", 10), line("proximal", 10), line("proximal", 1)]
    assert table([*lines, line("mean", 5) | {"late": True}], "mnist", False).splitlines() == [
        "| rule | C | after 10 / 20 client steps | rounds | seconds |",
        "|---|---:|---|---:|---:|",
        "| the paper's | 1 | 50.0 / 60.0 | 20 | 2 |",
        "| `proximal` | 10 | 50.0 / 60.0 | 2 | 2 |",
        "| `mean` | 10 | 50.0 / 60.0 | 2 | 2 |",
        "| asynchronous, plain | 10 | 50.0 / 60.0 | - | - |",
    ]
