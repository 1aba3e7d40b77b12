"""Text of your own, from a function: of which library is a sentence that says what a function does?

    cd examples
    flower-server --engine inline --data text:load --split dirichlet --clients 4 --cohort 2 --rounds 20 \
      --set local.learning_rate=0.05

The texts are the documentation of installed packages. Words are hashed to features, so that all clients agree on the
numbers without having seen each other's words.
"""

import os

import numpy as np
import torch
from scipy import special
from sklearn import metrics
from sklearn.feature_extraction.text import HashingVectorizer

LIBRARIES = (np, os, special, metrics, torch)
FEATURES = 512
Part = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Part, Part, Part]:
    """Return train, validation and test: counts of hashed words (N, 512) and labels (N,)."""
    texts = [(text, label) for label, library in enumerate(LIBRARIES) for text in sentences(library)]
    hashed = HashingVectorizer(n_features=FEATURES, norm=None, alternate_sign=False, token_pattern=r"[a-z]{2,}")
    features = hashed.transform([text for text, _ in texts]).toarray().astype(np.float32)
    labels = np.array([label for _, label in texts])
    rows = np.random.default_rng(0).permutation(len(texts))
    first, second = int(0.6 * len(rows)), int(0.8 * len(rows))
    train, val, test = ((features[part], labels[part]) for part in np.split(rows, [first, second]))
    return train, val, test


def sentences(library: object) -> list[str]:
    """Return, sorted, the first 40 words of what each function of a library says of itself, without its signature."""
    functions = [value for name, value in vars(library).items() if name.islower() and callable(value)]
    found = {str(getattr(function, "__doc__", None) or "") for function in functions}
    texts = (" ".join(text.split("\n\n", 1)[-1].split()[:40]) for text in found)
    return sorted(text for text in texts if len(text.split()) >= 5)
