"""Hospitals with tables of their own: the server hands out what the columns mean, and refuses other schemas."""

import csv
import json
from pathlib import Path

import pytest

from hyperbloom.client.cli import main as client
from hyperbloom.common.data import table
from hyperbloom.server.cli import main as server_main
from tests.processes.conftest import Site

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

HEART = Path(table.__file__).with_name("heart_disease.csv")


def write_hospitals(folder: Path) -> dict[str, Path]:
    """Write a table for each hospital, without the hospital's name."""
    with HEART.open(newline="") as file:
        rows = list(csv.DictReader(file))
    paths = {}
    for name in ("cleveland", "budapest"):
        paths[name] = folder / f"{name}.csv"
        with paths[name].open("w", newline="") as file:
            writer = csv.DictWriter(file, [column for column in rows[0] if column != "hospital"], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(row for row in rows if row["hospital"] == name)
    return paths


def test_the_server_hands_out_the_schema_and_models_predict_from_tables(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hospitals, proposed, run = write_hospitals(tmp_path), tmp_path / "schema.json", tmp_path / "run"
    assert client(["schema", str(hospitals["cleveland"]), "--label", "num", "--out", str(proposed)]) == 0
    assert "13 columns" in capsys.readouterr().out
    assert client(["schema", str(hospitals["cleveland"]), "--label", "num", "--out", str(proposed)]) == 2
    assert f"--out: expected nothing there yet, found {proposed}, perhaps mended" in capsys.readouterr().err
    schema = json.loads(proposed.read_text())
    schema["columns"] = [column for column in schema["columns"] if column["name"] in ("age", "sex", "cp", "thalach")]
    proposed.write_text(json.dumps(schema))
    short = ["--strategy", "fedavg", "--rounds", "2", "--clients", "2", "--cohort", "2", "--run-dir", str(run)]
    server = site.server(*short, "--set", f"data.schema_file={proposed}")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(schema | {"columns": schema["columns"][:2]}))
    odd = site.client("odd", "--data", str(hospitals["cleveland"]), "--schema", str(other))
    assert odd.wait() == 3, odd.output
    assert "--schema: not the server's: expected 4 columns, found 2" in odd.output
    clients = [site.client(name, "--data", str(path), "--label", "num") for name, path in hospitals.items()]
    assert server.wait() == 0, server.output
    assert [each.wait() for each in clients] == [0, 0], clients[0].output
    roster = json.loads((run / "roster.json").read_text())["clients"]
    assert [each["about"]["input_shape"] for each in roster] == [[12], [12]]  # two numbers, 2 + 4 words, four gaps

    assert server_main(["export", str(run), "--client", "budapest", "--out", str(tmp_path / "models")]) == 0
    capsys.readouterr()
    without_labels = tmp_path / "new.csv"
    without_labels.write_text("sex,thalach,age,cp\n1,150,63,1\n0,,,4\n")
    assert client(["predict", "--model", str(tmp_path / "models" / "budapest"), "--json", str(without_labels)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["file"] for line in lines] == [f"{without_labels}:2", f"{without_labels}:3"]
    assert all(line["class"] in {"0", "1", "2", "3", "4"} and len(line["probabilities"]) == 5 for line in lines)


@pytest.mark.slow
def test_a_newcomer_with_a_table_and_no_label_gets_a_model_by_the_runs_schema(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hospitals, proposed, run = write_hospitals(tmp_path), tmp_path / "schema.json", tmp_path / "run"
    assert client(["schema", str(hospitals["cleveland"]), "--label", "num", "--out", str(proposed)]) == 0
    data = ["--data", str(hospitals["cleveland"]), "--set", f"data.schema_file={proposed}", "--split", "iid"]
    short = ["--strategy", "odpfl", "--engine", "inline", "--rounds", "1", "--clients", "3", "--cohort", "3"]
    few = ["--eval-every", "1", "--set", "encoder=private", "--set", "embedding_dim=4", "--set", "local.steps=1"]
    assert server_main([*short, *few, *data, "--run-dir", str(run)]) == 0
    told = json.loads((run / "roster.json").read_text())["clients"][0]["about"]["schema"]
    scales = {column["name"]: column["mean"] for column in json.loads(told)["columns"]}
    assert scales["age"] == pytest.approx(54.4, abs=1)

    bare = tmp_path / "bare.csv"
    with hospitals["budapest"].open(newline="") as file, bare.open("w", newline="") as out:
        rows = list(csv.DictReader(file))
        writer = csv.DictWriter(out, [column for column in rows[0] if column != "num"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    server = site.start("hyperbloom.server", "server", "serve", str(run), "--port", str(site.port), "--insecure")
    server.wait_for("flower-client join --server 127.0.0.1:")
    to = ["--server", f"127.0.0.1:{site.port}", "--insecure", "--data", str(bare), "--out", str(tmp_path / "model")]
    newcomer = site.start("hyperbloom.client", "newcomer", "join", *to, "--state-dir", str(tmp_path / "state"))
    assert newcomer.wait() == 0, newcomer.output
    server.interrupt()
    assert server.wait() == 130
    capsys.readouterr()
    assert client(["predict", "--model", str(tmp_path / "model"), "--json", str(bare)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
