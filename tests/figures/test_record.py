"""Lines of results, from the folders in which `figures.reproduce` runs."""

import json
from pathlib import Path

from figures.paper_tables import load_table
from figures.record import lines_of, main, merged
from hyperbloom.common.config import dump_yaml
from hyperbloom.common.files.storage import write_bytes


def begun(out: Path, seed: int, points: list[tuple[int, float]], **options: object) -> None:
    """Write a run's folder as far as its evaluations, of validation accuracy and one more on test examples."""
    overrides = {f"options.{key}": value for key, value in options.items()}
    config = load_table("pfedhn-table3").config("pFedHN", "mnist-50", {**overrides, "data.root": "here"})
    folder = out / f"pfedhn-seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    values = config.model_copy(update={"seed": seed}).model_dump(mode="json")
    write_bytes(folder / "config.yaml", dump_yaml(values).encode())
    lines = [{"round": number, "val_mean": value, "test_mean": value + 1} for number, value in points]
    last = {"round": points[-1][0] + 7, "loss": 0.5}  # a round without an evaluation
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
    shared = {"engine": "inline", "table": "pfedhn-table3", "column": "mnist-50"}
    write_bytes(out / "comparison.yaml", dump_yaml(shared).encode())


def test_a_run_becomes_a_line_that_is_replaced_when_it_has_gone_on(tmp_path: Path) -> None:
    results, plain, scaled = tmp_path / "results.jsonl", tmp_path / "plain", tmp_path / "scaled"
    begun(plain, 0, [(100, 50.0)])
    begun(plain, 1, [(100, 51.234)])
    begun(scaled, 0, [(100, 60.0)], start="scaled")
    main([str(plain), str(scaled), "--results", str(results)])
    begun(plain, 0, [(100, 50.0), (200, 70.0)])
    main([str(plain), "--results", str(results)])
    about = {"table": "pfedhn-table3", "column": "mnist-50", "method": "pFedHN"}
    assert [json.loads(line) for line in results.read_text().splitlines()] == [
        {**about, "seed": 0, "rounds": 207, "round_val_test": [[100, 50.0, 51.0], [200, 70.0, 71.0]]},
        {**about, "seed": 1, "rounds": 107, "round_val_test": [[100, 51.234, 52.23]]},
        {**about, "seed": 0, "rounds": 107, "set": ["options.start=scaled"], "round_val_test": [[100, 60.0, 61.0]]},
    ]


def test_a_line_has_the_means_of_the_papers_groups_of_clients(tmp_path: Path) -> None:
    folder = tmp_path / "local-seed0"
    folder.mkdir()
    config = load_table("hafl-table2").config("Local", "xray1000-12")
    write_bytes(folder / "config.yaml", dump_yaml(config.model_dump(mode="json")).encode())
    (folder / "metrics.jsonl").write_text(json.dumps({"round": 8, "val_mean": 70.0, "test_mean": 35.0}) + "\n")
    accuracy = {f"client-{number}": 10.0 * number for number in range(8)}
    selected = {"round": 8, "metrics": {"test_mean": 35.0}, "test_accuracy": accuracy}
    (folder / "summary.json").write_text(json.dumps({"local": selected}))
    shared = {"engine": "inline", "table": "hafl-table2", "column": "xray1000-12"}
    write_bytes(tmp_path / "comparison.yaml", dump_yaml(shared).encode())
    (line,) = lines_of(tmp_path)
    assert line["parts"] == {"avg": 35.0, "arch-0": 20.0, "arch-1": 30.0, "arch-2": 40.0, "arch-3": 50.0}


def test_a_shorter_run_does_not_replace_a_longer_one() -> None:
    about = {"table": "pfedhn-table1", "column": "cifar10-50", "method": "pFedHN", "set": []}
    long, short, other = ({**about, "seed": seed, "rounds": n} for seed, n in ((0, 5000), (0, 500), (1, 500)))
    again = {**long, "selected": 7}
    assert merged([long], [short, other]) == [long, other]
    assert merged([short, other], [long]) == [long, other]
    assert merged([long, other], [again]) == [again, other]
