"""A served run and newcomers as processes of their own, with everything that leaves a newcomer on record."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hyperbloom.common.encoders import EncoderSpec, build_encoder
from hyperbloom.common.secrecy.keys import make_key, public_pem, write_private_key
from hyperbloom.server.access.certificates import init
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.cli import main
from hyperbloom.server.newcomers.on_demand import ModelMaker, check_on_demand
from hyperbloom.server.runs.trained import read_trained
from tests.processes.conftest import Process, Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SHORT = ["--engine", "inline", "--rounds", "2", "--eval-every", "2", "--clients", "3", "--cohort", "3"]
OPTIONS = ["--set", "encoder=private", "--set", "embedding_dim=4", "--set", "local.steps=5"]


def spellings(number: np.float32, most: int = 16) -> list[bytes]:
    """Return a number and its next neighbours as bytes: machines and threads round the last bits differently."""
    return [(number.view(np.int32) + np.int32(step)).tobytes() for step in range(-most, most + 1)]


class Tap:
    """Passes a newcomer's connections on to the server, and keeps every byte that it sends."""

    def __init__(self, port: int) -> None:
        self.sent = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, sink, kept in ((near, far, self.sent), (far, near, None)):
                threading.Thread(target=self._pass, args=(source, sink, kept), daemon=True).start()

    @staticmethod
    def _pass(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        try:
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def taps(site: Site) -> Iterator[list[Tap]]:
    made = [Tap(site.port), Tap(site.port)]
    yield made
    for tap in made:
        tap.close()


def test_two_newcomers_get_models_and_nothing_but_a_descriptor_leaves(
    site: Site, taps: list[Tap], tmp_path: Path
) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret-name.npz"
    assert main(["--strategy", "odpfl", *SHORT, *OPTIONS, "--run-dir", str(run)]) == 0
    summary = json.loads((run / "summary.json").read_text())  # as if a held-out client had found this to be best
    summary["odpfl"]["newcomers"] |= {"held_out": 1, "share": 0.5, "test": [20, 30, 40, 30, 10], "low": 40, "high": 40}
    (run / "summary.json").write_text(json.dumps(summary))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(900, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 900)
    y[:10] = np.arange(10)
    np.savez(secret, x=x, y=y)

    server = site.start("hyperbloom.server", "server", "serve", str(run), "--port", str(site.port), "--insecure")
    server.wait_for("a newcomer gets a mixture, 50% the model written from its descriptor")
    server.wait_for("flower-client join --server 127.0.0.1:")
    privacy = [[], ["--eps", "0.3", "--delta", "0.001", "--budget", "0.5"]]
    states = [tmp_path / "state-open", tmp_path / "state-private"]
    newcomers = []
    for name, tap, flags, state in zip(("open", "private"), taps, privacy, states, strict=True):
        out = ["--out", str(tmp_path / name), "--state-dir", str(state)]
        to = ["--server", f"127.0.0.1:{tap.port}", "--insecure", "--data", str(secret)]
        newcomers.append(site.start("hyperbloom.client", f"client-{name}", "join", *to, *out, *flags))
    assert [newcomer.wait() for newcomer in newcomers] == [0, 0], [newcomer.output for newcomer in newcomers]
    server.wait_for("models delivered: 2")

    encoder = build_encoder(EncoderSpec("private", (1, 8, 8), 4))
    tensors = load_file(run / "hypernetwork.safetensors")
    encoder.load_state_dict({n.removeprefix("encoder."): t for n, t in tensors.items() if n.startswith("encoder.")})
    with torch.no_grad():
        descriptor = encoder(torch.from_numpy(x)).numpy()
    sent = [bytes(tap.sent) for tap in taps]
    numbers = [spellings(number) for number in descriptor]
    assert all(any(each in sent[0] for each in number) for number in numbers), "the tap does not see what is sent"
    assert not any(each in sent[1] for number in numbers for each in number), "the descriptor left without noise"
    for everything in sent:
        assert len(everything) < x.nbytes / 2  # of Flower's own: registration, heartbeat, polls
        assert not any(example.tobytes()[:16] in everything for example in x.reshape(900, -1))
        assert y.astype(np.int64).tobytes() not in everything and y.astype(np.uint8).tobytes() not in everything
        assert b"secret-name" not in everything and str(tmp_path).encode() not in everything

    # What has arrived is the hypernetwork's answer to what was sent: other weights for another descriptor.
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("open", "private")]
    assert not torch.equal(models[0]["head.weight"], models[1]["head.weight"])
    cards = [(tmp_path / name / "README.md").read_text() for name in ("open", "private")]
    for newcomer, card in zip(newcomers, cards, strict=True):
        assert "before anything is sent: a newcomer gets a mixture, 50%" in newcomer.output
        assert "this machine has got a mixture, 50%" in newcomer.output
        assert "may expect a test accuracy of 40.0 %" in newcomer.output and "accuracy of 40.0 %" in card
    assert "without noise" in cards[0] and "no noise was added" in cards[0]
    assert "(0.3, 0.001)-differentially private" in cards[1]
    (entry,) = json.loads((states[1] / "privacy.json").read_text())["spent"]
    assert (entry["epsilon"], entry["examples"]) == (0.3, 900)

    server.interrupt()
    assert server.wait() == 130


