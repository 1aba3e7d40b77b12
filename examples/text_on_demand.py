"""Your own texts as numbers, so that a client without labels gets a model of its own (docs/odpfl.md).

    python examples/text_on_demand.py tweets.csv tweets.npz --text text --labels airline_sentiment,negativereason
    python examples/text_on_demand.py mine.csv mine.npz --text text --words tweets.npz

writes TF-IDF of the 500 most frequent words: `x` (N, 500), and with `--labels` `y` and `class_names`. A text's label is
the last of these columns that is not empty; classes of less than 100 texts are left out. Clients must agree on the
numbers: `--words` takes words and their weights from a file that an earlier call has written.
"""

import argparse
import csv
from collections import Counter
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer


def main() -> None:
    """Convert one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="CSV with a line of column names")
    parser.add_argument("out", type=Path, help=".npz to write")
    parser.add_argument("--text", required=True, help="column of the texts")
    parser.add_argument("--labels", default="", help="columns of the labels, separated by commas")
    parser.add_argument("--words", type=Path, metavar="NPZ", help="take the words of this file")
    args = parser.parse_args()
    with args.table.open(encoding="utf-8", errors="replace", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = [name for name in args.labels.split(",") if name]
    labels = [next((row[name] for name in reversed(columns) if row[name]), "") for row in rows]
    names = sorted(name for name, count in Counter(labels).items() if name and count >= 100)
    kept = [(row[args.text], label) for row, label in zip(rows, labels, strict=True) if label in names or not columns]
    texts = [text for text, _ in kept]
    vectorizer = TfidfVectorizer(max_features=500, sublinear_tf=True)
    if args.words:
        agreed = np.load(args.words)
        vectorizer.set_params(vocabulary=agreed["words"].tolist()).idf_ = agreed["idf"]
    x = (vectorizer.transform if args.words else vectorizer.fit_transform)(texts).toarray().astype(np.float32)
    arrays = {"x": x, "words": vectorizer.get_feature_names_out().astype(str), "idf": vectorizer.idf_}
    if columns:
        arrays |= {"y": np.array([names.index(label) for _, label in kept]), "class_names": np.array(names)}
    np.savez(args.out, **arrays)
    print(f"{args.out}: {len(texts)} texts, {len(names)} classes")


if __name__ == "__main__":
    main()
