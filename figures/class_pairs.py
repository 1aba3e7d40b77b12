"""Does the size of a client's network matter, or which two classes it has? pFedHN's table 2, freed of the classes.

In table 2 each size is the mean of 25 clients, and each client has two classes at random. Some pairs are hard (cats and
dogs), others easy. So a client is compared with the other clients of the same two classes, of any size and seed.

    python -m figures.reproduce pfedhn-table2 --column cifar10 --root DIR --methods pFedHN --seeds 3 --out FOLDER
    python -m figures.class_pairs FOLDER/pfedhn-seed? --root DIR   # adds a line for each client
    python -m figures.class_pairs                                 # the tables, as Markdown
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from figures.pages import read, table_row
from hyperbloom.common.config import load_run_config
from hyperbloom.common.data import load_client_data
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.server.grids.local_clients import client_settings
from hyperbloom.server.runs.recorded import read_summary

RESULTS = Path(__file__).with_name("class_pairs.jsonl")
Line = dict[str, Any]


def lines_of(folder: Path, root: str) -> Iterator[Line]:
    """Yield a line for each client of a run: its size, its classes and its test accuracy at the selected round."""
    config = load_run_config(folder / "config.yaml", {"data.root": root})
    (selected,) = read_summary(folder).values()
    for index in range(config.clients):
        settings = client_settings(config, index, folder)
        classes = load_client_data(settings.data).class_shares.nonzero()[:, 0].tolist()
        test = round(selected.test_accuracy[settings.client_id], 2)
        yield {"seed": config.seed, "client": index, "size": settings.size, "classes": classes, "test": test}


def of_same_classes(lines: Sequence[Line]) -> list[float | None]:
    """Return for each client the mean accuracy of all others with its classes; None if there is none."""
    alike: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for line in lines:
        alike[tuple(line["classes"])].append(line["test"])
    found = [(line["test"], alike[tuple(line["classes"])]) for line in lines]
    return [(sum(group) - test) / (len(group) - 1) if len(group) > 1 else None for test, group in found]


def pairs_of(lines: Sequence[Line], **keys: Any) -> np.ndarray:
    """Return accuracies of clients with these keys beside those of others with the same classes `(clients, 2)`."""
    both = zip(lines, of_same_classes(lines), strict=True)
    return np.array(
        [(line["test"], other) for line, other in both if other is not None and line.items() >= keys.items()]
    )


def by_seed(lines: Sequence[Line]) -> str:
    """Return as Markdown each size's mean by seed, beside that of others with the same classes."""
    sizes = _sizes(lines)
    text = [table_row(["seed", *(f"{size}, others of its classes" for size in sizes)]), table_row(["---"] * 4)]
    for seed in sorted({line["seed"] for line in lines}):
        means = (pairs_of(lines, seed=seed, size=size).mean(0) for size in sizes)
        text.append(table_row([str(seed), *(f"{mine:.1f}, {theirs:.1f}" for mine, theirs in means)]))
    return "\n".join(text)


def by_size(lines: Sequence[Line]) -> str:
    """Return as Markdown what remains of a size without its classes.

    The interval is Student's, over clients. They are taken as independent, which those of the same classes are not in
    full, because each is in the mean of the others.
    """
    text = [table_row(["size", "clients", "accuracy", "others of the same classes", "difference"])]
    text.append(table_row(["---"] * 5))
    for size in _sizes(lines):
        found = pairs_of(lines, size=size)
        (mine, theirs), above = found.mean(0), found[:, 0] - found[:, 1]
        half = student.ppf(0.975, len(above) - 1) * above.std(ddof=1) / len(above) ** 0.5
        low, mean, high = (f"{above.mean() + part:+.1f}" for part in (-half, 0, half))
        text.append(table_row((size, str(len(above)), f"{mine:.1f}", f"{theirs:.1f}", f"{mean} ({low} to {high})")))
    return "\n".join(text)


def _sizes(lines: Sequence[Line]) -> list[str]:
    return sorted({line["size"] for line in lines}, reverse=True)


def main(words: Sequence[str] | None = None) -> None:
    """Add runs to the results, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="folders of runs; without one, the tables are printed")
    parser.add_argument("--root", default="data", help="folder with the published files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    if not args.folders:
        print(by_seed(read(args.results)), by_size(read(args.results)), sep="\n\n")
        return
    new = [line for folder in args.folders for line in lines_of(folder, args.root)]
    seeds = {line["seed"] for line in new}
    kept = [line for line in read(args.results) if line["seed"] not in seeds]
    write_bytes(args.results, "".join(json.dumps(line) + "\n" for line in [*kept, *new]).encode())
    print(f"{args.results}: {len(new)} clients")


TABLES = {"seeds": lambda: by_seed(read(RESULTS)), "sizes": lambda: by_size(read(RESULTS))}

if __name__ == "__main__":
    main()
