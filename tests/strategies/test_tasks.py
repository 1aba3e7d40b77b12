"""Every strategy with every task: it trains a round and scores, or says why not, as the table of docs/tasks.md does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperbloom.client.work.client import client_for
from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.errors import CohortError
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.listener import Listener
from hyperbloom.server.loop.session import Session
from hyperbloom.strategies import STRATEGIES
from tests.server.test_resume import ALIGNED, OPTIONS

PAGE = Path(__file__).parents[2] / "docs/tasks.md"
COLUMNS = ("multilabel", "regression", "segmentation")  # all other tests have classes
OWN = ("ghn", "ghn-server", "hafl-distillation")


class Said(Listener):
    """Keeps what is told of the run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def event(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a file of small images for each task."""
    generator, folder = np.random.default_rng(0), tmp_path_factory.mktemp("tasks")
    x = generator.random((96, 1, 8, 8), dtype=np.float32)
    labels = {
        "multilabel": np.where(generator.random((96, 3)) < 0.1, np.nan, generator.random((96, 3)) < 0.5),
        "regression": generator.normal(5, 2, (96, 2)),
        "segmentation": generator.integers(0, 3, (96, 8, 8)),
    }
    for name, y in labels.items():
        np.savez(folder / f"{name}.npz", x=x, y=y)
    return {name: folder / f"{name}.npz" for name in labels}


def outcome(strategy: str, task: str, data: Path, folder: Path) -> str:
    """Train a round of 2 steps and score; return "yes", or why the first client is refused."""
    client_for.cache_clear()
    options: dict[str, Any] = dict(OPTIONS.get(strategy, {}))
    if options.get("rad") == ALIGNED["rad"]:
        options["rad"] = "tests.server.test_resume:public_inputs"
    model = "unet" if task == "segmentation" else "mlp"
    config = RunConfig(
        strategy=strategy,
        clients=3,
        cohort=3,
        rounds=1,
        eval_every=1,
        checkpoint_every=0,
        sizes=("S",),
        models=(model,) if strategy in OWN else (),
        local=LocalConfig(steps=2, batch_size=4),
        data=DataConfig(name=str(data), split="iid"),
        options=options,
        novel=34 if strategy.startswith("pfl-") else 0,
        join_timeout_s=0.1,
    )
    said = Said()
    try:
        best = Session(config, inline_grid(config, folder), "run", [said]).run()[strategy]
    except CohortError:
        return " ".join(said.texts)
    scored = [name for name in ("test_mean", "novel_test_mean") if name in best.metrics]
    assert len(best.test_accuracy) == 3 and scored, best
    return "yes"


def documented() -> dict[str, dict[str, str]]:
    """Return the cells of the page's table, by strategy and task."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    start = next(at for at, row in enumerate(rows) if row[0] == "strategy")
    assert rows[start][1:] == list(COLUMNS)
    cells = {}
    for names, *row in rows[start + 1 :]:
        cells |= {name: dict(zip(COLUMNS, row, strict=True)) for name in names.split(", ")}
    return cells


def test_the_page_names_every_strategy() -> None:
    assert sorted(documented()) == sorted(STRATEGIES)


@pytest.mark.parametrize("task", COLUMNS)
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_strategy_learns_a_task_or_is_refused_for_the_reason_on_the_page(
    files: dict[str, Path], tmp_path: Path, strategy: str, task: str
) -> None:
    cell, found = documented()[strategy][task], outcome(strategy, task, files[task], tmp_path)
    verdict, _, reason = cell.partition(": ")
    assert (verdict == "yes") == (found == "yes"), found
    assert verdict == "yes" or reason in found, found
