"""Pretrained networks from folders: of transformers, timm and torchvision, and nothing that could run code."""

import json
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyperbloom.common.data.scaling import Scaling
from hyperbloom.common.errors import ModelError
from hyperbloom.common.files.export import Card, read_model, write_model
from hyperbloom.common.models import (
    BACKBONE,
    ModelSpec,
    backbone_digest,
    backbone_features,
    backbone_shape,
    body_layout,
    build,
    full_layout,
    head_layout,
    merged,
)
from hyperbloom.common.models.pretrained import check_tokens, load_backbone, vocabulary
from tests.slow import quick

from .backbones import LENGTH, VOCABULARY, gpt_folder, image_folder, text_folder, timm_folder, torchvision_folder


def spec(folder: Path, shape: tuple[int, ...] = (1, 8, 8), adapt: str = "lora:r=2", classes: int = 3) -> ModelSpec:
    return ModelSpec(BACKBONE, "M", shape, classes, adapt, str(folder))


TRANSFORMERS = {"image": "AutoModelForImageClassification", "text": "AutoModelForSequenceClassification"}


@pytest.fixture(autouse=True, scope="module")
def peft() -> Any:
    """Return peft. It takes seconds to import, which nobody should wait for who collects tests and runs others."""
    return pytest.importorskip("peft", reason="extra backbone")


def loaded(kind: str, folder: Path) -> Any:
    """Return what a class of transformers reads, with a head for three classes."""
    import transformers

    return getattr(transformers, kind).from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True).eval()


def test_features_before_a_head_of_several_layers_are_the_same_in_every_process(tmp_path: Path) -> None:
    """DistilBERT's last layer follows one that belongs to the head, whose values are drawn anew."""
    import transformers

    sizes = {"dim": 8, "hidden_dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.DistilBertConfig(max_position_embeddings=LENGTH, **sizes)
    transformers.DistilBertForSequenceClassification(config).save_pretrained(tmp_path)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(backbone_features(spec(tmp_path, (LENGTH,)), texts()))
    assert torch.equal(*found) and found[0].std() > 0


def texts() -> Tensor:
    tokens = torch.randint(1, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(0)).float()
    tokens[1:, 4:] = 0
    return tokens


def images() -> Tensor:
    return torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, tuple[int, ...]]]:
    top = tmp_path_factory.mktemp("backbones")
    return {
        "image": (image_folder(top / "image"), (1, 8, 8)),
        "text": (text_folder(top / "text"), (LENGTH,)),
        "timm": (timm_folder(top / "timm"), (1, 16, 16)),
        "torchvision": (torchvision_folder(top / "torchvision"), (3, 32, 32)),
    }


