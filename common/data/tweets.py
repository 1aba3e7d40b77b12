"""14,640 tweets of airlines' customers by sentiment, from `airline_tweets.csv` (Crowdflower, 2015; CC BY-NC-SA 4.0).

The reader uses the columns `airline_sentiment` (negative, neutral or positive), `name` (the author) and `text`. A hash
maps words to numbers, so that clients agree on them without knowing each other's words.
"""

import csv
import re
import zlib

import numpy as np

from hyperbloom.common.data.draws import FIXED_SEED, IntArray, generator, three_parts
from hyperbloom.common.data.files import find_file
from hyperbloom.common.data.pool import ArrayBlock, Pool, Portion
from hyperbloom.common.data.scaling import AnyArray, Scaling
from hyperbloom.common.data.spec import DataSpec
from hyperbloom.common.errors import DataError

FILE = "airline_tweets.csv"
COLUMNS = ("airline_sentiment", "name", "text")
CLASSES = ("negative", "neutral", "positive")
LENGTH = 32
"""Number of words that are kept of a tweet."""

WORDS = 9_999
"""Words are hashed to numbers from 1 to this; 0 is padding."""

HOW = f"It cannot be downloaded here: put it into {{root}}, with the columns {', '.join(COLUMNS)}."


def tokens(text: str) -> list[int]:
    """Return the numbers of the first `LENGTH` words of a text, padded with 0."""
    words = re.findall(r"[a-z']+", text.lower())[:LENGTH]
    numbers = [1 + zlib.crc32(word.encode()) % WORDS for word in words]
    return numbers + [0] * (LENGTH - len(numbers))


def read_tweets(spec: DataSpec) -> Pool:
    """Return the tweets, `LENGTH` numbers in three classes, which users own."""
    path = find_file(spec.folder, FILE, HOW)
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows = [tuple(row[column] for column in COLUMNS) for row in csv.DictReader(file)]
    except (OSError, csv.Error, KeyError) as error:
        raise DataError(f"{path}: expected columns {', '.join(COLUMNS)}, found that {error!r} is wrong") from None
    wrong = next((label for label, _, _ in rows if label not in CLASSES), None)
    if wrong is not None or not rows:
        raise DataError(f"{path}: expected tweets that are {', '.join(CLASSES)}, found {wrong or 'none'}")
    users, owners = np.unique([user for _, user, _ in rows], return_inverse=True)
    labels = np.array([CLASSES.index(label) for label, _, _ in rows], dtype=np.int64)
    stored = np.array([tokens(text) for _, _, text in rows], dtype=np.float32)
    whole, rng = Portion.of(ArrayBlock(stored), labels, owners), generator(FIXED_SEED, "tweets")
    train, val, test = whole.split(lambda strata: three_parts(strata, 0.15, rng))
    return Pool(spec.data, train, val, test, CLASSES, Scaling(), "user", tuple(users.tolist()))


def random_words() -> list[tuple[AnyArray, IntArray]]:
    """Return 2,000 synthetic tweets with labels in three parts, for use as a public reference set."""
    rng = generator(FIXED_SEED, "random words")
    words = 1 + np.minimum(rng.zipf(1.3, (2000, LENGTH)) - 1, WORDS - 1)
    words[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, (2000, 1))] = 0
    parts = np.split(words.astype(np.float32), [1600, 1800])
    return [(part, np.arange(len(part), dtype=np.int64) % len(CLASSES)) for part in parts]
