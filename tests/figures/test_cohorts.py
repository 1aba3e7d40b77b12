"""The study of cohorts plays rounds, and asynchronous replies, without a grid."""

from itertools import islice

import pytest
import torch

from figures.cohorts import Study
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
