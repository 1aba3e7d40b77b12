"""`flower-client backbone`: what is fetched, what is checked, and how networks are named."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hyperbloom.client.cli import main
from hyperbloom.common.errors import ModelError
from hyperbloom.common.models import BACKBONE, ModelSpec, backbone_digest
from hyperbloom.common.models.pretrained import load_backbone, usual_shape
from tests.common.models.backbones import add_tokenizer, image_folder, text_folder, timm_folder, torchvision_folder

COMMIT = 40 * "a"


@dataclass
class Hub:
    """A hub of one network on loopback, which breaks off the first answer with weights if `breaks`."""

    folder: Path
    breaks: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub(image_folder(tmp_path / "hub"))
    (made.folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (made.folder / "modeling.py").write_text("raise SystemExit")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, whole: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/tiny/vit/tree/"):
                found = [(each.name, each.stat().st_size) for each in sorted(made.folder.iterdir())]
                tree = [{"type": "file", "path": name, "size": size, "oid": 40 * "b"} for name, size in found]
                self.reply(json.dumps(tree).encode(), whole)
                return
            if path.startswith("/api/models/tiny/vit"):
                files = [{"rfilename": each.name} for each in sorted(made.folder.iterdir())]
                self.reply(json.dumps({"id": "tiny/vit", "sha": COMMIT, "siblings": files}).encode(), whole)
                return
            file = made.folder / path.rpartition("/")[2]
            if not path.startswith(f"/tiny/vit/resolve/{COMMIT}/") or not file.is_file():
                self.send_error(404)
                return
            made.asked.append((self.command, file.name))
            content = file.read_bytes()
            first = int(re.findall(r"\d+", self.headers.get("Range") or "0")[0])
            if whole and made.breaks and file.suffix == ".safetensors":
                made.breaks = False
                self.reply(content, whole, first, len(content) // 2)
                return
            self.reply(content, whole, first)

        def reply(self, content: bytes, whole: bool, first: int = 0, last: int | None = None) -> None:
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(content) - first))
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            if whole:
                self.wfile.write(content[first:last])
            if last is not None:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def get(hub: Hub, root: Path, name: str = "tiny/vit") -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "hyperbloom.client", "backbone", "get", name, "--root", str(root)]
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(root / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return subprocess.run(words, env={**os.environ, **own}, capture_output=True, text=True, timeout=120)


def test_a_fetched_network_is_checked_and_named(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = get(hub, tmp_path / "root")
    folder = tmp_path / "root/tiny--vit"
    digest = backbone_digest(ModelSpec(BACKBONE, "M", (1, 8, 8), 5, backbone=str(hub.folder)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{folder}: {digest}, ")
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"config.json", "model.safetensors"}
    assert {name for _, name in hub.asked} == {"config.json", "model.safetensors"}, "no code and no pickle is asked for"
    assert main(["backbone", "check", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: {digest}, ")


@pytest.mark.slow
def test_a_fetch_that_was_cut_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.breaks = True
    first = get(hub, tmp_path / "root")
    done = first if first.returncode == 0 else get(hub, tmp_path / "root")
    assert done.returncode == 0, done.stderr
    found, sent = (folder / "model.safetensors" for folder in (tmp_path / "root/tiny--vit", hub.folder))
    assert found.read_bytes() == sent.read_bytes() and not hub.breaks


def test_what_is_not_on_the_hub_is_said(hub: Hub, tmp_path: Path) -> None:
    done = get(hub, tmp_path / "root", "tiny/other")
    assert done.returncode == 5 and not done.stdout
    assert done.stderr.startswith("flower-client backbone get: cannot fetch tiny/other: ")
    assert "Traceback" not in done.stderr


def test_the_digest_does_not_depend_on_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(add_tokenizer(text_folder(tmp_path / "bert")))
    digest = backbone_digest(ModelSpec(BACKBONE, "S", (6,), 7, "lora:r=2", folder))
    assert main(["backbone", "check", folder]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: {digest}, ")


def test_the_shape_of_inputs_is_the_networks_own(tmp_path: Path) -> None:
    assert usual_shape(str(image_folder(tmp_path / "vit"))) == (1, 8, 8)
    assert usual_shape(str(text_folder(tmp_path / "bert"))) == (6,)  # all that it reads
    assert usual_shape(str(torchvision_folder(tmp_path / "squeezenet"))) == (3, 224, 224)
    assert usual_shape(str(timm_folder(tmp_path / "timm"))) == (1, 16, 16)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["FOLDER"], "expected a folder with config.json, found"),
        (["a.module:function"], "--input-shape: expected one, as a.module:function does not say what it takes"),
        (["FOLDER", "--input-shape", "3,x"], "--input-shape: expected numbers such as 3,32,32, found 3,x"),
    ],
)
def test_what_cannot_be_checked(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path) if word == "FOLDER" else word for word in arguments]
    assert main(["backbone", "check", *words]) == 2
    assert expected in capsys.readouterr().err


def test_rows_longer_than_the_network_reads_are_refused_at_once(tmp_path: Path) -> None:
    """Otherwise each round with a long text fails, and the rest of a run learns from short ones."""
    folder = str(text_folder(tmp_path / "bert"))
    with pytest.raises(ModelError, match=r"expected rows of at most 6 tokens, found 9; set model_max_length in .*json"):
        load_backbone(folder, (9,), 2)


def test_networks_are_checked_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image_folder(tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/config.json").write_text("{}")
    assert main(["backbone", "check", str(tmp_path / "b"), str(tmp_path / "c")]) == 2
    told = capsys.readouterr()
    assert told.out.startswith(f"{tmp_path}/b: sha256:") and f"{tmp_path}/c does not say what it takes" in told.err


@pytest.mark.parametrize("shape", ["3,32,none", "-1,3,3", "3,0,32"])
def test_an_input_shape_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: str) -> None:
    image_folder(tmp_path / "b")
    assert main(["backbone", "check", str(tmp_path / "b"), f"--input-shape={shape}"]) == 2
    assert f"--input-shape: expected numbers such as 3,32,32, found {shape}" in capsys.readouterr().err