@pytest.mark.parametrize("kind", ["image", "text", "timm", "torchvision"])
def test_a_folder_is_a_network_with_a_new_head(kind: str, folders: dict[str, tuple[Path, tuple[int, ...]]]) -> None:
    where, shape = folders[kind]
    module = build(spec(where, shape, "head"))
    stored = load_file(where / "model.safetensors")
    if kind in TRANSFORMERS:  # its names in a file are those of earlier versions
        stored = dict(loaded(TRANSFORMERS[kind], where).state_dict())
    head = {name for name, _ in head_layout(spec(where, shape)).shapes}
    assert 1 <= len(head) <= 2 and head == {name for name, _ in full_layout(spec(where, shape, "head")).shapes}
    for name, values in module.state_dict().items():
        if name not in head:
            assert torch.equal(values, stored[name.removeprefix("network.")]), name
    assert body_layout(spec(where, shape)).numel > 0
    assert module(torch.zeros(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("kind", ["image", "text", "timm", "torchvision"])
def test_a_folder_without_a_layer_of_the_body_is_refused_by_its_name(
    kind: str, folders: dict[str, tuple[Path, tuple[int, ...]]], tmp_path: Path
) -> None:
    """That layer was drawn anew without a word: the same in all clients, so no digest tells."""
    where, shape = folders[kind]
    shutil.copytree(where, tmp_path / "spoiled")
    stored = load_file(where / "model.safetensors")
    head = {name.removeprefix("network.") for name, _ in head_layout(spec(where, shape)).shapes}
    body = [name for name in stored if "pooler" not in name and name not in head]
    name = max(body, key=lambda name: stored[name].numel())
    for spoiled in ({}, {name: stored[name][:-1].contiguous()}):
        left = {each: tensor for each, tensor in stored.items() if each != name} | spoiled
        save_file(left, tmp_path / "spoiled" / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelError, match="tensors are missing or of another shape: ") as caught:
            build(spec(tmp_path / "spoiled", shape))
        assert name.rpartition(".")[2] in str(caught.value) and "classifier" not in str(caught.value)


def test_lora_takes_the_layer_of_gpt_that_peft_names_and_merges_it(tmp_path: Path) -> None:
    module = build(spec(gpt_folder(tmp_path), (LENGTH,), "lora:r=2")).eval()
    added = {name: values for name, values in module.named_parameters() if "lora_" in name}
    assert {name.split(".lora_")[0] for name in added} == {"network.transformer.h.0.attn.c_attn"}
    for values in added.values():
        torch.nn.init.normal_(values)
    expected = module(texts())
    assert torch.allclose(merged(module)(texts()), expected, atol=1e-5)
    module.get_parameter("network.transformer.h.0.attn.c_attn.lora_B.default.weight").data.zero_()
    assert not torch.allclose(module(texts()), expected, atol=1e-3)


def test_a_last_layer_that_reads_all_tokens_has_no_features_of_one_shape(tmp_path: Path) -> None:
    """A batch is as long as its longest text, so an encoder that fits one text may not fit the next."""
    where = gpt_folder(tmp_path)
    with pytest.raises(ModelError, match="reads one vector of a text, found one of each token"):
        backbone_shape(spec(where, (LENGTH,)))
    with pytest.raises(ModelError, match=f"rows of at most {LENGTH} tokens, found {LENGTH + 1}"):
        build(spec(where, (LENGTH + 1,)))


def test_images_and_texts_are_classified_as_transformers_does(folders: dict[str, tuple[Path, tuple[int, ...]]]) -> None:
    module = build(spec(folders["image"][0], adapt="head")).eval()
    plain = loaded("ViTForImageClassification", folders["image"][0])
    plain.classifier.load_state_dict(module.get_submodule("network.classifier").state_dict())
    assert torch.equal(module(images()), plain(pixel_values=images()).logits)
    module = build(spec(folders["text"][0], (LENGTH,), "head")).eval()
    bert = loaded("BertForSequenceClassification", folders["text"][0])
    bert.classifier.load_state_dict(module.get_submodule("network.classifier").state_dict())
    expected = bert(input_ids=texts().long(), attention_mask=texts().ne(0).long()).logits
    assert torch.allclose(module(texts()), expected, atol=1e-6)
    assert torch.allclose(module(texts()[1:]), expected[1:], atol=1e-5)  # not padded beyond the longest


def test_the_digest_is_that_of_the_folder(folders: dict[str, tuple[Path, tuple[int, ...]]], tmp_path: Path) -> None:
    where = folders["image"][0]
    copied = shutil.copytree(where, tmp_path / "copied")
    assert backbone_digest(spec(copied)) == backbone_digest(spec(where, adapt="bias", classes=9))
    tensors = load_file(copied / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2 and "layer" in name)
    (tmp_path / "permuted").mkdir()
    shutil.copy(where / "config.json", tmp_path / "permuted")
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, tmp_path / "permuted" / "model.safetensors")
    assert backbone_digest(spec(tmp_path / "permuted")) != backbone_digest(spec(where))


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="torch 2.6 does not trace transformers 5")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, to peft
@pytest.mark.parametrize("kind", quick(["image", "text"], "image"))
def test_peft_loads_an_exported_adapter(
    kind: str, folders: dict[str, tuple[Path, tuple[int, ...]]], tmp_path: Path, peft: Any
) -> None:
    where, shape = folders[kind]
    module = build(spec(where, shape)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = module(inputs := images() if kind == "image" else texts())
    card = Card("A model", {}, ())
    files = write_model(tmp_path / "out", module, spec(where, shape), ("a", "b", "c"), Scaling(1.0), card)
    assert "adapter" in files
    assert ("model.onnx" in files) == (find_spec("onnxruntime") is not None)  # it is checked against torch
    model = peft.PeftModel.from_pretrained(loaded(TRANSFORMERS[kind], where), tmp_path / "out" / "adapter").eval()
    arguments = (
        {"pixel_values": inputs}
        if kind == "image"
        else {
            "input_ids": inputs.long(),
            "attention_mask": inputs.ne(0).long(),
        }
    )
    assert torch.allclose(model(**arguments).logits, expected, atol=1e-5)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert torch.allclose(program(inputs), expected, atol=1e-5)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="torch 2.6 does not trace transformers 5")
