"""Files in the form of MedMNIST, whole runs by the command that docs/tasks.md names, and when patience ends them."""

import json
from pathlib import Path

import numpy as np
import pytest

from hyperbloom.server.cli import main

COMMAND = "--engine inline --clients 6 --cohort 3 --set select=auroc --set patience=3 --baselines local,fedavg"
SHORT = "--rounds 40 --eval-every 1 --set local.steps=1 --set local.batch_size=8"
PARTS = {"train": 120, "val": 60, "test": 60}


def write_medmnist(path: Path, labels: int) -> None:
    """Write grey images of 28 x 28 pixels; a label that holds is a bright spot at a place of its own."""
    generator, arrays = np.random.default_rng(labels), {}
    for part, count in PARTS.items():
        found = (generator.random((count, labels)) < 0.4).astype(np.uint8)
        images = generator.integers(0, 150, (count, 28, 28), dtype=np.uint8)
        for label in range(labels):
            row, column = 6 * (label // 4), 6 * (label % 4)
            images[:, row : row + 5, column : column + 5] += 60 * found[:, label, None, None]
        arrays |= {f"{part}_images": images, f"{part}_labels": found}
    np.savez(path, **arrays)


@pytest.mark.parametrize(("labels", "outputs"), [(1, 2), pytest.param(14, 14, marks=pytest.mark.slow)])
def test_the_best_round_by_auroc_is_kept_and_patience_ends_each_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clean_process: None, labels: int, outputs: int
) -> None:
    data, run = tmp_path / "medmnist.npz", tmp_path / "run"
    write_medmnist(data, labels)
    assert main([*COMMAND.split(), *SHORT.split(), "--data", str(data), "--run-dir", str(run)]) == 0
    told, summary = capsys.readouterr().out, json.loads((run / "summary.json").read_text())
    assert list(summary) == ["pfedhn", "local", "fedavg"]
    for name, best in summary.items():
        folder = run if name == "pfedhn" else run / "baselines" / name
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        values = {line["round"]: line["val_mean"] for line in lines}
        assert best["metric"] == "auroc" and values[best["round"]] == max(values.values())
        assert len(values) == best["round"] + 3 < 40, values
        assert f"validation AUROC has not become better for 3 evaluations: round {len(values)} was the last" in told
        if name == "pfedhn":
            said = f"After {len(values)} of 40 rounds (in 3 evaluations the AUROC had not become better)"
            assert said in (run / "report.html").read_text()
    assert main(["export", str(run), "--client", "client-0", "--out", str(tmp_path / "models")]) == 0
    described = json.loads((tmp_path / "models" / "client-0" / "model.json").read_text())
    assert described["num_classes"] == outputs
    card = (tmp_path / "models" / "client-0" / "README.md").read_text()
    assert f"{summary['pfedhn']['round']} of 40, selected by validation" in card
    for watch in (["watch", str(run)], ["watch", "--once", str(run)]):
        assert main(watch) == 0
        told = capsys.readouterr().out
        assert "stopped" not in told, told
