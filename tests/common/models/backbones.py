"""Pretrained networks for tests: tiny ones, with random weights, in folders as their libraries write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY = 30
LENGTH = 6


def image_folder(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a ViT of transformers for images `(1, 8, 8)`."""
    import transformers

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **(sizes | changes))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.ViTForImageClassification(config).save_pretrained(folder)
    return folder


def text_folder(folder: Path, seed: int = 0) -> Path:
    """Write a BERT of transformers for texts of up to `LENGTH` tokens."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def gpt_folder(folder: Path) -> Path:
    """Write a GPT-2 of transformers for texts of up to `LENGTH` tokens, whose padding is 0."""
    import transformers

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.GPT2Config(pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes)
        transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, words: str = "the ward was clean and quiet but food cold bad good never again") -> Path:
    """Write a tokenizer that splits at blanks, and knows these words from number 3 on; 0 is padding, 1 unknown."""
    import tokenizers
    import transformers

    known = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", *words.split()])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=LENGTH
    ).save_pretrained(folder)
    return folder


def torchvision_folder(folder: Path) -> Path:
    """Write a network of torchvision for images `(3, 32, 32)`."""
    import torchvision

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"library": "torchvision", "architecture": "squeezenet1_1"}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tensors = torchvision.models.squeezenet1_1().state_dict()
    save_file(tensors, folder / "model.safetensors")
    return folder


def timm_folder(folder: Path) -> Path:
    """Write a network of timm for images `(1, 16, 16)`."""
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = timm.create_model("test_vit", in_chans=1, img_size=16, num_classes=7)
    folder.mkdir(parents=True)
    timm.models.save_for_hf(module, folder, model_args={"img_size": 16}, safe_serialization=True)
    return folder
