"""The arithmetic of training at once is that of training one after the other, up to float rounding."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hyperbloom.client.work.sgd import Flat, FlatPart, Network, train
from hyperbloom.client.work.vectorised import train_rows
from hyperbloom.common.data import Examples
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, body_layout, build, full_layout, head_layout
from hyperbloom.common.tasks import TaskSpec, make_task
from tests.slow import quick

from ..orders import train_order

SHAPES = {"mlp": (6,), "lenet": (1, 16, 16), "omniglot": (1, 16, 16)} | {f"cnn-{n}": (1, 9, 8) for n in range(1, 6)}
SHAPES |= {f"cnn-64-{n}": (1, 16, 16) for n in (2, 3, 4)} | {"unet": (1, 4, 8)}
PLAIN = TaskSpec()
LENGTHS = (3, 5, 30)  # batches of five: clients with fewer examples than a batch, with just as many, and with more


def split(spec: ModelSpec, private: str) -> tuple[Layout, Layout]:
    """Return the layouts of the shared and the personal part."""
    full = full_layout(spec)
    shared = {"none": full, "head": body_layout(spec), "body": head_layout(spec), "all": Layout(())}[private]
    return shared, Layout(tuple(item for item in full.shapes if item not in shared.shapes))


def some_examples(name: str, count: int, dtype: torch.dtype, device: str, spec: TaskSpec = PLAIN) -> Examples:
    """Return labelled noise for a task, masks for a U-Net; float64 inputs get past the check for float32 on purpose."""
    generator = torch.Generator().manual_seed(count)
    inputs = 3 * torch.randn(count, *SHAPES[name], generator=generator)
    if name == "unet":
        spec = replace(spec, name="segmentation")
    labels = {
        "classification": torch.randint(4, (count,), generator=generator),
        "multilabel": torch.tensor([0.0, 1.0, torch.nan])[torch.randint(3, (count, 4), generator=generator)],
        "regression": 5 + 2 * torch.randn(count, 4, generator=generator),
        "segmentation": torch.randint(4, (count, *SHAPES[name][1:]), generator=generator),
    }[spec.name]
    data = Examples(inputs, labels).under(make_task(spec)).to(device)
    object.__setattr__(data, "inputs", data.inputs.to(dtype))
    if labels.is_floating_point():
        object.__setattr__(data, "labels", data.labels.to(dtype))
    return data


def three_rounds(
    name: str, private: str, dtype: torch.dtype, device: str = "cpu", task: TaskSpec = PLAIN, steps: int = 4
) -> Sequence[tuple[Tensor, Tensor]]:
    """Train three clients in both ways; returns pairs of everything that either leaves, one by one first.

    The first client's personal part comes with momentum from the start, as if it had trained before the others.
    """
    spec = ModelSpec(name, "S", SHAPES[name], 4)
    torch.manual_seed(3)
    starts = [build(spec).to(device, dtype) for _ in LENGTHS]
    data = [some_examples(name, count, dtype, device, task) for count in LENGTHS]
    sgd = train_order(private, steps=steps, batch_size=5, clip=0.5, weights=None).sgd
    layouts = split(spec, private)
    alone = [tuple(FlatPart(module, layout) for layout in layouts) for module in starts]
    rows = [Flat(layouts[i], torch.stack([parts[i].values for parts in alone])) for i in range(2)]
    alone[0][1].momentum = torch.full_like(alone[0][1].values, 0.1)
    rows[1].momentum = torch.zeros_like(rows[1].values)
    rows[1].momentum[0] = 0.1
    sent = rows[0].values.clone()
    pairs = []
    for number in range(3):
        seeds = [10 * number + client for client in range(3)]
        losses = []
        for client, (shared, personal) in enumerate(alone):
            shared.load(sent[client])
            losses.append(train(Network(starts[client], shared, personal), data[client], sgd, seeds[client]))
        rows[0].load(sent)
        found = train_rows(Network(build(spec).to(device, dtype), *rows), data, sgd, seeds)
        pairs.append((torch.tensor(losses), found.cpu()))
        for one, together in zip(zip(*alone, strict=True), rows, strict=True):
            if together.layout.numel:
                assert together.momentum is not None
                pairs.append((torch.stack([part.values for part in one]), together.values.clone()))
                momenta = [part.momentum for part in one if part.momentum is not None]
                pairs.append((torch.stack(momenta), together.momentum.clone()))
        assert not torch.equal(sent, rows[0].values) or private == "all"
        sent = sent + 0.01
    return pairs


@pytest.mark.parametrize("private", quick(["none", "head", "all"], "head"))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_at_once_is_one_by_one_to_the_last_digits_of_float64(name: str, private: str) -> None:
    for one, together in three_rounds(name, private, torch.float64):
        tolerance = 1e-12 if one.dtype == torch.float64 else 1e-6  # losses are summed in float32
        torch.testing.assert_close(together, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("mlp", TaskSpec("classification", balanced=True)),
        ("mlp", TaskSpec("multilabel")),
        ("mlp", TaskSpec("multilabel", balanced=True)),
        ("mlp", TaskSpec("regression")),
        ("mlp", TaskSpec("regression", (5.0,) * 4, (2.0,) * 4)),
        ("unet", TaskSpec("segmentation", balanced=True)),
    ],
    ids=str,
)
def test_every_task_at_once_is_one_by_one(name: str, task: TaskSpec) -> None:
    for one, together in three_rounds(name, "head", torch.float64, task=task):
        tolerance = 1e-12 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(together, one, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["lenet", "mlp", "omniglot"])  # in others a ReLU may fall to either side of zero
def test_at_once_is_one_by_one_in_float32(name: str) -> None:
    for one, together in three_rounds(name, "head", torch.float32):
        torch.testing.assert_close(together, one, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("private", ["none", "head", "all"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_at_once_is_one_by_one_on_cuda(name: str, private: str) -> None:
    for one, together in three_rounds(name, private, torch.float64, "cuda"):
        tolerance = 1e-9 if one.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(together, one, rtol=tolerance, atol=tolerance)


def test_each_row_is_clipped_to_a_norm_of_its_own() -> None:
    layout = full_layout(ModelSpec("mlp", "S", (6,), 4))
    part = Flat(layout, torch.zeros(3, layout.numel))
    part.gradient.copy_(torch.tensor([1e-3, 1.0, 1e3])[:, None])
    part.clip(0.5)
    assert part.gradient.norm(dim=1).tolist() == pytest.approx([1e-3 * layout.numel**0.5, 0.5, 0.5], rel=1e-4)


def test_the_module_is_read_as_an_architecture_only() -> None:
    spec = ModelSpec("mlp", "S", (6,), 4)
    module = build(spec)
    layout, empty = split(spec, "none")
    before = layout.flatten(dict(module.named_parameters()))
    rows = Flat(layout, torch.randn(2, layout.numel)), Flat(empty, torch.empty(2, 0))
    data = [some_examples("mlp", count, torch.float32, "cpu") for count in (9, 30)]
    train_rows(Network(module, *rows), data, train_order(batch_size=5).sgd, [5, 6])
    assert torch.equal(layout.flatten(dict(module.named_parameters())), before)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_network_that_draws_numbers_has_no_axis_for_clients() -> None:
    """All would draw by the seed of the first, and no client would have the result that it has alone."""
    module = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    layout, data = Layout.of(module), some_examples("mlp", 30, torch.float32, "cpu")
    rows = layout.flatten(dict(module.named_parameters())).expand(2, -1)
    together = Network(module, Flat(layout, rows.clone()), Flat(Layout(()), rows.new_zeros(2, 0)))
    with pytest.raises(RuntimeError, match="random"):
        train_rows(together, [data, data], train_order(learning_rate=0.1).sgd, [0, 0])
    assert torch.equal(together.shared.values, rows)


class Averaging(nn.Module):
    """Keeps a moving average in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.flatten(1))
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs


def test_a_buffer_that_a_network_replaces_is_as_before() -> None:
    module, data = Averaging(), some_examples("mlp", 30, torch.float32, "cpu")
    layout = Layout.of(module)
    rows = layout.flatten(dict(module.named_parameters())).expand(2, -1)
    together = Network(module, Flat(layout, rows.clone()), Flat(Layout(()), rows.new_zeros(2, 0)))
    train_rows(together, [data, data], train_order(learning_rate=0.1).sgd, [0, 1])
    assert module.mean.tolist() == [0.0] * 4
