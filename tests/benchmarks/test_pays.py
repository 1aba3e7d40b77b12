"""The program that asks whether the federation pays: its sets, its figures by hand, and that it goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile
from scipy.stats import bootstrap, ttest_1samp, ttest_ind

from benchmarks import pays, pays_sets
from figures.pages import read
from hyperbloom.common.config import make_run_config

pytestmark = pytest.mark.usefixtures("clean_process")


def line(strategy: str, test: list[float], seed: int = 0, **more: object) -> pays.Line:
    return {"set": "digits, two codes", "rounds": 40, "strategy": strategy, "seed": seed, "test": test, **more}


def test_the_gain_is_over_the_baseline_that_is_better_on_average() -> None:
    lines = [line("local", [80.0, 60.0]), line("fedavg", [50.0, 92.0]), line("ditto", [81.0, 90.0])]
    np.testing.assert_allclose(pays.over_better(lines, "ditto"), [31.0, -2.0])  # over fedavg: 71 against 70
    lines.append(line("local", [90.0, 90.0], seed=1))  # no other strategy ran with this seed
    np.testing.assert_allclose(pays.over_better(lines, "ditto"), [31.0, -2.0])
    assert pays.over_better(lines, "fedper") is None and pays.over_better(lines[:1], "local") is None


def test_the_gain_on_a_set_has_students_interval_over_sites() -> None:
    """By hand: 4.303 of Student's t over the root of 3 is 2.48."""
    assert pays._gain(np.array([1.0, 2.0, 3.0])) == "+2.0 (-0.5 to +4.5)"
    assert pays._gain(None) == ""


def test_a_site_that_each_seed_deals_anew_counts_with_each_and_one_of_its_own_once() -> None:
    gains = [[0.0, 2.0, 3.0], [2.0, 2.0, 3.0]]
    np.testing.assert_allclose(pays.of_sites(gains, "heart disease, hospitals"), [1, 2, 3])
    assert sorted(pays.of_sites(gains, "digits, two codes")) == [0, 2, 2, 2, 3, 3]
    assert {*pays_sets.SETS, *pays_sets.UNSEEN} > pays_sets.LASTING


def test_a_strategy_is_told_from_the_default_by_the_interval_over_sites() -> None:
    """Paired by seed and site: 1, 2, 3 points behind is no chance; 4, 0, 2 ahead may be."""
    lines = [line("pfedhn", [71.0, 82.0, 93.0]), line("fedper", [70.0, 80.0, 90.0]), line("ditto", [75.0, 82.0, 95.0])]
    lines += [line("fedavg", [73.0, 85.0, 97.0]), line("local", [0.0] * 3, seed=1)]
    np.testing.assert_allclose(pays.over(lines, "pfedhn", "fedper"), [1.0, 2.0, 3.0])
    assert pays.over(lines, "pfedhn", "local") is None
    marks = [pays._mark([x for x in lines if x["strategy"] == name], lines[:1]) for name in pays.STRATEGIES]
    assert marks == ["", " ▲", "", "", "", "", "", "", ""]
    lines[1]["test"] = [69.0, 80.0, 90.0]  # 2, 2, 3 behind
    assert pays._mark(lines[1:2], lines[:1]) == " ▼"
    assert (
        pays._lead_over(lines, "fedper", pays_sets.SETS) == "+2.3 (+0.9 to +3.8)"
    )  # 4.303 of Student's t, 0.577 over root 3
    assert pays._lead_over(lines, "pfedhn", pays_sets.SETS) == "" == pays._lead_over(lines, "local", pays_sets.SETS)


def test_sites_that_lose_are_those_behind_training_alone_by_more_than_a_point() -> None:
    one = line("ditto", [70.0, 79.0, 78.5, 90.0], alone=[80.0, 80.0, 80.0, 80.0], gain=[0.0, -1.0, -1.5, 9.0])
    assert pays.losers([one, line("local", [1.0])]) == (25.0, 50.0, 4)
    assert pays.losers([line("local", [1.0])]) is None


def test_the_gain_by_choice_is_of_the_sites_that_were_asked() -> None:
    """By hand: the hospitals' means are 1, 2, 3, as above."""
    hospitals = {"set": "heart disease, hospitals"}
    more = {"alone": [70.0] * 3, "chosen": ["alone", "personal", "personal"]}
    gains = enumerate(([0, 2, 3], [2, 2, 3]))
    asked = [line("pfedhn", [70.0] * 3, seed, gain=gain, **more) | hospitals for seed, gain in gains]
    lines = [line(name, [70.0] * 3, seed) | hospitals for name in ("local", "fedavg") for seed in range(2)]
    assert "| +0.0 | +2.0 (-0.5 to +4.5) |" in pays.table([*lines, *asked])  # no interval where no site differs
    assert pays.by_choice(lines) is None


def test_where_every_site_kept_training_alone_no_gain_is_shown() -> None:
    alone = line("pfedhn", [70.0] * 2, gain=[0.0] * 2, alone=[70.0] * 2, chosen=["alone"] * 2)
    assert "| none took it |" in pays.table([line("local", [70.0] * 2), line("fedavg", [60.0] * 2), alone])


