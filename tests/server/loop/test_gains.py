"""After the last round clients say what the federation gains them: in the run folder, on the report, on the card."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyperbloom.common.config import DataConfig, LocalConfig, RunConfig
from hyperbloom.common.gains import MODELS, Gain, sentence
from hyperbloom.server.grids.engine import inline_grid
from hyperbloom.server.loop.listener import Listener
from hyperbloom.server.loop.session import Session
from hyperbloom.server.pages.report import write_report
from hyperbloom.server.runs.export import Export
from hyperbloom.server.runs.folder import RunFolder
from hyperbloom.server.runs.lines import read_gains

pytestmark = pytest.mark.usefixtures("clean_process")


class Told(Listener):
    """Keeps the gains."""

    gains: dict[str, Gain] | None = None

    def gained(self, gains: Any, metric: str) -> None:
        assert metric == "accuracy"
        self.gains = gains


def play(folder: Path, strategy: str, **changes: Any) -> Told:
    values: dict[str, Any] = {
        "clients": 3,
        "cohort": 2,
        "rounds": 2,
        "eval_every": 2,
        "gains": True,
        "local": LocalConfig(steps=2, batch_size=8),
        "data": DataConfig(name="digits", max_train=20),
    }
    config = RunConfig(strategy=strategy, **(values | changes))
    told = Told()
    folder.mkdir(parents=True, exist_ok=True)
    listeners = [RunFolder(folder, config, "run"), told]
    Session(config, inline_grid(config, folder), "run", listeners).run()
    return told


@pytest.mark.parametrize(
    ("strategy", "models", "changes"),
    [
        ("pfedhn", ("personal", "tuned", "alone"), {"options": {"hidden_dim": 8}}),
        ("pfedhn-pc", ("personal", "tuned", "alone"), {"options": {"hidden_dim": 8}}),
        ("odpfl", ("personal", "tuned", "alone"), {"options": {"hidden_dim": 8}}),
        ("fedavg", ("personal", "tuned", "alone"), {}),
        ("fedavg-ft", ("personal", "tuned", "common", "alone"), {"options": {"epochs": 1}}),
        ("ditto", ("personal", "tuned", "common", "alone"), {}),
        ("ghn", ("personal", "tuned", "common", "alone"), {"models": ("mlp",), "options": {"hidden": 8, "latent": 8}}),
        ("hafl-distillation", ("personal", "alone"), {"models": ("mlp",), "options": {"epochs": 1}}),
    ],
)
def test_every_client_compares_what_its_strategy_gives_it(
    tmp_path: Path, strategy: str, models: tuple[str, ...], changes: dict[str, Any]
) -> None:
    gains = play(tmp_path, strategy, **changes).gains
    assert gains is not None and list(gains) == ["client-0", "client-1", "client-2"]
    for name, gain in gains.items():
        assert gain.models == models and gain.chosen in models
        of = dict(zip(gain.models, gain.test, strict=True))
        assert gain.value == pytest.approx(of[gain.chosen] - of["alone"])
        assert (tmp_path / "clients" / name / "scored" / f"run-{strategy}.safetensors").exists()


def test_the_answer_is_in_the_run_folder_on_the_report_and_on_the_card(tmp_path: Path) -> None:
    gains = play(tmp_path, "pfedhn", options={"hidden_dim": 8}).gains
    assert gains is not None
    found = read_gains(tmp_path)
    assert all((found[name][1].value, found[name][1].low) == (gain.value, gain.low) for name, gain in gains.items())
    page = write_report(tmp_path).read_text().replace("&#39;", "'")
    assert "Does it pay for each client?" in page and "3 clients gain" in page
    export = Export(tmp_path)
    for personal in export.models(export.clients(None)):
        name = personal.client.client_id
        says = sentence(name, gains[name], "accuracy")
        assert says in page and f"{says}." in personal.card.remarks
        elsewhere = [remark for remark in personal.card.remarks if "It has chosen" in remark]
        assert bool(elsewhere) == (gains[name].chosen != "personal")
        assert all(MODELS[gains[name].chosen] in remark and "flower-client export" in remark for remark in elsewhere)


def test_nothing_is_asked_unless_wished_nor_of_clients_that_learn_alone(tmp_path: Path) -> None:
    assert play(tmp_path / "unasked", "fedavg", gains=False).gains is None
    assert play(tmp_path / "alone", "local").gains is None
    assert not list(tmp_path.glob("*/gains.jsonl"))


def test_lines_hold_the_sentence_and_the_numbers(tmp_path: Path) -> None:
    play(tmp_path, "fedavg")
    lines = [json.loads(line) for line in (tmp_path / "gains.jsonl").read_text().splitlines()]
    assert [line["client"] for line in lines] == ["client-0", "client-1", "client-2"]
    assert all(line["says"].startswith(line["client"]) and line["gain"]["chosen"] in MODELS for line in lines)
