"""Models on demand over a scripted grid: each gets its own, all at once, and nobody is waited for."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from flwr.app import Error, Message, RecordDict
from safetensors.torch import load_file

from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.newcomer import Newcomer
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.common.data import DataSpec
from hyperbloom.common.encoders import EncoderSpec, build_encoder, descriptor_layout
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files import export
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.newcomers import Expectation
from hyperbloom.common.reasons import Reason
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.orders import Failed, Notice
from hyperbloom.common.wire.pack import pack, unpack
from hyperbloom.server.cli import main
from hyperbloom.server.loop import exchange, post
from hyperbloom.server.newcomers import on_demand
from hyperbloom.server.newcomers.on_demand import ModelMaker, OnDemandService, check_on_demand
from hyperbloom.server.runs.recorded import read_summary
from hyperbloom.server.runs.trained import Trained, read_trained
from hyperbloom.strategies.odpfl import ODPFL
from tests.common.models.backbones import image_folder

from ..conftest import Clock, ScriptedGrid, app_error

SHARE = 0.25
SHORT = ["--engine", "inline", "--rounds", "2", "--eval-every", "2", "--clients", "4", "--cohort", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    options = [
        "--set",
        "encoder=private",
        "--set",
        "local.steps=2",
        "--set",
        "embedding_dim=3",
        "--set",
        "sizes=[S, M]",
    ]
    assert main(["--strategy", "odpfl", *SHORT, *options, "--run-dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(run: Path) -> Trained:
    return with_expectation(run)


def with_expectation(run: Path) -> Trained:
    """Return a run as if held-out clients had found a quarter of the written model to be best."""
    found = read_trained(run, check_on_demand)
    assert found.selection.newcomers == Expectation(4, 0, 0.5)
    told = Expectation(4, 2, SHARE, (50.0, 60.0, 40.0, 30.0, 20.0), 55.0, 65.0)
    return replace(found, selection=replace(found.selection, newcomers=told))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a backbone, and a run that adapts it."""
    folder = tmp_path_factory.mktemp("adapted")
    backbone = image_folder(folder / "vit")
    options = ["encoder=private", "adapt=lora:r=2", f"backbone={backbone}", "local.steps=2", "embedding_dim=3"]
    more = [word for option in [*options, "hidden_dim=8"] for word in ("--set", option)]
    assert main(["--strategy", "odpfl", *SHORT, *more, "--run-dir", str(folder / "run")]) == 0
    return backbone, folder / "run"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    turned = Clock()
    for module in (on_demand, post):
        monkeypatch.setattr(module, "time", turned)
    return turned


@pytest.fixture
def counter(trained: Trained, clock: Clock) -> OnDemandService:
    return OnDemandService(ScriptedGrid(clock), ModelMaker(trained))


class Visitor:
    """A node that describes itself with a given descriptor."""

    def __init__(self, descriptor: torch.Tensor, size: str = "S") -> None:
        self.descriptor, self.size = descriptor, size
        self.got: torch.Tensor | None = None
        self.unlike: bool | None = None
        self.last: Notice | None = None

    def __call__(self, message: Message) -> RecordDict | Error | None:
        kind = message.metadata.message_type
        if kind == Offer.message_type:
            weights = Weights(descriptor_layout(3), self.descriptor)
            return pack(Description(self.size, unpack(Offer, message.content).encoder_version, weights))
        if kind == Delivery.message_type:
            delivery = unpack(Delivery, message.content)
            self.got, self.unlike = delivery.weights.values, delivery.unlike
            return pack(Notice("received", ""))
        self.last = unpack(Notice, message.content)
        return message.content


def polls(counter: OnDemandService, clock: Clock, times: int = 6) -> None:
    for _ in range(times):
        clock.sleep(0.2)
        counter.poll()


def served(run: Path, trained: Trained, descriptor: torch.Tensor, size: str) -> torch.Tensor:
    """Return a quarter of what is made of a descriptor, and for the rest the mean over those of a size who trained."""
    known = load_file(run / "hypernetwork.safetensors")["embeddings"]
    rows = [hypernetwork(run, known[client.row], size) for client in trained.roster if client.about.size == size]
    return (1 - SHARE) * torch.stack(rows).mean(0) + SHARE * hypernetwork(run, descriptor, size)


