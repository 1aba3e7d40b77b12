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
from itertools import product
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


def tables(lines: Sequence[Line]) -> str:
    """Return each size's mean by seed, beside that of others with the same classes, and what remains of a size.

    The interval is Student's, over clients. They are taken as independent, which those of the same classes are not in
    full, because each is in the mean of the others.
    """
    others = of_same_classes(lines)
    both = [(line, other) for line, other in zip(lines, others, strict=True) if other is not None]
    text = [table_row(("seed", "size", "clients", "accuracy", "others of the same classes")), table_row(["---"] * 5)]
    sizes = sorted({line["size"] for line in lines}, reverse=True)
    for seed, size in product(sorted({line["seed"] for line in lines}), sizes):
        some = [(line["test"], other) for line, other in both if (line["seed"], line["size"]) == (seed, size)]
        mine, theirs = np.array(some).mean(0)
        text.append(table_row((str(seed), size, str(len(some)), f"{mine:.1f}", f"{theirs:.1f}")))
    heads = ("size", "clients", "accuracy", "others of the same classes", "difference")
    text += ["", table_row(heads), table_row(["---"] * 5)]
    for size in sizes:
        found = np.array([(line["test"], other) for line, other in both if line["size"] == size])
        (mine, theirs), above = found.mean(0), found[:, 0] - found[:, 1]
        half = student.ppf(0.975, len(above) - 1) * above.std(ddof=1) / len(above) ** 0.5
        low, mean, high = (f"{above.mean() + part:+z.1f}" for part in (-half, 0, half))
        text.append(table_row((size, str(len(above)), f"{mine:.1f}", f"{theirs:.1f}", f"{mean} ({low} to {high})")))
    return "\n".join(text)


def main(words: Sequence[str] | None = None) -> None:
    """Add runs to the results, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="folders of runs; without one, the tables are printed")
    parser.add_argument("--root", default="data", help="folder with the published files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    if not args.folders:
        print(tables(read(args.results)))
        return
    new = [line for folder in args.folders for line in lines_of(folder, args.root)]
    seeds = {line["seed"] for line in new}
    kept = [line for line in read(args.results) if line["seed"] not in seeds]
    write_bytes(args.results, "".join(json.dumps(line) + "\n" for line in [*kept, *new]).encode())
    print(f"{args.results}: {len(new)} clients")


if __name__ == "__main__":
    main()
