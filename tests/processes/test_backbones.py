"""Two clients with a pretrained network: trained over gRPC, resumed, refused with another one, and read by peft."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from hyperbloom.common.files import export
from hyperbloom.server.cli import main
from tests.common.models.backbones import LENGTH, VOCABULARY, image_folder, text_folder
from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]


def write_examples(folder: Path, shape: tuple[int, ...], largest: int) -> list[str]:
    """Write two clients' examples, in three classes."""
    rng, files = np.random.default_rng(0), []
    for client in range(2):
        labels = np.arange(60) % 3
        inputs = rng.integers(1, largest, (60, *shape))
        inputs[np.arange(60), ..., 0] = 1 + labels.reshape(-1, *[1] * (len(shape) - 1))
        files.append(str(folder / f"{client}.npz"))
        np.savez(files[-1], x=inputs.astype(np.float32 if len(shape) > 1 else np.int64), y=labels)
    return files


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, to peft
@pytest.mark.parametrize("kind", ["image", "text"])
def test_two_clients_adapt_their_backbone(
    kind: str, site: Site, until: Callable[[Callable[[], bool], str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "HAS_ONNX", False)  # it has its own tests
    make, shape = {"image": (image_folder, (1, 8, 8)), "text": (text_folder, (LENGTH,))}[kind]
    backbone, other = str(make(site.folder / "backbone")), str(make(site.folder / "other", seed=1))
    files, run = write_examples(site.folder, shape, VOCABULARY), site.folder / "run"
    flags = ["--strategy", "pfedhn", "--clients", "2", "--cohort", "2", "--rounds", "12", "--eval-every", "5"]
    options = ["adapt=lora:r=4", f"backbone={backbone}", "checkpoint_every=1", "hidden_dim=8", "local.steps=20"]
    more = [word for option in options for word in ("--set", option)]
    server = site.server(*flags, *more, "--run-dir", str(run))
    clients = [site.client(f"c{i}", "--data", file, "--backbone", backbone) for i, file in enumerate(files)]
    metrics = run / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, "two rounds")
    server.kill()
    resumed = site.start("hyperbloom.server", "server", "--resume", str(run), "--insecure")
    stranger = site.client("stranger", "--data", files[0], "--backbone", other)
    assert stranger.wait() == 3
    assert "expected backbone sha256:" in stranger.output and "; use the same backbone" in stranger.output
    assert resumed.wait() == 0, resumed.output
    assert [client.wait() for client in clients] == [0, 0]

    assert main(["export", str(run), "--all"]) == 0
    about = json.loads((run / "models/c0/model.json").read_text())
    assert about["model"] == "backbone" and about["input_shape"] == list(shape)
    autos = {"image": transformers.AutoModelForImageClassification}
    auto: Any = autos.get(kind, transformers.AutoModelForSequenceClassification)
    inputs = torch.from_numpy(np.load(files[0])["x"][:5])
    arguments = {"pixel_values": inputs} if kind == "image" else {"input_ids": inputs, "attention_mask": inputs.ne(0)}
    logits = []
    for name in ("c0", "c1"):
        plain = auto.from_pretrained(backbone, num_labels=3, ignore_mismatched_sizes=True)
        model = peft.PeftModel.from_pretrained(plain, run / "models" / name / "adapter").eval()
        program = torch.export.load(run / "models" / name / "model.pt2").module()
        logits.append(model(**arguments).logits)
        assert torch.allclose(logits[-1], program(inputs.float()), atol=1e-5)
        adapter = load_file(run / "models" / name / "adapter/adapter_model.safetensors")
        assert any(tensor.any() for key, tensor in adapter.items() if "lora_B" in key)
    assert not torch.equal(*logits)


def test_a_client_without_the_backbone_fetches_it_and_goes_on_after_a_kill(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    backbone = image_folder(site.folder / "backbone")
    (backbone / "notes.json").write_bytes(np.random.default_rng(0).bytes(100_000_000))  # long enough to be killed in
    (backbone / "code.py").write_text("raise SystemExit")
    (file, _), fetched = write_examples(site.folder, (1, 8, 8), VOCABULARY), site.folder / "fetched"
    flags = ["--strategy", "pfedhn", "--clients", "1", "--cohort", "1", "--rounds", "2", "--serve-backbone"]
    options = ["adapt=lora:r=4", f"backbone={backbone}", "hidden_dim=8", "local.steps=5"]
    server = site.server(*flags, *(word for option in options for word in ("--set", option)))
    arguments = ["--data", file, "--backbone", str(fetched), "--fetch-backbone"]
    client, part = site.client("c0", *arguments), fetched / "notes.json.part"
    until(lambda: part.exists() and part.stat().st_size > 0, "the first pieces")
    client.kill()
    assert part.exists(), client.output
    client = site.client("c0", *arguments)
    assert server.wait() == 0, server.output
    assert client.wait() == 0
    there = re.search(r"fetching the backbone into \S+: ([0-9.]+) MB, and ([0-9.]+) MB are here", client.output)
    assert there and float(there[2]) > 4 and float(there[1]) + float(there[2]) == pytest.approx(100, abs=1)
    names = sorted(path.name for path in backbone.iterdir() if path.suffix != ".py")
    assert sorted(path.name for path in fetched.iterdir()) == names
    assert all((fetched / name).read_bytes() == (backbone / name).read_bytes() for name in names)


def test_a_server_that_hands_out_nothing_says_so(site: Site) -> None:
    file, _ = write_examples(site.folder, (1, 8, 8), VOCABULARY)
    site.server("--strategy", "fedavg", "--clients", "2", "--cohort", "1", "--rounds", "1")
    client = site.client("c0", "--data", file, "--backbone", str(site.folder / "none"), "--fetch-backbone")
    assert client.wait() == 5
    assert "hands out no backbone (flower-server --serve-backbone)" in client.output
