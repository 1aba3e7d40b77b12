"""What a client says of itself, and of its own model: no more than was asked for and allowed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperbloom import __version__
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.introduction import describe_model
from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.data import load_client_data
from hyperbloom.common.errors import RefusedError, WireError
from hyperbloom.common.models import ModelSpec
from hyperbloom.common.wire.orders import Greeting
from hyperbloom.server.access.certificates import init

from ..conftest import SHARE
from ..orders import Worker

MakeWorker = Callable[..., Worker]
SPEC = ModelSpec("plain-4", "S", (1, 8, 8), 10)


GRAPH = own_graph(SPEC)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """Return a client with a model of its own."""
    return Worker(ClientSettings("ward-7", SHARE, "cpu", "S", tmp_path / "ward-7", model="plain-4"))


@pytest.mark.parametrize(
    ("disclose", "asks", "told"),
    [
        ("types", "own", "that there is one"),
        ("types", "types", "types"),
        ("types", "graph", "nothing"),
        ("graph", "own", "that there is one"),
        ("graph", "types", "types"),
        ("graph", "graph", "graph"),
    ],
)
def test_no_more_is_told_than_was_asked_for_and_allowed(disclose: Any, asks: str, told: str) -> None:
    expected = {
        "nothing": (None, None),
        "that there is one": ((), None),
        "types": (tuple(map(str, GRAPH.types)), None),
        "graph": (None, GRAPH.to_json()),
    }
    assert describe_model(SPEC, disclose, asks) == expected[told]
    assert describe_model(None, disclose, asks) == (None, None)


def test_what_the_server_must_not_ask_is_refused(worker: Worker) -> None:
    with pytest.raises(RefusedError, match="the server of this run chooses the model; join without --model"):
        worker.answer(Greeting(__version__))
    with pytest.raises(WireError, match=r"greeting: expected asks to be one of .*, found 'data'"):
        worker.answer(Greeting(__version__, "data"))


def test_an_introduction_holds_sizes_and_no_data(make_worker: MakeWorker) -> None:
    worker = make_worker("ward-7", size="S")
    data = load_client_data(SHARE)
    about = worker.answer(Greeting(__version__))
    assert (about.client_id, about.version, about.size) == ("ward-7", __version__, "S")
    assert (about.input_shape, about.num_classes) == ((1, 8, 8), 10)
    assert (about.train_examples, about.val_examples, about.test_examples) == (40, len(data.val), len(data.test))
    assert about.class_shares == ()
    assert about.token == worker.state.token()


def test_each_server_is_told_a_secret_of_its_own(make_worker: MakeWorker, tmp_path: Path) -> None:
    """What one server knows makes it this client at no other; a new CA at the same address is no other server."""
    settings = make_worker("ward-7").settings
    one, two, three = (init(tmp_path / name, []).ca for name in ("one", "two", "three"))

    def secret(ca: Path | None, address: str) -> str:
        worker = Worker(replace(settings, root_certificates=ca, server=address))
        return str(worker.answer(Greeting(__version__)).token)

    first = secret(one, "one:9092")
    assert len({first, secret(two, "two:9092"), secret(None, "one:9092")}) == 3
    assert secret(one, "moved:9092") == secret(three, "moved:9092") == first


def test_a_server_of_another_version_is_named(make_worker: MakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    worker = make_worker()
    worker.answer(Greeting(__version__))
    assert not caplog.messages
    worker.answer(Greeting("9.9\n"))
    assert caplog.messages == [f"the server has version '9.9\\n', this client {__version__!r}; give both the same"]


def test_class_shares_are_told_only_if_that_was_wished(make_worker: MakeWorker) -> None:
    shares = make_worker(disclose=True).answer(Greeting(__version__)).class_shares
    assert len(shares) == 10
    assert sum(shares) == pytest.approx(1)
    assert shares == pytest.approx(load_client_data(SHARE).class_shares.tolist())
