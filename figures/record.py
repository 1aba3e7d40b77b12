"""Write what `figures.reproduce` has run as lines of `figures/reproduced.jsonl`, of which `figures.cells` makes cells.

A line has a run's table, column, method and seed, the rounds that are over, every evaluation as round, validation and
test accuracy, and the settings in which the run differs from the table. Where the paper has numbers of some clients
each, there are their means at the selected round. A run that goes on replaces its earlier line.

    python -m figures.reproduce pfedhn-table3 --column mnist-50 --root DIR --methods pFedHN
    python -m figures.record runs/reproduce-pfedhn-table3-mnist-50
    python -m figures.cells
    python -m figures.pages
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from figures.pages import read
from figures.paper_tables import PaperTable, load_table
from figures.reproduce import mean_of_part, slug
from hyperbloom.common.config import load_run_config, read_yaml
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.server.runs.lines import COMPARISON, METRICS, read_lines
from hyperbloom.server.runs.recorded import read_summary

RESULTS = Path(__file__).with_name("reproduced.jsonl")
FREE = {"seed", "rounds", "eval_every", "checkpoint_every", "init_from", "data.root"}
"""Keys in which runs may differ without another setting."""
Line = dict[str, Any]


def lines_of(out: Path) -> Iterator[Line]:
    """Yield a line for each run in a folder of `figures.reproduce` that has been evaluated."""
    about = read_yaml(out / COMPARISON)
    table = load_table(about["table"])
    folders = {slug(method): method for method, row in table.methods.items() if row.is_in(about["column"])}
    for folder in sorted(path.parent for path in out.glob("*/config.yaml")):
        name, _, seed = folder.name.rpartition("-seed")
        if name in folders and seed.isdigit():
            yield from _line(table, folder, {**about, "method": folders[name], "seed": int(seed)})


def _line(table: PaperTable, folder: Path, about: Mapping[str, Any]) -> Iterator[Line]:
    found = list(read_lines(folder / METRICS))
    points = [
        [line["round"], round(line["val_mean"], 4), round(line[table.metric], 2)]  # 2 digits would make ties
        for line in found
        if line.get("val_mean") is not None
    ]
    if points:
        run = load_run_config(folder / "config.yaml", {}).model_dump(mode="json")
        plain = table.config(about["method"], about["column"]).model_dump(mode="json")
        own = {"set": own} if (own := sorted(_differences(plain, run))) else {}
        keys = ("table", "column", "method", "seed")
        head = {key: about[key] for key in keys}
        yield {**head, "rounds": found[-1]["round"], **own, **_parts(table, folder, about), "round_val_test": points}


def _parts(table: PaperTable, folder: Path, about: Mapping[str, Any]) -> Line:
    wanted = {part: chosen for part, chosen in table.columns[about["column"]].parts.items() if chosen}
    if not wanted:
        return {}
    (selected,) = read_summary(folder).values()
    return {"parts": {part: round(mean_of_part(selected.test_accuracy, *each), 2) for part, each in wanted.items()}}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in now:
        name, old, new = f"{prefix}{key}", before.get(key), now[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{name}.")
        elif old != new and name not in FREE:
            yield f"{name}={new}"


def merged(before: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Return all lines, with new ones in the place of earlier ones of the same run that are not longer."""
    own: dict[tuple[Any, ...], Line] = {}
    for line in [*before, *new]:
        if line["rounds"] >= own.get(_key(line), line)["rounds"]:
            own[_key(line)] = line
    return list(own.values())


def _key(line: Line) -> tuple[Any, ...]:
    return (*(line[key] for key in ("table", "column", "method", "seed")), *line.get("set", []))


def main(words: Sequence[str] | None = None) -> None:
    """Add the runs of some folders to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="--out of figures.reproduce")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    before = read(args.results)
    new = [line for folder in args.folders for line in lines_of(folder)]
    text = "".join(json.dumps(line) + "\n" for line in merged(before, new))
    write_bytes(args.results, text.encode())
    print(f"{args.results}: {len(new)} runs")


if __name__ == "__main__":
    main()