def test_the_interval_is_welchs_of_the_mean_over_sets() -> None:
    """Scipy's interval is for a difference of two means: of one set and the other's negative, twice the mean."""
    one, other = np.array([1.0, 2.0, 6.0]), np.array([0.0, 0.5, -0.5, 1.0, 0.2])
    expected = ttest_ind(one, -other, equal_var=False).confidence_interval()
    found = pays.interval([one, other])
    assert found == pytest.approx([(one.mean() + other.mean()) / 2, expected.low / 2, expected.high / 2])
    assert pays.interval([one])[1:] == pytest.approx(tuple(ttest_1samp(one, 0).confidence_interval()))
    for unknown in ([one, other[:1]], [one[:1].repeat(3), other[:1].repeat(4)]):
        assert np.isnan(pays.interval(unknown)[1:]).all()
    assert pays._shown(*pays.interval([one, other[:1]])) == "+1.5"


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Sets of as many sites, and as unlike each other, as those of the page; a bootstrap is too short for these."""
    rng, rounds = np.random.default_rng(0), 2000
    shapes = [(4, 3.5), (6, 1.5), (10, 0.7), (4, 4.0), (10, 0.6)]
    held, resampled = 0, 0
    for number in range(rounds):
        sets = [rng.normal(0, deviation, sites) for sites, deviation in shapes]
        _, low, high = pays.interval(sets)
        held += low <= 0 <= high
        if number < 200:
            statistic = lambda *some, axis=-1: sum(each.mean(axis) for each in some)  # noqa: E731
            some = bootstrap(sets, statistic, method="percentile", n_resamples=500, rng=number).confidence_interval
            resampled += some.low <= 0 <= some.high
    assert 0.94 <= held / rounds <= 0.97
    assert resampled / 200 < 0.92


def test_every_set_weighs_the_same_in_the_mean_gain() -> None:
    lines = [line("local", [50.0] * 6), line("fedavg", [40.0] * 6), line("pfedhn", [53.0, 51.0] * 3)]
    other = {"set": "heart disease, hospitals"}
    lines += [x | other | {"test": x["test"][:1] * 4} for x in lines[:2]] + [line("pfedhn", [55.0, 57.0] * 2) | other]
    text = pays.table(lines)
    row = next(row for row in text.splitlines() if row.startswith("| pfedhn |"))
    assert row.startswith("| pfedhn | +4.0 (") and row.split("|")[3].strip() == "2"  # not 3.6, the mean over sites
    assert "| heart disease, hospitals | 1 | 50.0 ▼ | 40.0 ▼ |  |  |  |  |  | 56.0 |" in text


def test_a_row_has_the_seeds_that_the_default_and_both_baselines_have() -> None:
    lines = [line(name, [9.0 * seed, 11.0 * seed], seed) for name in ("local", "fedavg") for seed in (1, 2)]
    lines += [line("pfedhn", [9.0 * seed, 12.0 * seed], seed) for seed in (1, 2)]
    lines += [line("local", [90.0], 3), line("ditto", [20.0], 2), line("ditto", [90.0], 3), line("fedper", [90.0], 3)]
    assert "| digits, two codes | 2 | 15.0 | 15.0 |  |  | 20.0 (1 of 2) |  |  | 15.8 |  |" in pays.table(lines)


def test_owners_and_features_of_the_files_that_are_made(tmp_path: Path) -> None:
    head = "airline_sentiment,name,text\n"
    (tmp_path / "airline_tweets.csv").write_text(head + "neutral,ann,a late late flight\nnegative,bob,late\n")
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (2, 128, 128), dtype=np.uint8)
    np.savez(tmp_path / "nih_chestxray_1000.npz", x=x, y=np.array([0, 1]), patient=np.array([7, 9]))
    tweets, chests = (
        pays_sets.tweets(tmp_path / "airline_tweets.csv"),
        pays_sets.chests(tmp_path / "nih_chestxray_1000.npz"),
    )
    assert list(tweets["owner"]) == ["ann", "bob"] and list(tweets["class_names"][tweets["y"]]) == [
        "neutral",
        "negative",
    ]
    np.testing.assert_array_equal(tweets["x"].sum(1), [3, 1])  # words of one letter do not count
    assert (tweets["x"][0] == 2 * tweets["x"][1])[tweets["x"][1] > 0].all()
    assert chests["x"].shape == (2, 32, 32) and [*chests["owner"]] == [*chests["group"]] == ["7", "9"]
    assert abs(chests["x"][1, 3, 5] - x[1, 12:16, 20:24].mean()) <= 0.5
    with pytest.raises(FileNotFoundError, match=r"expected airline_tweets\.csv in"):
        pays_sets.SETS["airline tweets, users"].data(tmp_path / "nowhere", tmp_path / "nowhere", tmp_path)


def test_unseen_sets_have_tables_of_their_own() -> None:
    """They count neither in the figures of the nine, nor in the sentence of the README."""
    lines = [line(name, [each] * 2) for name, each in {"local": 50.0, "fedavg": 40.0, "pfedhn": 53.0}.items()]
    before = pays.table(lines)
    assert "no default was chosen" not in pays.sentence(lines)
    lines += [x | {"set": "air, stations", "test": [x["test"][0] - 20, 90.0]} for x in lines]
    assert pays.table(lines) == before
    assert "On 1 federations on which no default was chosen it is +1.5 (" in pays.sentence(lines)
    unseen = pays.table(lines, pays.UNSEEN)
    assert "digits" not in unseen and "| air, stations | 1 | 60.0 | 55.0 |  |  |  |  |  | 61.5 |  | +1.5 (" in unseen


def test_rows_of_the_unseen_files(tmp_path: Path) -> None:
    head = "No,year,month,day,hour,PM2.5,PM10,SO2,NO2,CO,O3,TEMP,PRES,DEWP,RAIN,wd,WSPM,station\n"
    rows = [f"1,2013,3,{day},{hour},{dust},9,3,{day},300,85,-2,1020,-19,0,E,0.5,A" for day, hour, dust in
            [(1, 12, 76), (2, 12, 75), (2, 13, 99), (3, 12, "NA")]]  # fmt: skip
    (tmp_path / "PRSA_Data_A.csv").write_text(head + "\n".join(rows) + "\n")
    air = pays_sets.air(tmp_path)
    assert list(air["y"]) == [1, 0] and list(air["owner"]) == ["A", "A"] and air["x"].shape == (2, 13)
    np.testing.assert_array_equal(air["x"][:, 1], [-1, 1])  # NO2: the only feature that differs
    assert not np.delete(air["x"], 1, axis=1).any()

    (tmp_path / "m.arff").write_text("@data\n1,33,0.5,?,Walking\n2,17,1.5,2,Jogging\n3,17,1.5,4,Walking\n")
    motion = pays_sets.motion(tmp_path / "m.arff")
    assert list(motion["owner"]) == ["33", "17", "17"] and list(motion["y"]) == [1, 0, 1]
    np.testing.assert_array_equal(motion["x"][:, 1], [0, -1, 1])

    tone = np.sin(2 * np.pi * 1000 * np.arange(4000) / 8000)  # 1 kHz of up to 4: a quarter of the bands
    wavfile.write(tmp_path / "7_ann_0.wav", 8000, (20000 * tone).astype(np.int16))
    spoken = pays_sets.spoken(tmp_path)
    assert spoken["x"].shape == (1, 32, 32) and list(spoken["owner"]) == ["ann"] and list(spoken["y"]) == [7]
    assert set(spoken["x"][0].argmax(0)) <= {7, 8}


def test_every_set_is_a_run_that_can_be_described(tmp_path: Path) -> None:
    for name, federation in pays.ALL.items():
        data = {"name": federation.name, "split": federation.split, "alpha": federation.alpha}
        config = make_run_config({}, {"clients": federation.clients, "cohort": federation.cohort, "data": data}, name)
        assert 2 * config.cohort == config.clients
    assert (len(pays_sets.SETS), len(pays_sets.UNSEEN)) == (10, 3)


def test_a_run_is_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "pays.jsonl"
    words = ["--work", str(tmp_path / "work"), "--results", str(results)]
    more = ["--rounds", "1", "--seeds", "0", "--sets", "heart", "--strategies", "fedavg", "pfedhn"]
    pays.main([*words, *more])
    first = results.read_text()
    fedavg, default = map(json.loads, first.splitlines())
    assert "gain" not in fedavg and len(default["gain"]) == len(default["test"]) == 4
    pays.main([*words, *more])
    assert results.read_text() == first
    assert "| heart disease, hospitals | 1 |" in capsys.readouterr().out


def test_the_page_says_on_how_many_sets_the_default_is_ahead() -> None:
    page = Path("docs/federations.md").read_text(encoding="utf-8")
    lines = read(pays.RESULTS)
    ahead, behind = [], []
    for name in pays_sets.SETS:
        found = pays.over_better([line for line in lines if (line["set"], line["rounds"]) == (name, 40)], pays.DEFAULT)
        assert found is not None
        bounds = ttest_1samp(found, 0).confidence_interval()
        ahead += [name] if float(bounds.low) > 0 else []
        behind += [name] if float(bounds.high) < 0 else []
    names = " and ".join(name.split(",")[0] for name in behind)
    said = f"on {len(ahead)} of {len(pays_sets.SETS)} data sets. It is behind on {names},"
    assert said in page.replace("\n", " ")


def test_what_the_hypernetwork_adds_is_paired_by_site() -> None:
    lines = [
        line("pfedhn", [60.0, 80.0, 70.0]),
        line(pays.STILL, [59.0, 78.0, 67.0]),
        line(pays.STILL, [1.0] * 3, seed=1),
    ]
    shown = pays.still(lines)
    assert "| 1 | 68.0 | 70.0 | +2.0 (-0.5 to +4.5) |" in shown and "| mean over 1 sets |" in shown
    assert pays.STILL not in pays.table(lines)
