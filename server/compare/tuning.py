"""The settings that are best on validation examples, by successive halving over runs in a comparison's folder.

Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016,
https://arxiv.org/abs/1502.07943. All are tried for few rounds, the better half anew for twice as many, and so on.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from rich.console import Console

from hyperbloom.common.config import RunConfig, dump_run_config, parse_assignment
from hyperbloom.common.errors import CohortError, ConfigError
from hyperbloom.common.files.storage import write_bytes
from hyperbloom.common.metrics import scale_of
from hyperbloom.server.compare.comparison import Cell, check_cells, joining, open_comparison, run_cells
from hyperbloom.server.compare.table import markdown
from hyperbloom.server.runs.recorded import read_summary
from hyperbloom.server.watch.view import print_line

USUAL = ("local.learning_rate=0.005,0.02,0.1", "local.steps=10,50")
OTHERS = r"(?!\s*(rounds|eval_every|seed|baselines|gains|select|task|novel|clients|data(\.\w+)?)\s*=)[^=]+=.+"
"""All keys but those that the search sets, and those with which scores say something else."""
Rung = dict[int, float]
WORST = -math.inf  # the score of a setting with which no client could be trained or scored


def halve(count: int, rounds: int, score: Callable[[Sequence[int], int], Sequence[float]]) -> dict[int, Rung]:
    """Return the scores of settings 0 to `count` - 1 by rounds and setting; `score` gives some their scores.

    After `rounds` rounds there are at most two, unless the rounds are too few for so many halvings.
    """
    rungs, left = dict[int, Rung](), list(range(count))
    for step in reversed(range(min(max(1, (count - 1).bit_length()), rounds.bit_length()))):
        rung = rungs[rounds // 2**step] = dict(zip(left, score(left, rounds // 2**step), strict=True))
        left = sorted(sorted(left, key=lambda one: -rung[one])[: (len(left) + 1) // 2])
    return rungs


def grid_of(over: Sequence[str]) -> dict[str, Any]:
    """Return the values to try by key, of texts such as `local.steps=10,50`; ConfigError if one is wrong."""
    if bad := [text for text in over if not re.fullmatch(OTHERS, text)]:
        raise ConfigError(f"--over: expected KEY=A,B, such as local.steps=10,50, of what may vary; found {bad[0]!r}")
    keys = [text.partition("=")[0].strip() for text in over]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"--over: expected each key once, with all its values, found {twice[0]} again")
    return dict(parse_assignment(text.replace("=", "=[", 1) + "]") for text in over)


def tune(
    describe: Callable[[Mapping[str, Any]], RunConfig],
    out: Path,
    over: Sequence[str],
    seeds: int,
    engine: str,
    rounds: int | None = None,
    **where: Any,
) -> str:
    """Search, or go on with a search; write tuned.md and tuned.yaml, the run with the best settings; return the table.

    `describe` returns the run with some changes, by dotted key. Each setting, budget and seed has a run folder. The
    last settings have so many `rounds`, by default the run's. `where` are the flags for clients elsewhere.
    """
    base, tried = describe({}), grid_of(over or USUAL)
    if rounds is not None:
        every = {"eval_every": min(base.eval_every, rounds)} if "eval_every" in base.model_fields_set else {}
        base = describe({"rounds": rounds, **every})
    settings = [dict(zip(tried, choice, strict=True)) for choice in product(*tried.values())]
    names = [", ".join(f"{key}={value}" for key, value in each.items()) for each in settings]

    def cells(one: int, rounds: int) -> list[Cell]:
        budget = {"rounds": rounds, "eval_every": min(base.eval_every, rounds), "baselines": (), "gains": False}
        runs = [describe({**settings[one], **budget, "seed": base.seed + more}) for more in range(seeds)]
        return [Cell(names[one], run, out / f"{rounds}-{one}-seed{run.seed}") for run in runs]

    def score(left: Sequence[int], rounds: int) -> list[float]:
        plan = [cells(one, rounds) for one in left]
        run_cells([cell for some in plan for cell in some], engine, Console(), grid)
        return [fmean(map(_score, some)) for some in plan]

    last = [cell for one in range(len(settings)) for cell in cells(one, base.rounds)]
    for budget in {base.rounds, min(halve(len(settings), base.rounds, lambda left, _: [0.0] * len(left)))}:
        check_cells([cell for one in range(len(settings)) for cell in cells(one, budget)], engine)
    shared = {"engine": engine, "seeds": seeds, "over": names, **base.model_dump(mode="json")}
    clients = joining(engine, base, out, partial(print_line, Console()), where)
    with open_comparison(out, shared, last), clients as (grid, _):
        print(f"search: {out} (the same command with --out {quote(str(out))} goes on where this one stops)", flush=True)
        rungs = halve(len(settings), base.rounds, score)
        best, highest = max(rungs[base.rounds].items(), key=lambda pair: pair[1])
        if highest == WORST:
            raise CohortError("no setting could be trained for all rounds; the lines above say why")
        metric = read_summary(cells(best, base.rounds)[0].folder)[describe(settings[best]).strategy].metric
        shown = [[_shown(r[one], metric) if one in r else "" for r in rungs.values()] for one in range(len(names))]
        rows = [[name, *each] for name, each in zip(names, shown, strict=True)]
        text = markdown(("setting", *(f"{rounds} round{'' if rounds == 1 else 's'}" for rounds in rungs)), rows)
        text += f"\n\nMean over clients on validation examples (inf: could not be trained). Best: {names[best]}\n"
        write_bytes(out / "tuned.md", text.encode())
        write_bytes(out / "tuned.yaml", dump_run_config(describe(settings[best])).encode())
    return text


def _shown(score: float, metric: str) -> str:
    return "inf" if score == WORST else scale_of(metric).cell(scale_of(metric).sign * score, 2)


def _score(cell: Cell) -> float:
    """Return a cell's selecting metric on validation examples at the selected round, negative for errors."""
    chosen = read_summary(cell.folder).get(cell.config.strategy) if cell.finished else None
    mean = chosen.metrics.get("val_mean") if chosen else None
    return WORST if chosen is None or mean is None else mean * scale_of(chosen.metric).sign