@pytest.mark.skipif(find_spec("onnxruntime") is None, reason="a backbone runs there")
def test_an_exported_model_of_texts_answers_for_tokens_alone(
    folders: dict[str, tuple[Path, tuple[int, ...]]], tmp_path: Path
) -> None:
    where, shape = folders["text"]
    module = build(spec(where, shape)).eval()
    write_model(tmp_path / "m", module, spec(where, shape), ("a", "b", "c"), Scaling(1.0), Card("A model", {}, ()))
    answer = read_model(tmp_path / "m")[1]
    assert torch.allclose(answer(texts()), module(texts()), atol=1e-5)
    for strange in (texts() / 255, texts() + 30):  # bytes that were scaled as pixels are; another tokenizer
        with pytest.raises(ModelError, match="--model: expected tokens, whole numbers from 0 to 29; found "):
            answer(strange)


def test_a_pickle_is_refused_with_the_command_that_converts_it(
    folders: dict[str, tuple[Path, tuple[int, ...]]], tmp_path: Path
) -> None:
    where = folders["torchvision"][0]
    shutil.copy(where / "config.json", tmp_path)
    torch.save(load_file(where / "model.safetensors"), tmp_path / "weights.pth")
    with pytest.raises(ModelError, match="is a pickle, which may run code; convert it once: python -c ") as caught:
        build(spec(tmp_path, (3, 32, 32)))
    program = str(caught.value).partition("python -c '")[2][:-1]
    exec(program)
    assert backbone_digest(spec(tmp_path, (3, 32, 32))) == backbone_digest(spec(where, (3, 32, 32)))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        (None, r"expected a folder with config\.json"),
        ({"model_type": "t5gemma_nonsense"}, "classifies neither images nor texts"),
        ({"library": "torchvision", "architecture": "squeezenet1_9"}, "Unknown model"),
        ({"library": "torchvision", "architecture": "resnet18"}, "tensors are missing"),
        ({"architecture": "hf-hub:somebody/network"}, "expected a name of timm's and arguments of its network"),
        ({"architecture": "resnet18", "model_args": {"checkpoint_path": "x.model"}}, "expected a name of timm's"),
        ({"architecture": "resnet18", "model_args": {"pretrained_cfg": {}}}, "expected a name of timm's"),
    ],
)
def test_another_folder_is_one_clear_line(
    config: dict[str, Any] | None, error: str, folders: dict[str, tuple[Path, tuple[int, ...]]], tmp_path: Path
) -> None:
    shutil.copy(folders["torchvision"][0] / "model.safetensors", tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=error) as caught:
        build(spec(tmp_path, (3, 32, 32)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "beside"),
    [
        ({"model_type": "timm_wrapper", "architecture": "hf-hub:some/net"}, ""),
        ({"model_type": "timm_wrapper", "architecture": "vgg11", "model_args": {"checkpoint_path": "/etc/hosts"}}, ""),
        ({"attn_implementation": "some/kernel"}, ""),
        ({}, "adapter_config.json"),
    ],
)
def test_a_folder_from_elsewhere_fetches_and_opens_nothing(
    changed: dict[str, Any], beside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may have sent it: timm's wrapper fetches and opens files, an adapter's pattern can run for ever."""
    folder = text_folder(tmp_path / "sent")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    if beside:
        (folder / beside).write_text(json.dumps({"target_modules": "([a-z0-9_.]+)+!"}))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("it asked the network"))
    with pytest.raises(ModelError, match=r"expected a network alone in .*, found an adapter, kernel or timm_wrapper"):
        backbone_digest(spec(folder, (LENGTH,)))


def test_inputs_that_do_not_fit_are_told(folders: dict[str, tuple[Path, tuple[int, ...]]]) -> None:
    with pytest.raises(ModelError, match=r"fails on inputs of shape \(1, 9, 9\)"):
        build(spec(folders["image"][0], (1, 9, 9)))
    network, sound = build(spec(folders["text"][0], (LENGTH,))), torch.tensor([[0.0, 29.0]])
    check_tokens("--backbone", vocabulary(network), sound)
    for wrong in (30, -1, 1.5):  # the last two from a table of numbers
        with pytest.raises(ModelError, match=f"expected tokens, whole numbers from 0 to 29; found {wrong}"):
            check_tokens("--backbone", vocabulary(network), sound, torch.tensor([[3.0, wrong]]))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "many"), ("vocab_size", -3), ("num_attention_heads", 0), ("pad_token_id", 99999)],
)
def test_a_configuration_of_which_no_network_can_be_made_is_told(key: str, value: object, tmp_path: Path) -> None:
    folder = text_folder(tmp_path / "bert")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, key: value}))
    with pytest.raises(ModelError, match=r"^--backbone: expected a network in "):
        load_backbone(str(folder), (LENGTH,), 2)
