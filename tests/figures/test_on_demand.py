"""The figures of ODPFL-HN: what they are drawn from is what the runs themselves have scored."""

import json
import sys
from pathlib import Path

import pytest
import torch

from figures import on_demand as figures
from hyperbloom.server.cli import main as flower_server

CLIENTS, NOVEL = 10, 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return short runs on the same digits, by strategy."""
    folder = tmp_path_factory.mktemp("runs")
    words = f"--engine inline --clients {CLIENTS} --cohort 3 --rounds 2 --eval-every 2 --split shards --set novel=30"
    words += " --set local.steps=5"
    for name, more in (("odpfl", "--set encoder=private --set embedding_dim=6"), ("fedavg", "")):
        flags = [*words.split(), "--strategy", name, *more.split(), "--run-dir", str(folder / name)]
        assert flower_server(flags) == 0
    return {name: folder / name for name in ("odpfl", "fedavg")}


@pytest.fixture
def study(runs: dict[str, Path]) -> figures.Study:
    return figures.Study(runs["odpfl"])


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: object) -> list[dict[str, object]]:
    """Run the program; return all lines of its file of results."""
    arguments = [*map(str, words), "--results", str(folder / "results.jsonl")]
    monkeypatch.setattr(sys, "argv", ["on_demand", *arguments])
    figures.main()
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def scored(run: Path) -> float:
    (selected,) = json.loads((run / "summary.json").read_text()).values()
    return float(selected["metrics"]["novel_test_mean"])


def test_unchanged_images_score_as_in_the_runs_and_others_do_not(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = play(monkeypatch, tmp_path, "shift", runs["odpfl"], runs["fedavg"])
    found = {(line["kind"], line["amount"], line["method"]): line for line in lines}
    for kind in ("blur", "rotation"):
        for method, run in (("odpfl", "odpfl"), ("odpfl, described before", "odpfl"), ("fedavg", "fedavg")):
            assert found[kind, 0.0, method]["accuracy"] == pytest.approx(scored(runs[run]), abs=0.01)
        assert found[kind, 0.0, "odpfl"]["moved"] == 0.0
    assert float(found["rotation", 90.0, "odpfl"]["moved"]) > 0.2  # type: ignore[arg-type]
    assert (tmp_path / "on-demand-shift.png").stat().st_size > 5000


def test_one_novel_client_has_no_standard_error(study: figures.Study, tmp_path: Path) -> None:
    line = study.line("shift", [50.0], amount=1.0)
    assert (line["accuracy"], line["sem"]) == (50.0, None)
    assert study.line("shift", [50.0, 54.0])["sem"] == 2.0
    figures.draw(tmp_path / "one.png", 1, "", lambda axes: figures._curve(axes[0], [line], "amount", "odpfl"))
    assert (tmp_path / "one.png").exists()


def test_a_descriptor_within_reach_is_in_the_same_direction_and_no_further_than_those_that_trained(
    study: figures.Study,
) -> None:
    known = study.trained.strategy.descriptors_of_trained()  # type: ignore[attr-defined]
    mean = known.mean(0)
    radius = (known - mean).norm(dim=1).sort().values
    inside, far = mean + 0.1 * (known[0] - mean), mean + 100 * (known[0] - mean)
    found = study.within_reach(torch.stack([inside, far]))
    torch.testing.assert_close(found[0], inside)
    assert radius[-2] * 0.99 <= (found[1] - mean).norm() <= radius[-1] * 1.01
    assert float(torch.cosine_similarity(found[1] - mean, known[0] - mean, dim=0)) > 0.999


def test_blur_and_rotation_are_of_the_size_that_they_say() -> None:
    image = torch.zeros(1, 1, 21, 21)
    image[0, 0, 10, 16] = 1.0
    spread = figures.blurred(image, 2.0)[0, 0]
    offsets = torch.arange(21.0) - 16
    assert float((spread.sum(0) * offsets.square()).sum() / spread.sum()) == pytest.approx(4.0, rel=0.15)
    assert int(figures.rotated(image, 90.0, [0.0]).flatten().argmax()) == 4 * 21 + 10  # from the right to the top
    corner = figures.rotated(image + 5.0, 45.0, [-1.0])[0, 0, 0, 0]
    assert float(corner) == -1.0


def test_described_are_examples_that_nobody_trained_on_in_the_clients_proportions(study: figures.Study) -> None:
    unseen, index = figures.Unseen(study), study.novel[0]
    shares = study.clients[index].class_shares
    order = unseen.order(index, shares, seed=1)
    assert len(order) == len(set(order.tolist())) > len(study.clients[index].val)
    for count in (20, 50, len(order)):
        counts = torch.bincount(unseen.labels[order[:count]], minlength=len(shares))
        assert (counts - count * shares).abs().max() <= 1.0
    chosen = {row.numpy().tobytes() for row in unseen.inputs[order]}
    trained = [c.train for i, c in enumerate(study.clients) if i not in study.novel]
    for examples in (*trained, study.clients[index].test):
        # Two digits of 1,797 have the same pixels now and then.
        assert sum(row.numpy().tobytes() in chosen for row in examples.inputs) <= 1


def test_noise_shrinks_with_the_number_of_examples_and_the_descriptors_are_the_encoders(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = play(monkeypatch, tmp_path, "privacy", runs["odpfl"], "--draws", 2)
    assert len(lines) == len({line["examples"] for line in lines}) * (1 + len(figures.NOISES))
    sigma = {(line["examples"], line["epsilon"], line["mechanism"]): float(str(line["sigma"])) for line in lines}
    assert sigma[50, 0.3, "analytic"] == pytest.approx(2 * sigma[100, 0.3, "analytic"], rel=1e-2)
    assert sigma[50, 0.3, "classical"] == pytest.approx(2.27 * sigma[50, 0.3, "analytic"], rel=1e-2)
    again = play(monkeypatch, tmp_path, "privacy", runs["odpfl"], "--draws", 2)
    assert again == lines  # in their place, and the same


def test_scores_of_a_descriptor_are_those_of_its_model(study: figures.Study) -> None:
    found = figures.Space.of(study)
    with torch.no_grad():
        means = figures.scores(study, found.descriptors[study.novel][:, None].expand(-1, 2, -1))
    assert sum(means) / NOVEL == pytest.approx(scored(study.trained.run), abs=0.01)
    stored = study.trained.tensors["embeddings"]
    assert torch.allclose(found.descriptors, stored[[client.row for client in study.roster]], atol=1e-4)


def test_the_probe_finds_what_is_there(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shares = torch.eye(4)[torch.arange(60) % 4] * 0.6 + torch.eye(4)[torch.randint(4, (60,))] * 0.4
    told = figures.Space(shares @ torch.randn(4, 5), shares, range(50, 60))
    assert told.probe(ridge=1e-6) > 0.999
    assert told.neighbours()[0] == 100.0 > told.neighbours()[1]
    untold = figures.Space(torch.randn(60, 5), shares, range(50, 60))
    assert untold.probe() < 0.3
    (line,) = play(monkeypatch, tmp_path, "space", runs["odpfl"], "--figure", tmp_path / "map.png")
    assert line["accuracy"] == pytest.approx(scored(runs["odpfl"]), abs=0.01)
    assert (tmp_path / "map.png").stat().st_size > 5000


def test_wrong_runs_are_told(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="expected a run of odpfl, found fedavg"):
        play(monkeypatch, tmp_path, "space", runs["fedavg"])
    with pytest.raises(SystemExit):
        play(monkeypatch, tmp_path, "shift", runs["odpfl"])
