"""Data that stand in for those of a paper, which cannot be had here; clients name `figures.stand_ins:FUNCTION`.

`airline_tweets`: 14,640 tweets of airlines' customers by sentiment, from `airline_tweets.csv` (Crowdflower, 2015;
CC BY-NC-SA 4.0). The reader uses the columns `airline_sentiment` (negative, neutral or positive), `name` (the author)
and `text`. A hash maps words to numbers, so that clients agree on them without knowing each other's words.

`chest_xray_1000`: a thousand chest X-rays of X. Wang et al., "ChestX-ray8", CVPR 2017, https://arxiv.org/abs/1705.02315,
500 with pneumonia and 500 without finding, from one `nih_chestxray_1000.npz`. The file holds `x`: uint8
`(N, 128, 128)`, `y`: `(N,)`, 1 for pneumonia, and `patient`: `(N,)`.

`random_words`: a public reference set for FedHeNN on tweets.
"""

import csv
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from figures.files import find_file
from hyperbloom.common.data import DataSpec
from hyperbloom.common.data.draws import FIXED_SEED, IntArray, generator, three_parts
from hyperbloom.common.data.files import check_labels, read_arrays
from hyperbloom.common.data.own import check_pair, with_units
from hyperbloom.common.data.pool import Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.errors import DataError

TWEETS = "airline_tweets.csv"
COLUMNS = ("airline_sentiment", "name", "text")
MOODS = ("negative", "neutral", "positive")
LENGTH = 32
"""Number of words that are kept of a tweet."""

WORDS = 9_999
"""Words are hashed to numbers from 1 to this; 0 is padding."""

HOW_TWEETS = f"It cannot be downloaded here: put it into {{root}}, with the columns {', '.join(COLUMNS)}."


def pick_arrays(path: Path, keys: Sequence[str]) -> dict[str, AnyArray]:
    """Read an `.npz` file; DataError if it is corrupt or lacks one of `keys`."""
    arrays = read_arrays(path)
    if not set(keys) <= arrays.keys():
        raise DataError(f"{path}: expected the keys {', '.join(keys)}, found {', '.join(arrays)}")
    return arrays


def tokens(text: str) -> list[int]:
    """Return the numbers of the first `LENGTH` words of a text, padded with 0."""
    words = re.findall(r"[a-z']+", text.lower())[:LENGTH]
    numbers = [1 + zlib.crc32(word.encode()) % WORDS for word in words]
    return numbers + [0] * (LENGTH - len(numbers))


def airline_tweets() -> Pool:
    """Return the tweets, `LENGTH` numbers in three classes, which users own."""
    path = find_file(DataSpec().folder, TWEETS, HOW_TWEETS)
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = [tuple(row[column] for column in COLUMNS) for row in csv.DictReader(file)]
    except (OSError, csv.Error, KeyError) as error:
        raise DataError(f"{path}: expected columns {', '.join(COLUMNS)}, found that {error!r} is wrong") from None
    wrong = next((label for label, _, _ in rows if label not in MOODS), None)
    if wrong is not None or not rows:
        raise DataError(f"{path}: expected tweets that are {', '.join(MOODS)}, found {wrong or 'none'}")
    users, owners = np.unique([user for _, user, _ in rows], return_inverse=True)
    labels = np.array([MOODS.index(label) for label, _, _ in rows], dtype=np.int64)
    stored = np.array([tokens(text) for _, _, text in rows], dtype=np.float32)
    whole, rng = Portion.of(stored, labels, owners), generator(FIXED_SEED, "tweets")
    train, val, test = whole.split(lambda strata: three_parts(strata, 0.15, rng))
    return Pool("airline-tweets", train, val, test, MOODS, Scaling(1.0), tuple(users.tolist()))


def random_words() -> list[tuple[AnyArray, IntArray]]:
    """Return 2,000 synthetic tweets with labels in three parts, for use as a public reference set."""
    rng = generator(FIXED_SEED, "random words")
    words = 1 + np.minimum(rng.zipf(1.3, (2000, LENGTH)) - 1, WORDS - 1)
    words[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, (2000, 1))] = 0
    parts = np.split(words.astype(np.float32), [1600, 1800])
    return [(part, np.arange(len(part), dtype=np.int64) % len(MOODS)) for part in parts]


XRAYS = "nih_chestxray_1000.npz"
KEYS = ("x", "y", "patient")
CLASSES = ("no finding", "pneumonia")
SIDE = 128
HOW_XRAYS = f"It cannot be downloaded here: put it into {{root}}, with the keys {', '.join(KEYS)}."


def chest_xray_1000() -> Pool:
    """Return the X-rays, 1 x 128 x 128 in two classes. All images of a patient are in the same portion."""
    path = find_file(DataSpec().folder, XRAYS, HOW_XRAYS)
    arrays = pick_arrays(path, KEYS)
    whole = check_pair(arrays["x"], arrays["y"], f"{path}: key 'x'", f"{path}: key 'y'")
    check_labels(whole.labels, len(CLASSES), path)
    patients = arrays["patient"]
    if arrays["x"].shape[1:] != (SIDE, SIDE) or patients.shape != (len(whole),):
        found = f"{arrays['x'].shape} and {patients.shape}"
        raise DataError(f"{path}: expected images (N, {SIDE}, {SIDE}) and as many patients, found {found}")
    (whole,), _ = with_units([whole], {"groups": [patients]}, str(path))
    rng = generator(FIXED_SEED, "chest")
    train, val, test = whole.split(lambda strata: three_parts(strata, 0.15, rng))
    return Pool("chest-xray-1000", train, val, test, CLASSES, Scaling(255.0))
