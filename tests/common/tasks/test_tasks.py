"""Tasks: their losses against their definitions, what labels they take, how they weigh classes."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperbloom.client.work.sgd import Flat, FlatPart, Network, train
from hyperbloom.common.data import Examples
from hyperbloom.common.errors import ConfigError, DataError, ModelError
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build
from hyperbloom.common.tasks import CLASSIFICATION, TASKS, Task, TaskSpec, make_task
from hyperbloom.common.wire.orders import SGD
from hyperbloom.strategies.exchange import Update
from hyperbloom.strategies.fedavg import average

MULTILABEL, REGRESSION, MASKS = (make_task(TaskSpec(name)) for name in ("multilabel", "regression", "segmentation"))
BALANCED = make_task(TaskSpec("classification", balanced=True))


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(task: Task, inputs: Tensor, labels: Tensor, module: nn.Module, sgd: SGD, seed: int = 0) -> Tensor:
    """Return a network's weights after local training."""
    part = FlatPart(module, Layout.of(module))
    network = Network(module, part, Flat(Layout(()), torch.empty(0)))
    train(network, Examples(inputs, labels).under(task), sgd, seed)
    return part.values


def test_an_unknown_task_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"task: expected one of auto, classification, multilabel, .* found 'ranking'"
    ):
        make_task(TaskSpec("ranking"))


def test_a_task_that_lacks_a_method_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "bare", type("Bare", (Task,), {"check": lambda self, labels, outputs: None}))
    with pytest.raises(ConfigError, match=r"^task: expected bare to define counts, losses, metrics, show as well$"):
        make_task(TaskSpec("bare"))


@pytest.mark.parametrize(
    ("task", "labels", "outputs"),
    [
        (CLASSIFICATION, torch.tensor([0, 3]), 3),
        (CLASSIFICATION, torch.tensor([0.5, 1.0]), 3),
        (MULTILABEL, torch.tensor([[0.0, 2.0]]), 2),
        (MULTILABEL, torch.tensor([[0.0, 1.0]]), 3),
        (REGRESSION, torch.tensor([1.0, torch.nan]), 1),
        (REGRESSION, torch.tensor([1, 2]), 1),
        (MASKS, torch.tensor([[[0, 4]]]), 4),
        (MASKS, torch.tensor([0, 1]), 4),
    ],
)
def test_labels_of_another_form_are_refused(task: Task, labels: Tensor, outputs: int) -> None:
    with pytest.raises(DataError, match="expected"):
        task.check(labels, outputs)


def test_the_loss_of_several_labels_is_that_of_the_known_ones_alone() -> None:
    outputs, labels = noise(6, 4), (noise(6, 4, seed=4) > 0).float()
    labels[0, 1:] = labels[3] = torch.nan
    known = ~labels.isnan()
    expected = F.binary_cross_entropy_with_logits(outputs[known], labels[known])
    torch.testing.assert_close(MULTILABEL.loss(outputs, labels), expected)
    total, count = MULTILABEL.total(outputs, labels)
    assert (total / count, count) == (pytest.approx(expected.item()), 17)
    assert MULTILABEL.loss(outputs[3:4], labels[3:4]).item() == 0.0


def test_the_loss_of_masks_is_cross_entropy_and_the_dice_of_each_class_but_the_background() -> None:
    outputs, labels = noise(5, 3, 4, 6), torch.randint(3, (5, 4, 6), generator=torch.Generator().manual_seed(2))
    probabilities, dice = outputs.softmax(1), []
    for each in (1, 2):
        told, true = probabilities[:, each].flatten(), (labels == each).float().flatten()
        dice.append(2 * (told @ true) / (told.sum() + true.sum()))
    expected = F.cross_entropy(outputs, labels) + 1 - (dice[0] + dice[1]) / 2
    torch.testing.assert_close(MASKS.loss(outputs, labels), expected, atol=2e-3, rtol=0)  # but for the smoothing
    perfect = 100.0 * F.one_hot(labels, 4).movedim(3, 1)  # class 3 is nowhere, and nobody says so
    assert MASKS.loss(perfect, labels).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", list(TASKS))
def test_a_share_of_zero_leaves_an_example_out(name: str) -> None:
    task = make_task(TaskSpec(name))
    labels = {
        "classification": torch.tensor([0, 1, 2, 0]),
        "multilabel": torch.tensor([[1.0, 0.0, torch.nan]] * 4),
        "regression": noise(4, 3),
        "segmentation": torch.randint(3, (4, 2, 2)),
    }[name]
    outputs = noise(4, 3, 2, 2) if name == "segmentation" else noise(4, 3)
    found = task.loss(outputs, labels, share=torch.tensor([0.5, 0.0, 0.5, 0.0]))
    torch.testing.assert_close(found, task.loss(outputs[::2], labels[::2]))


