"""Texts as rows of token numbers, by the tokenizer in the folder of a pretrained network."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hyperbloom.common.data.files import need
from hyperbloom.common.data.scaling import AnyArray
from hyperbloom.common.errors import DataError, describe

FILES = (
    *("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model"),
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
"""Files that decide how a tokenizer cuts texts. A folder has some of them."""

LENGTH = 128
"""Tokens of the longest text, unless a schema says another number."""
TOKENIZER = "tokenizer"
"""Folder with the tokenizer in that of a trained model."""


def token_rows(texts: list[str], length: int, folder: str | None, where: str) -> AnyArray:
    """Return numbers of tokens, float32 `(N, length)`, cut or padded on the right; DataError without a tokenizer."""
    if folder is None:
        raise DataError(f"{where}: texts need --backbone FOLDER, a pretrained network with its tokenizer")
    found = _tokenizer(folder)
    cut = found(texts, truncation=True, max_length=min(length, found.model_max_length))["input_ids"] if texts else []
    rows = np.full((len(texts), length), found.pad_token_id or 0, np.float32)
    for row, tokens in zip(rows, cut, strict=True):
        row[: len(tokens)] = tokens
    return rows


def tokenizer_bytes(folder: str | None) -> bytes:
    """Return the files of a folder that decide how texts are cut; nothing without a tokenizer."""
    paths = [Path(folder).expanduser() / name for name in FILES] if folder else []
    return b"".join(path.read_bytes() for path in paths if path.is_file())


def most_tokens(folder: str | None) -> int:
    """Return how many tokens a text has at most by default; 0 without a tokenizer."""
    return min(LENGTH, _tokenizer(folder).model_max_length) if folder and tokenizer_bytes(folder) else 0


def copy_tokenizer(folder: str, to: Path) -> None:
    """Write the tokenizer of one folder into another."""
    _tokenizer(folder).save_pretrained(to)


@lru_cache(4)
def _tokenizer(folder: str) -> Any:
    transformers = need("transformers", "transformers")
    path, safely = Path(folder).expanduser(), {"local_files_only": True, "trust_remote_code": False}
    try:
        found = transformers.AutoTokenizer.from_pretrained(path, **safely)
        if (path / "config.json").is_file():  # the network may take fewer tokens; -1 is no limit
            most = getattr(transformers.AutoConfig.from_pretrained(path, **safely), "max_position_embeddings", None)
            if isinstance(most, int) and most > 0:
                found.model_max_length = min(found.model_max_length, most)
        return found
    except Exception as error:  # of several libraries
        raise DataError(f"expected a tokenizer in {folder}, found none: {describe(error)[:200]}") from None
