"""The data that stand in for those of papers, on small files in their form."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from figures.stand_ins import tokens
from hyperbloom.common.data import DataSpec, load_client_data
from hyperbloom.common.errors import DataError

XRAYS, TWEETS = DataSpec("figures.stand_ins:chest_xray_1000"), DataSpec("figures.stand_ins:airline_tweets")


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERBLOOM_DATA", str(tmp_path))


def write_chest(root: Path, **changes: NDArray[np.generic]) -> None:
    """Write 40 patients with one to three images each; an image is as bright as its patient's number."""
    patient = np.repeat(np.arange(40), np.arange(40) % 3 + 1)
    arrays = {
        "x": np.broadcast_to(patient.astype(np.uint8)[:, None, None], (len(patient), 128, 128)),
        "y": patient % 2,
        "patient": 1000 - patient,
    }
    np.savez(root / "nih_chestxray_1000.npz", **{**arrays, **changes})  # type: ignore[arg-type]


def test_no_patient_is_in_two_parts(tmp_path: Path) -> None:
    write_chest(tmp_path)
    data = load_client_data(XRAYS)
    assert (data.input_shape, data.num_classes) == ((1, 128, 128), 2)
    patients = [
        set((part.inputs[:, 0, 0, 0] * 255).round().int().tolist()) for part in (data.train, data.val, data.test)
    ]
    assert [len(part) for part in patients] == [28, 6, 6]
    assert len(set.union(*patients)) == 40
    for part, seen in zip((data.train, data.val, data.test), patients, strict=True):
        assert len(part) == sum(number % 3 + 1 for number in seen)
        assert part.labels.tolist() == [round(float(x) * 255) % 2 for x in part.inputs[:, 0, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patient": np.arange(3)}, "expected images .N, 128, 128. and as many patients, found"),
        ({"y": np.full(79, 2)}, "expected labels from 0 to 1, found label 2"),
    ],
)
def test_wrong_chest_files_are_named(tmp_path: Path, changes: dict[str, NDArray[np.generic]], message: str) -> None:
    write_chest(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        load_client_data(XRAYS)


def test_missing_stand_ins_say_where_to_put_them(tmp_path: Path) -> None:
    for spec, file in ((XRAYS, "nih_chestxray_1000.npz"), (TWEETS, "airline_tweets.csv")):
        with pytest.raises(DataError, match=f"{file} not found; .* put it into {tmp_path}"):
            load_client_data(spec)


def write_tweets(root: Path, moods: tuple[str, ...] = ("negative", "neutral", "positive")) -> None:
    """Write 20 users of 20 tweets; the first word of a tweet is its user's."""
    word = "abcdefghijklmnopqrst"
    rows = [f'1,{moods[t % len(moods)]},{word[u]}x,"{word[u] * 3} is, {t}"' for u in range(20) for t in range(20)]
    (root / "airline_tweets.csv").write_text("tweet_id,airline_sentiment,name,text\n" + "\n".join(rows))


def test_tweets_are_dealt_by_user(tmp_path: Path) -> None:
    write_tweets(tmp_path)
    specs = [DataSpec(TWEETS.data, split="owner", partition=i, partitions=6) for i in range(6)]
    clients = [load_client_data(spec) for spec in specs]
    words = [
        {number for part in (client.train, client.val, client.test) for number in part.inputs[:, 0].int().tolist()}
        for client in clients
    ]
    assert sorted(len(each) for each in words) == [3, 3, 3, 3, 4, 4]
    assert len(set.union(*words)) == 20  # so no user has tweets on two clients
    assert sum(len(part) for client in clients for part in (client.train, client.val, client.test)) == 400
    assert (clients[0].input_shape, clients[0].class_names) == ((32,), ("negative", "neutral", "positive"))
    other = load_client_data(replace(specs[0], seed=1))
    assert set(other.train.inputs[:, 0].int().tolist()) != words[0]


def test_words_become_numbers_that_every_client_finds_alike() -> None:
    assert tokens("Fly ME, fly!")[:4] == [*tokens("fly me fly")[:3], 0]
    assert len(tokens("word " * 100)) == len(tokens("")) == 32
    assert tokens("")[0] == 0
    assert min(tokens("a b c d")[:4]) >= 1 and max(tokens("a b c d")) <= 9999
    assert tokens("hello")[0] == 1 + 0x3610A686 % 9999  # the published CRC-32 of "hello"


@pytest.mark.parametrize(
    ("content", "message"),
    [("a,b\n1,2\n", "expected columns airline_sentiment, name, text"), ("airline_sentiment,name,text\n", "found none")],
)
def test_wrong_tweet_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "airline_tweets.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        load_client_data(TWEETS)
    write_tweets(tmp_path, ("angry",))
    with pytest.raises(DataError, match="found angry"):
        load_client_data(TWEETS)


def test_made_up_tweets_can_be_read_as_data() -> None:
    data = load_client_data(DataSpec("figures.stand_ins:random_words"))
    assert (data.input_shape, len(data.train), len(data.val), len(data.test)) == ((32,), 1600, 200, 200)
    words = data.train.inputs
    assert bool(((words >= 0) & (words <= 9999)).all()) and bool((words[:, 0] > 0).all())
    assert bool((words[:, 1:][words[:, :-1] == 0] == 0).all())  # padding is at the end