def hypernetwork(run: Path, descriptor: torch.Tensor, size: str) -> torch.Tensor:
    """Return what the stored numbers make of a descriptor, layer by layer."""
    tensors = load_file(run / "hypernetwork.safetensors")
    x = descriptor
    for layer in (0, 2, 4, 6):
        x = F.linear(x, tensors[f"hypernetwork.trunk.{layer}.weight"], tensors[f"hypernetwork.trunk.{layer}.bias"])
        x = x.relu() if layer < 6 else x
    head = f"hypernetwork.heads.{size}"
    return tensors[f"hypernetwork.start_{size}"] + F.linear(x, tensors[f"{head}.weight"], tensors[f"{head}.bias"])


def test_the_offer_is_the_trained_encoder(run: Path, trained: Trained) -> None:
    offer = ModelMaker(trained).offer
    tensors = load_file(run / "hypernetwork.safetensors")
    views = offer.weights.layout.views(offer.weights.values)
    assert {f"encoder.{name}" for name in views} == {name for name in tensors if name.startswith("encoder.")}
    for name, value in views.items():
        torch.testing.assert_close(value, tensors[f"encoder.{name}"], rtol=0, atol=0)
    build_encoder(EncoderSpec(offer.encoder, offer.input_shape, offer.dim)).load_state_dict(views)
    assert (offer.clients, offer.round, offer.sizes, offer.scaling.divisor) == (4, 2, ("S", "M"), 16.0)
    assert (
        offer.shares == (SHARE, SHARE)
        and "gets a mixture, 25%" in offer.expected
        and "60.0 % (55.0 to 65.0)" in offer.expected
    )


def test_a_run_that_does_not_know_what_to_expect_is_served_by_its_number_of_clients(trained: Trained) -> None:
    unknown = replace(trained, selection=replace(trained.selection, newcomers=None))  # of an earlier version
    maker = ModelMaker(unknown)
    assert "gets a mixture, 50%" in maker.offer.expected and "4 clients train" in maker.offer.expected
    assert maker.offer.shares == (0.5, 0.5)


