"""A newcomer: what it makes of its examples, what it says of them, what it keeps to itself."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbloom.client.newcomer.guarantee import Promise, noise_scale
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.newcomer import DECLINED, Newcomer
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.encoders import version_of
from hyperbloom.common.errors import ConfigError, DataError, HyperbloomError, ModelError, RefusedError, WireError
from hyperbloom.common.files.export import read_model
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import BACKBONE, ModelSpec, backbone_digest, backbone_shape, build, full_layout
from hyperbloom.common.newcomers import model_of
from hyperbloom.common.tasks import TaskSpec
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.pack import pack
from tests.common.models.backbones import VOCABULARY, text_folder

from .offers import CLASSES, DIGITS, DIM, SHAPE, expected, newcomer, offer

pytestmark = pytest.mark.usefixtures("without_onnx")


def test_without_a_promise_the_descriptor_is_the_encoders(tmp_path: Path) -> None:
    one, made = newcomer(tmp_path), offer()
    description = one.describe(made)
    assert isinstance(description, Description)
    torch.testing.assert_close(description.weights.values, expected(made, load_client_data(DIGITS).whole.inputs))
    assert [entry["epsilon"] for entry in Ledger(tmp_path / "state").read()] == [None]


def test_all_that_is_said_is_size_encoder_and_descriptor(tmp_path: Path) -> None:
    description = newcomer(tmp_path, promise=Promise(0.3, 0.01)).describe(offer())
    record = dict(pack(description)["hyperbloom"])
    assert record.keys() == {"size", "encoder_version", "tensors", "dtype", "values"}
    assert len(record["values"]) == 4 * DIM
    assert json.loads(record["tensors"]) == [["descriptor", [DIM]]]
    assert record["encoder_version"] == offer().encoder_version  # as it came


def test_with_a_promise_there_is_noise_of_its_scale_and_an_entry(tmp_path: Path) -> None:
    made, count = offer(), len(load_client_data(DIGITS).whole)
    sent = []
    for index in range(40):
        one = newcomer(tmp_path / str(index), promise=Promise(0.3, 0.001))
        sent.append(one.describe(made).weights.values.double())
    added = torch.stack(sent) - expected(made, load_client_data(DIGITS).whole.inputs).double()
    tail = made.weights.layout.views(made.weights.values)["tail.weight"]
    sigma = 2 * float(torch.linalg.matrix_norm(tail, 2)) / count * noise_scale(0.3, 0.001)
    # 200 squares of standard normal numbers: mean 200, standard deviation 20; noise from the system, so widely bounded
    assert 80 < float((added / sigma).square().sum()) < 320
    (entry,) = Ledger(tmp_path / "0" / "state").read()
    assert (entry["epsilon"], entry["delta"], entry["examples"], entry["server"]) == (0.3, 0.001, count, "box:9092")
    assert entry["sigma"] == pytest.approx(sigma, rel=5e-3)


def test_the_same_offer_again_costs_nothing_and_tells_nothing_new(tmp_path: Path) -> None:
    one = newcomer(tmp_path, promise=Promise(0.3, 0.01))
    first, second = one.describe(offer()), one.describe(offer())
    assert torch.equal(first.weights.values, second.weights.values)
    assert len(Ledger(tmp_path / "state").read()) == 1
    assert one.describe(offer(seed=1)) is DECLINED
    assert isinstance(one.failure, RefusedError) and "another encoder" in str(one.failure)
    assert len(Ledger(tmp_path / "state").read()) == 1


@pytest.mark.parametrize(
    ("change", "promise", "kind", "text"),
    [
        ({"sizes": ("L",)}, None, ConfigError, "--size: expected one of L, found S"),
        ({"num_classes": 3}, None, DataError, "expected inputs of shape (1, 8, 8) in 3 classes"),
        ({"model": "own"}, None, HyperbloomError, "does not know"),
        ({"encoder_version": "0"}, None, WireError, "the encoder is not the one"),
        ({"encoder": "deepset"}, None, WireError, "tensor"),
        ({"task": TaskSpec("sorting")}, Promise(0.3, 0.01), ConfigError, "task: expected one of"),
        ({"metric": "charm"}, Promise(0.3, 0.01), ConfigError, "charm"),
    ],
)
def test_what_does_not_fit_is_told_to_the_user_alone(
    tmp_path: Path, change: dict[str, object], promise: Promise | None, kind: type[Exception], text: str
) -> None:
    one = newcomer(tmp_path, promise=promise)
    assert one.describe(replace(offer(), **change)) is DECLINED  # type: ignore[arg-type]
    assert isinstance(one.failure, kind) and text in str(one.failure)
    assert Ledger(tmp_path / "state").read() == []


@pytest.mark.parametrize("wrong", [VOCABULARY, 1.5])
def test_rows_that_are_no_tokens_are_told_before_anything_is_spent(wrong: float, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[2.0, wrong, 0.0]], np.float32))
    data = DataSpec(str(tmp_path / "x.npy"), backbone=str(text_folder(tmp_path / "bert")))
    spec = ModelSpec(BACKBONE, "S", (3,), CLASSES, "head", data.backbone)
    what = {"model": BACKBONE, "adapt": "head", "input_shape": (3,), "backbones": (backbone_digest(spec),)}
    one = newcomer(tmp_path, data)
    assert one.describe(replace(offer(shape=backbone_shape(spec)), **what)) == DECLINED  # type: ignore[arg-type]
    assert f"expected tokens, whole numbers from 0 to {VOCABULARY - 1}; found {wrong}" in str(one.failure)
    assert one.ledger.read() == []


def test_a_promise_that_the_encoder_cannot_keep_is_not_made(tmp_path: Path) -> None:
    one = newcomer(tmp_path, promise=Promise(0.3, 0.01))
    assert one.describe(offer("deepset")) is DECLINED
    assert isinstance(one.failure, ConfigError) and "no bound holds" in str(one.failure)
    assert Ledger(tmp_path / "state").read() == []
    assert isinstance(newcomer(tmp_path).describe(offer("deepset")), Description)  # without a promise it will do


def test_a_descriptor_that_is_not_finite_does_not_leave_without_a_promise_either(tmp_path: Path) -> None:
    one, made = newcomer(tmp_path), offer("deepset")
    values = torch.full_like(made.weights.values, 1e38)
    huge = replace(made, weights=replace(made.weights, values=values), encoder_version=version_of(values))
    assert one.describe(huge) is DECLINED
    assert isinstance(one.failure, DataError) and "the descriptor is not finite" in str(one.failure)
    assert Ledger(tmp_path / "state").read() == []


def test_beyond_the_budget_nothing_leaves(tmp_path: Path) -> None:
    assert isinstance(newcomer(tmp_path, promise=Promise(0.3, 0.01), budget=0.5).describe(offer()), Description)
    second = newcomer(tmp_path, promise=Promise(0.3, 0.01), budget=0.5)
    assert second.describe(offer()) is DECLINED
    assert isinstance(second.failure, RefusedError) and "--budget" in str(second.failure)


def labelled(path: Path, x: np.ndarray, y: np.ndarray) -> DataSpec:
    np.savez(path, x=x, y=y)
    return DataSpec(str(path))


def test_one_example_exchanged_moves_the_descriptor_by_no_more_than_is_promised(tmp_path: Path) -> None:
    """Also where its label is exchanged, by which data with labels are dealt into parts."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 1, 8, 8)).astype(np.float32), np.arange(60) % 10
    made = offer()
    tail = made.weights.layout.views(made.weights.values)["tail.weight"]
    bound = 2 * float(torch.linalg.matrix_norm(tail, 2)) / len(x)
    here = newcomer(tmp_path, labelled(tmp_path / "one.npz", x, y)).describe(made)
    for index in range(0, 60, 6):
        other_x, other_y = x.copy(), y.copy()
        other_x[index], other_y[index] = -10 * x[index], (y[index] + 3) % 10
        there = newcomer(tmp_path, labelled(tmp_path / "other.npz", other_x, other_y)).describe(made)
        assert isinstance(here, Description) and isinstance(there, Description)
        moved = float((here.weights.values.double() - there.weights.values.double()).norm())
        assert 0 < moved <= bound * (1 + 1e-4)