def test_one_label_trains_as_two_classes_do() -> None:
    """A logit z of one label is the difference of two classes' logits, of which half the rate moves each."""
    inputs, labels = noise(40, 5), (noise(40, seed=9) > 0).long()
    one, two = nn.Linear(5, 1), nn.Linear(5, 2)
    with torch.no_grad():
        for single, both in zip(one.parameters(), two.parameters(), strict=True):
            both.copy_(torch.cat([-single, single]) / 2)
    sgd = SGD(30, 8, 0.2, 0.9, 0.0, 50.0)
    trained(MULTILABEL, inputs, labels.float().unsqueeze(1), one, sgd)
    trained(CLASSIFICATION, inputs, labels, two, SGD(30, 8, 0.1, 0.9, 0.0, 50.0))
    torch.testing.assert_close(two(inputs)[:, 1:] - two(inputs)[:, :1], one(inputs), atol=1e-4, rtol=1e-4)


def test_moments_only_change_the_units_of_the_answers() -> None:
    labels = 50 + 7 * noise(30, 2)
    task = make_task(TaskSpec("regression", (50.0, 49.0), (7.0, 8.0)))
    outputs = noise(30, 2, seed=5)
    errors = (task.answers(outputs) - labels) / torch.tensor([7.0, 8.0])
    torch.testing.assert_close(task.loss(outputs, labels), errors.square().mean() / 2)


def test_balanced_weights_are_resampling_in_expectation() -> None:
    labels = torch.tensor([0] * 90 + [2] * 9 + [3])  # class 1 has no example here
    outputs = noise(100, 4)
    weighted = BALANCED.loss(outputs, labels, BALANCED.weights(labels))
    by_class = [F.cross_entropy(outputs[labels == each], labels[labels == each]) for each in (0, 2, 3)]
    torch.testing.assert_close(weighted, torch.stack(by_class).mean())
    # A batch is an unbiased estimate: its mean over all pairs of examples is the whole.
    weights = BALANCED.weights(labels)
    halves = [BALANCED.loss(outputs[at::10], labels[at::10], weights[at::10]) for at in range(10)]
    torch.testing.assert_close(torch.stack(halves).mean(), weighted)
    several = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [0.0, 0.0], [0.0, 0.0]])
    assert MULTILABEL.weights(several).tolist() == [[2.0, 1.0], *[[pytest.approx(2 / 3), 1.0]] * 3]
    with pytest.raises(ConfigError, match=r"^class_weights: expected none, because regression has no classes$"):
        make_task(TaskSpec("regression", balanced=True))


def test_masks_need_a_network_that_answers_for_pixels() -> None:
    assert MASKS.auto_model((1, 64, 64)) == "unet"
    network = build(ModelSpec("auto", "S", (1, 8, 12), 3).resolved(MASKS))
    assert network(noise(2, 1, 8, 12)).shape == (2, 3, 8, 12)
    with pytest.raises(ModelError, match=r"expected a network with logits .* such as unet"):
        MASKS.loss(noise(2, 3), torch.zeros(2, 8, 8, dtype=torch.int64))
    with pytest.raises(ModelError, match="sides that are multiples of 4"):
        build(ModelSpec("unet", "S", (1, 9, 8), 3))


def test_people_are_told_names() -> None:
    assert CLASSIFICATION.show(torch.tensor([[0.0, 0.0, 9.0]]), "abc")[0]["class"] == "c"
    assert MULTILABEL.show(torch.tensor([[-9.0, 9.0]]), ["x", "y"])[0]["labels"] == ["y"]
    task = make_task(TaskSpec("regression", (10.0,), (2.0,)))
    assert task.show(torch.tensor([[1.5]]), ["age (years)"]) == [{"age (years)": pytest.approx(13.0)}]
    told = MASKS.show(torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]), ["ground", "cell"])
    assert told == [{"mask": [[0, 1]], "shares": {"ground": 0.5, "cell": 0.5}}]


def test_fedavg_of_linear_models_reaches_the_least_squares_solution() -> None:
    """Three unequal clients, all of them in each round, a full batch a step: their mean change is gradient descent."""
    inputs, sizes = noise(60, 4), [8, 17, 35]
    labels = 40 + 6 * inputs @ torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.0, 3.0], [2.0, 1.0]]) + noise(60, 2, seed=6)
    task = make_task(TaskSpec("regression", tuple(labels.mean(0).tolist()), tuple(labels.std(0).tolist())))
    parts = list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
    module = nn.Linear(4, 2)
    layout, client = Layout.of(module), Mock()
    mean = layout.flatten(dict(module.named_parameters()))
    for _ in range(150):
        updates = []
        for some, truth in parts:
            one = nn.Linear(4, 2)
            one.load_state_dict(layout.views(mean.clone()))
            returned = trained(task, some, truth, one, SGD(1, 64, 0.4, 0.0, 0.0, 1e6))
            updates.append(Update(client, client, None, returned, layout, len(some)))
        mean = average(updates)
    module.load_state_dict(layout.views(mean))
    wanted, *_ = np.linalg.lstsq(np.c_[inputs.numpy(), np.ones(60)], labels.numpy(), rcond=None)
    expected = np.c_[inputs.numpy(), np.ones(60)] @ wanted
    np.testing.assert_allclose(task.answers(module(inputs)).detach().numpy(), expected, atol=1e-3)