@pytest.mark.slow
def test_a_newcomer_with_feature_vectors_and_no_label_gets_the_model_that_the_run_would_give_it(
    site: Site, tmp_path: Path
) -> None:
    """As of texts; `examples/text_on_demand.py` writes such files. Over TLS, and with a key that the server knows."""
    run, data, mine = tmp_path / "run", tmp_path / "texts.npz", tmp_path / "mine.npz"
    rng = np.random.default_rng(0)
    x, y = rng.random((300, 40)).astype(np.float32), np.arange(300) % 3
    np.savez(data, x=x, y=y)
    np.savez(mine, x=x[:50], words=np.array(["not", "an", "input"]))
    assert main(["--strategy", "odpfl", *SHORT, *OPTIONS, "--data", str(data), "--run-dir", str(run)]) == 0
    files = init(tmp_path / "certs", [], days=30)
    for name in ("known", "stranger"):
        key = make_key()
        write_private_key(tmp_path / f"{name}.pem", key)
        if name == "known":
            ClientRegistry(files.clients).add(name, public_pem(key))
    at = ["--port", str(site.port), "--certs", str(files.folder)]
    server = site.start("hyperbloom.server", "server", "serve", str(run), *at)
    server.wait_for("flower-client join --server ")

    def join(name: str, out: str) -> Process:
        link = ["--server", f"127.0.0.1:{site.port}", "--root-certificates", str(files.ca)]
        flags = [*link, "--key", str(tmp_path / f"{name}.pem"), "--data", str(mine), "--out", str(tmp_path / out)]
        return site.start("hyperbloom.client", name, "join", *flags, "--state-dir", str(tmp_path / f"s-{name}"))

    stranger, newcomer = join("stranger", "nothing"), join("known", "model")
    assert newcomer.wait() == 0, newcomer.output
    assert stranger.wait() == 3 and "the server refused this client: key SHA256:" in stranger.output
    assert not (tmp_path / "nothing").exists() and not (tmp_path / "s-stranger").exists()
    served = ModelMaker(read_trained(run, check_on_demand))
    encoder = build_encoder(EncoderSpec("private", (40,), 4))
    encoder.load_state_dict(served.offer.weights.layout.views(served.offer.weights.values))
    with torch.no_grad():
        weights = served.write([encoder(torch.from_numpy(x[:50]))], "M")[0]
    model = load_file(tmp_path / "model/model.safetensors")
    for name, expected in served.layouts["M"].views(weights).items():
        torch.testing.assert_close(model[name], expected, rtol=1e-4, atol=1e-5)
    server.interrupt()
    assert server.wait() == 130