def test_newcomers_get_the_model_for_all_of_a_baseline_if_validation_prefers_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hypernetwork hardly learns, and FedAvg's one model knows all digits."""
    sets = ["encoder=private", "embedding_dim=3", "novel=25", "learning_rate=1e-7", "local.learning_rate=0.05"]
    more = [word for option in sets for word in ("--set", option)]
    short = ["--engine", "inline", "--clients", "8", "--cohort", "4", "--rounds", "8", "--eval-every", "4"]
    assert main(["--strategy", "odpfl", "--baselines", "fedavg", *short, *more, "--run-dir", str(tmp_path)]) == 0
    found = read_trained(tmp_path, check_on_demand)
    of_average = read_summary(tmp_path)["fedavg"]
    own, rival = found.selection.newcomers, of_average.newcomers
    assert own is not None and rival is not None and own.val is not None and rival.val is not None
    assert rival.test == (pytest.approx(of_average.metrics["novel_test_mean"]),) and rival.trained == 6
    assert (rival.of, rival.share, own.of) == ("fedavg", 0.0, "") and rival.val > own.val
    # Its round is that of the baseline, also where the run itself selected another one.
    found = replace(found, selection=replace(found.selection, round=of_average.round + 1))
    maker = ModelMaker(found)
    assert maker.offer.shares == (0.0,) and maker.offer.round == of_average.round
    assert maker.offer.expected.startswith(
        "a newcomer gets the model for all of fedavg, and may expect a test accuracy"
    )
    assert "fewer than" not in maker.offer.expected, "it was compared"
    average = load_file(tmp_path / "baselines/fedavg/hypernetwork.safetensors")
    (written,) = maker.write([torch.ones(3)], "M")
    assert torch.equal(written, maker.layouts["M"].flatten(average))
    assert maker.offer.expected in capsys.readouterr().out
    assert maker.offer.expected[1:] in (tmp_path / "report.html").read_text()

    better = replace(own, val=rival.val + 1)
    of_its_own = ModelMaker(replace(found, selection=replace(found.selection, newcomers=better)))
    assert of_its_own.offer.shares == (own.share,) and "of fedavg" not in of_its_own.offer.expected
    assert "fewer than" not in of_its_own.offer.expected
    (tmp_path / "baselines/fedavg/hypernetwork.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="expected the model for all of fedavg: "):
        ModelMaker(found)


def test_a_size_that_nobody_trained_has_no_common_model(run: Path, trained: Trained) -> None:
    roster = [client for client in trained.roster if client.about.size == "S"]
    maker = ModelMaker(replace(trained, roster=roster))  # type: ignore[arg-type]
    assert maker.offer.shares == (SHARE, 1.0)
    torch.testing.assert_close(maker.write([torch.ones(3)], "M")[0], hypernetwork(run, torch.ones(3), "M"))


def test_everyone_gets_the_weights_of_their_own_descriptor_from_one_pass(
    run: Path, trained: Trained, counter: OnDemandService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    visitors = {node: Visitor(torch.randn(3), "SM"[node % 2]) for node in range(2, 9)}
    counter.grid.nodes.update(visitors)  # type: ignore[attr-defined]
    passes = []
    write = counter.maker.write
    monkeypatch.setattr(counter.maker, "write", lambda rows, size: passes.append(size) or write(rows, size))
    polls(counter, clock)
    assert passes == ["M", "S"]
    assert counter.served == 7
    for visitor in visitors.values():
        assert visitor.last == Notice("finished", "the model is delivered")
        torch.testing.assert_close(visitor.got, served(run, trained, visitor.descriptor, visitor.size))
    polls(counter, clock)
    assert counter.served == 7 and len(counter.grid.sent) == 21  # type: ignore[attr-defined]


def test_a_newcomer_is_told_that_nobody_like_it_has_trained(run: Path, counter: OnDemandService, clock: Clock) -> None:
    known = load_file(run / "hypernetwork.safetensors")["embeddings"]
    count, dim = known.shape
    variance = np.square(known.numpy() - known.numpy().mean(0)).mean()

    def nearest(one: torch.Tensor, others: torch.Tensor) -> float:
        """Return Mahalanobis's distance to the nearest of others by their own covariance."""
        floor = 0.01 * variance * (count - 1) / (len(others) - 1)
        inverse = np.linalg.inv(np.cov(others.double().numpy(), rowvar=False) + floor * np.eye(dim))
        return min(float(np.sqrt(x @ inverse @ x)) for x in (one - others).double().numpy())

    usual = max(nearest(one, torch.cat([known[:i], known[i + 1 :]])) for i, one in enumerate(known))  # of four: of all
    generator = torch.Generator().manual_seed(3)
    cloud = known.mean(0) + 20 * (torch.randn(40, 4, generator=generator) @ (known - known.mean(0)))
    far = [nearest(one, known) > usual for one in cloud]
    assert 5 < sum(far) < 35
    assert counter.maker.unlike(list(cloud)) == far
    assert counter.maker.unlike(list(known)) == [False] * 4
    visitors = {2: Visitor(known[1]), 3: Visitor(known[1] + 100), 4: Visitor(known[2])}
    counter.grid.nodes.update(visitors)  # type: ignore[attr-defined]
    polls(counter, clock)
    assert [visitor.unlike for visitor in visitors.values()] == [False, True, False]


@pytest.mark.parametrize(("clients", "dim"), [(90, 26), (30, 8)])
def test_one_in_twenty_newcomers_like_the_clients_is_told_otherwise(clients: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    widths = torch.logspace(0, -2, dim)
    shares = []
    for _ in range(20):
        known, others = (torch.randn(n, dim, generator=generator) * widths for n in (clients, 200))
        shares.append(1 - on_demand._Familiar(known)(others).double().mean())
    assert 0.025 < torch.stack(shares).mean() < 0.07  # by the covariance of all it is 0.27 of 90 in 26 dimensions


def test_clients_that_agree_or_are_too_few_are_a_measure_too() -> None:
    asked = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    told = [on_demand._Familiar(known)(asked).tolist() for known in (torch.zeros(5, 2), torch.zeros(2, 2), asked[:0])]
    assert told == [[True, False], [True, True], [True, True]]


def test_clients_that_never_train_are_no_measure(tmp_path: Path) -> None:
    flags = [
        "--set",
        "novel=50",
        "--set",
        "local.steps=2",
        "--set",
        "embedding_dim=3",
        "--run-dir",
        str(tmp_path / "r"),
    ]
    assert main(["--strategy", "odpfl", *SHORT, *flags]) == 0
    trained = read_trained(tmp_path / "r", check_on_demand)
    table = load_file(tmp_path / "r" / "hypernetwork.safetensors")["embeddings"]
    assert len(table) == 4
    assert isinstance(trained.strategy, ODPFL)
    torch.testing.assert_close(trained.strategy.descriptors_of_trained(), table[:2])
    assert ModelMaker(trained).offer.clients == 2
    told = trained.selection.newcomers
    assert told is not None and (told.trained, told.held_out) == (2, 2)


def test_little_memory_takes_more_passes_with_the_same_result(
    run: Path, trained: Trained, counter: OnDemandService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "BYTES_AT_ONCE", 1)
    visitors = {node: Visitor(torch.full((3,), float(node))) for node in range(2, 5)}
    counter.grid.nodes.update(visitors)  # type: ignore[attr-defined]
    passes: list[int] = []
    write = counter.maker.write
    monkeypatch.setattr(counter.maker, "write", lambda rows, size: passes.append(len(rows)) or write(rows, size))
    polls(counter, clock)
    assert passes == [1, 1, 1]
    for visitor in visitors.values():
        torch.testing.assert_close(visitor.got, served(run, trained, visitor.descriptor, "S"))


def with_weights(said: Description, layout: Layout, values: torch.Tensor) -> RecordDict:
    return pack(replace(said, weights=Weights(layout, values)))


def answers(change: Callable[[Description], RecordDict | Error]) -> Callable[[Message], RecordDict | Error | None]:
    inner = Visitor(torch.zeros(3))

    def answer(message: Message) -> RecordDict | Error | None:
        if message.metadata.message_type == Offer.message_type:
            found = inner(message)
            assert isinstance(found, RecordDict)
            return change(unpack(Description, found))
        return inner(message)

    return answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda said: pack(replace(said, size="L")), "expected --size to be one of S, M, found 'L'"),
        (lambda said: pack(replace(said, size=10**6 * "L")), "expected --size to be one of S, M, found 'LL"),
        (lambda said: pack(replace(said, encoder_version="old")), "expected a descriptor of encoder"),
        (lambda said: pack(replace(said, weights=Weights(Layout((("descriptor", (4,)),)), torch.zeros(4)))), "shape"),
        (
            lambda said: pack(replace(said, weights=Weights(descriptor_layout(3), torch.full((3,), torch.nan)))),
            "finite",
        ),
        (lambda said: pack(replace(said, weights=Weights(descriptor_layout(3), torch.full((3,), 1e30)))), "norm"),
        (lambda said: pack(Failed(Reason.FAILED, "it declined the offer")), "it declined the offer"),
        (lambda said: app_error("no such thing"), "is it `flower-client join`?"),
    ],
)
def test_what_no_model_can_be_made_from_is_refused_and_the_others_are_served(
    counter: OnDemandService, clock: Clock, change: Callable[[Description], RecordDict | Error], reason: str
) -> None:
    events: list[str] = []
    counter.on_event = events.append
    good = Visitor(torch.ones(3))
    grid = counter.grid
    assert isinstance(grid, ScriptedGrid)
    grid.nodes.update({2: answers(change), 3: good})
    polls(counter, clock)
    assert good.got is not None
    (refusal,) = [notice for node, notice in grid.notices() if node == 2]
    assert refusal.kind == "refused" and reason in refusal.reason
    assert len(events) == 1 and "refused node 2" in events[0] and len(events[0]) < 1000