def pets(folder: Path) -> DataSpec:
    """Return 30 images of two named classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / "pets" / name).mkdir(parents=True)
        for index in range(15):
            Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / "pets" / name / f"{index}.png")
    return DataSpec(str(folder / "pets"))


def exported(one: Newcomer, made: Offer, folder: Path) -> tuple[tuple[str, ...], str]:
    """Let a newcomer take an offer; return the classes and the card of its model."""
    assert isinstance(one.describe(made), Description), one.failure
    spec = ModelSpec("mlp", "S", SHAPE, made.num_classes)
    layout = full_layout(spec)
    one.receive(Delivery(Weights(layout, layout.flatten(dict(build(spec).named_parameters())))))
    one.write(folder)
    return read_model(folder)[0].class_names, (folder / "README.md").read_text()


def test_who_has_not_all_classes_is_scored_where_labels_are_numbers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (30, 8, 8), dtype=np.uint8)
    by_number = labelled(tmp_path / "two.npz", images, np.arange(30) % 2)
    for data, scored in ((by_number, True), (pets(tmp_path), False)):
        classes, readme = exported(newcomer(tmp_path, data), offer(), tmp_path / ("numbers" if scored else "names"))
        assert classes == tuple(map(str, range(10)))
        assert ("% on 30 labelled examples here" in readme) == scored != ("not known here" in readme)
        assert "these data do not name them all" in readme and "as they told" in readme


def test_who_names_all_classes_is_scored_by_these(tmp_path: Path) -> None:
    classes, readme = exported(newcomer(tmp_path, pets(tmp_path)), replace(offer(), num_classes=2), tmp_path / "model")
    assert classes == ("cat", "dog")
    assert "% on 30 labelled examples here" in readme and "these data do not name them all" not in readme


def test_as_many_classes_of_other_names_are_not_those_of_the_run(tmp_path: Path) -> None:
    spec = pets(tmp_path)
    made = replace(offer(), num_classes=2, meaning=load_client_data(spec).meaning)
    assert made.meaning and exported(newcomer(tmp_path, spec), made, tmp_path / "same")[0] == ("cat", "dog")
    classes, readme = exported(newcomer(tmp_path, spec), replace(made, meaning="another"), tmp_path / "model")
    assert classes == ("0", "1")
    assert "not known here" in readme and "these data do not name them all" in readme


def test_an_offer_of_huge_inputs_is_declined_before_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sources, "inputs", lambda sources, offer: pytest.fail("read"))
    huge_dim = {"dim": 2**28, "sizes": ("S",), "shares": (0.0,)}
    huge_head = {"num_classes": 40_000_000, "adapt": "head"}
    for more in ({"input_shape": (3, 10_000, 10_000)}, huge_dim, {"num_classes": 10**9}, huge_head):
        one = newcomer(tmp_path)
        assert one.describe(replace(offer(), **more)) == DECLINED  # type: ignore[arg-type]
        assert isinstance(one.failure, WireError | ModelError)


def test_the_delivered_model_becomes_a_folder_whose_card_says_what_was_sent(tmp_path: Path) -> None:
    one, made = newcomer(tmp_path, promise=Promise(0.3, 0.001)), replace(offer(), shares=(0.25, 1.0))
    with pytest.raises(WireError, match="before an offer"):
        one.receive(Delivery(Weights(Layout((("w", (1,)),)), torch.zeros(1))))
    one.describe(made)
    spec = ModelSpec("mlp", "S", SHAPE, CLASSES)
    layout = full_layout(spec)
    with pytest.raises(WireError, match="tensor"):
        one.receive(Delivery(Weights(Layout((("w", (1,)),)), torch.zeros(1))))
    values = layout.flatten(dict(build(spec).named_parameters()))
    one.receive(Delivery(Weights(layout, values)))
    one.write(tmp_path / "model")
    described, logits = read_model(tmp_path / "model")
    assert described.spec == spec and described.preprocessing.divisor == 16.0
    module, data = build(spec), load_client_data(DIGITS)
    for name, parameter in module.named_parameters():
        parameter.data = layout.views(values)[name].clone()
    torch.testing.assert_close(logits(data.test.inputs), module(data.test.inputs).detach())
    correct = int((logits(data.whole.inputs).argmax(1) == data.whole.labels).sum())
    readme = (tmp_path / "model" / "README.md").read_text()
    for text in (
        "run a-run, round 7, on box:9092",
        f"{100 * correct / len(data.whole):.1f} % on {len(data.whole)} labelled",
        "a mixture, 25% the model written from its descriptor and 75% the model for all",
        "Which model, and what to expect: a newcomer gets all.",
        f"The descriptor, {DIM} numbers with noise",
        "(0.3, 0.001)-differentially private",
        "by basic composition: epsilon 0.3, delta 0.001",
    ):
        assert text in readme


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_user_hears_what_to_expect_before_and_which_model_it_is_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float
) -> None:
    caplog.set_level("INFO", "hyperbloom.client")
    one, layout = newcomer(tmp_path), full_layout(ModelSpec("mlp", "S", SHAPE, CLASSES))
    one.describe(replace(offer(), shares=(share, 0.75)))  # of the sizes S and M
    assert caplog.messages == ["before anything is sent: a newcomer gets all"]
    one.receive(Delivery(Weights(layout, torch.zeros(layout.numel))))
    assert caplog.messages[1:] == [f"this machine has got {model_of(share)}"]


@pytest.mark.parametrize("promise", [None, Promise(0.3, 0.001)])
def test_the_model_for_all_takes_no_descriptor_and_no_privacy(tmp_path: Path, promise: Promise | None) -> None:
    one, layout = newcomer(tmp_path, promise=promise), full_layout(ModelSpec("mlp", "S", SHAPE, CLASSES))
    sent = one.describe(replace(offer("deepset"), shares=(0.0, 1.0)))  # which has no bound on what it discloses
    assert isinstance(sent, Description), one.failure
    assert torch.equal(sent.weights.values, torch.zeros(DIM)) and one.ledger.read() == []
    one.receive(Delivery(Weights(layout, torch.zeros(layout.numel)), unlike=True))
    one.write(tmp_path / "model")
    readme = (tmp_path / "model" / "README.md").read_text()
    for text in ("the model for all", f"{DIM} zeros in place of a descriptor", "no privacy was spent"):
        assert text in readme
    assert "look unlike" not in readme


@pytest.mark.parametrize("unlike", [False, True])
def test_the_card_says_that_nobody_like_it_has_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, unlike: bool
) -> None:
    one, spec = newcomer(tmp_path), ModelSpec("mlp", "S", SHAPE, CLASSES)
    one.describe(offer())
    layout = full_layout(spec)
    one.receive(Delivery(Weights(layout, layout.flatten(dict(build(spec).named_parameters()))), unlike))
    one.write(tmp_path / "model")
    said = "ese data look unlike those of all 12 clients that trained"
    assert (said in (tmp_path / "model" / "README.md").read_text()) == (said in caplog.text) == unlike


def test_running_statistics_are_taken_from_the_newcomers_examples(tmp_path: Path) -> None:
    shape = (3, 8, 8)
    x = 5 + 2 * np.random.default_rng(0).normal(size=(60, *shape)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    one = newcomer(tmp_path, DataSpec(str(tmp_path / "x.npz")))
    assert isinstance(one.describe(offer(model="hafl-1", shape=shape)), Description)
    layout = full_layout(ModelSpec("hafl-1", "S", shape, CLASSES))
    torch.manual_seed(0)
    values = layout.flatten(dict(build(ModelSpec("hafl-1", "S", shape, CLASSES)).named_parameters()))
    one.receive(Delivery(Weights(layout, values)))
    one.write(tmp_path / "model")
    _, logits = read_model(tmp_path / "model")
    assert float(logits(torch.from_numpy(x)).std()) < 10  # with statistics 0 and 1 they would be far larger
    from safetensors.torch import load_file

    means = {n: t for n, t in load_file(tmp_path / "model" / "model.safetensors").items() if n.endswith("running_mean")}
    assert means and all(float(mean.abs().sum()) > 0 for mean in means.values())
    assert "not known here" in (tmp_path / "model" / "README.md").read_text()


# ---------------------------------------------------------------------- the command