def test_who_leaves_is_forgotten_and_may_come_again(counter: OnDemandService, clock: Clock) -> None:
    grid = counter.grid
    assert isinstance(grid, ScriptedGrid)
    grid.nodes.update({2: lambda message: None, 3: lambda message: None})
    polls(counter, clock, 2)
    assert len(counter.post.open(Offer)) == 2
    grid.leave(3)
    polls(counter, clock, 2)
    assert len(counter.post.open(Offer)) == 1
    grid.nodes[3] = visitor = Visitor(torch.ones(3))
    polls(counter, clock)
    assert visitor.got is not None


def test_a_newcomer_that_describes_itself_for_longer_than_an_offer_lasts_is_asked_again(
    counter: OnDemandService, clock: Clock
) -> None:
    grid = counter.grid
    assert isinstance(grid, ScriptedGrid)
    grid.nodes[2] = lambda message: None
    polls(counter, clock, 2)
    clock.sleep(on_demand.TTL_S)  # the answer to the first offer comes too late
    grid.nodes[2] = visitor = Visitor(torch.ones(3))
    polls(counter, clock)
    assert visitor.got is not None


def test_a_model_that_a_newcomer_does_not_take_is_not_counted(counter: OnDemandService, clock: Clock) -> None:
    class Careful(Visitor):
        def __call__(self, message: Message) -> RecordDict | Error | None:
            answer = super().__call__(message)
            return (
                pack(Failed("refused", "tensor fc1: 3 values are not finite"))
                if self.got is not None and not self.last
                else answer
            )

    grid = counter.grid
    assert isinstance(grid, ScriptedGrid)
    grid.nodes.update({2: (careful := Careful(torch.ones(3))), 3: (other := Visitor(torch.ones(3)))})
    polls(counter, clock)
    assert counter.served == 1
    assert careful.last == Notice("refused", "it could not use the model; its own log says why")
    assert other.last == Notice("finished", "the model is delivered")


def test_a_node_that_cannot_be_reached_is_no_matter(counter: OnDemandService, clock: Clock) -> None:
    grid = counter.grid
    assert isinstance(grid, ScriptedGrid)
    grid.nodes.update({2: Visitor(torch.ones(3)), 3: Visitor(torch.ones(3))})
    grid.unreachable.add(2)
    polls(counter, clock)
    assert counter.served == 1


def newcomer(folder: Path, backbone: Path | None) -> Newcomer:
    np.save(folder / "x.npy", np.random.default_rng(0).random((40, 1, 8, 8)).astype(np.float32))
    spec = DataSpec(str(folder / "x.npy"), backbone=None if backbone is None else str(backbone))
    return Newcomer(Sources(spec), "M", None, None, Ledger(folder / "state"), "box:9092")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, to peft
def test_a_newcomer_with_the_backbone_gets_an_adapter(
    adapted: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "HAS_ONNX", False)
    backbone, run = adapted
    maker, one = ModelMaker(with_expectation(run)), newcomer(tmp_path, backbone)
    description = one.describe(maker.offer)
    assert isinstance(description, Description), one.failure
    inputs = torch.from_numpy(np.load(tmp_path / "x.npy"))
    plain = transformers.AutoModelForImageClassification.from_pretrained(
        backbone, num_labels=10, ignore_mismatched_sizes=True
    )
    encoder = build_encoder(EncoderSpec("private", (8,), 3))
    encoder.load_state_dict(maker.offer.weights.layout.views(maker.offer.weights.values))
    with torch.no_grad():
        expected = encoder(plain.vit(pixel_values=inputs).last_hidden_state[:, 0])
    torch.testing.assert_close(description.weights.values, expected, rtol=1e-4, atol=1e-5)
    maker.check(description)
    layout = maker.layouts["M"]
    weights = maker.write([description.weights.values], "M")[0]
    assert layout.numel < 0.5 * sum(parameter.numel() for parameter in plain.parameters())
    one.receive(Delivery(Weights(layout, weights)))
    one.write(tmp_path / "model")
    tuned = peft.PeftModel.from_pretrained(plain, tmp_path / "model/adapter").eval()
    program = torch.export.load(tmp_path / "model/model.pt2").module()
    assert torch.allclose(tuned(pixel_values=inputs).logits, program(inputs), atol=1e-5)
    views = layout.views(weights)
    assert any(views[name].any() for name in views if "lora_B" in name)


@pytest.mark.parametrize("other", [True, False])
def test_a_newcomer_without_the_backbone_sends_nothing(other: bool, adapted: tuple[Path, Path], tmp_path: Path) -> None:
    one = newcomer(tmp_path, image_folder(tmp_path / "other", seed=1) if other else None)
    maker = ModelMaker(read_trained(adapted[1], check_on_demand))
    assert isinstance(one.describe(maker.offer), Failed)
    wanted = f"expected backbone {maker.offer.backbones[0]}, found sha256:" if other else "expected --backbone"
    assert wanted in str(one.failure)


def test_runs_of_other_strategies_are_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--strategy", "pfedhn", *SHORT, "--set", "local.steps=1", "--run-dir", str(tmp_path / "run")]) == 0
    assert main(["serve", str(tmp_path / "run"), "--insecure"]) == 2
    told = capsys.readouterr().err
    assert "pfedhn: expected a run of odpfl" in told and "flower-server export" in told


def test_export_points_to_serve(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spaced = shutil.copytree(run, tmp_path / "my run")
    assert main(["export", str(spaced), "--all"]) == 2
    assert f"flower-server serve '{spaced}'" in capsys.readouterr().err


def test_serve_wants_tls_files_or_insecure(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(run)]) == 2
    assert "--insecure" in capsys.readouterr().err
