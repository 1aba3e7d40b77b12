"""The ledger that a site's page is made of."""

import json
import os
from pathlib import Path

import pytest

from hyperbloom.client.keep import sent
from hyperbloom.client.keep.releases import Releases
from hyperbloom.client.keep.sent import KINDS, OTHER, SENT, Sent, read_sent
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.wire import exchanges, masks, orders


def ledger(folder: Path, **settings: object) -> Sent:
    """Return the ledger of a client with this state folder."""
    own = ClientSettings("ward-7", state_dir=folder, **settings)  # type: ignore[arg-type]
    return Sent(own, Releases(own))


def test_answers_and_their_bytes_are_counted_by_kind_over_all_processes(tmp_path: Path) -> None:
    for _ in range(2):
        each = ledger(tmp_path, max_changes=7)
        each.add("train", 100)
        each.add("train.fit", 10)
        each.add("evaluate", 5, {"total": 9, "metrics": {"accuracy": 0.5}})
        each.add("train.keys", 1)
        each.write()
    found = read_sent(tmp_path)
    assert {kind: tuple(value[:2]) for kind, value in found["kinds"].items()} == {
        KINDS["train"]: (4, 220),
        KINDS["evaluate"]: (2, 10),
        OTHER: (2, 2),
    }
    assert found["score"]["metrics"] == {"accuracy": 0.5} and found["pid"] == os.getpid()
    assert found["limits"] == {"noise": None, "masked": None, "changes": 7, "scores": None}
    assert (tmp_path / SENT).stat().st_mode & 0o777 == 0o600


def test_it_is_written_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [1000.0], list[float]()
    monkeypatch.setattr(sent.time, "time", lambda: now[0])
    monkeypatch.setattr(sent, "write_json", lambda *arguments, **options: written.append(now[0]))
    each = ledger(tmp_path)
    for now[0] in (1000.0, 1000.5, 1000.9, 1002.0, 1002.5, 1004.0):
        each.add("train", 1)
    assert written == [1000.0, 1002.0, 1004.0]
    each = ledger(tmp_path, min_noise=8.0)  # nothing may be missing in its epsilon after a kill
    for now[0] in (2000.0, 2000.1):
        each.add("train", 1)
    assert written[3:] == [2000.0, 2000.1]


def test_the_least_noise_is_that_of_any_process(tmp_path: Path) -> None:
    """A later one that demands more does not cover what an earlier one let go, nor do scores count as covered."""
    for noise in (8.0, 4.0, 6.0):
        each = ledger(tmp_path, min_noise=noise)
        each.add("train", 1)
        each.add("evaluate", 1)
    found = read_sent(tmp_path)
    assert (found["least"], found["noisy"]) == (4.0, 3)


@pytest.mark.parametrize("content", ["", "[1]", '{"kinds": 3}', "null"])
def test_a_ledger_that_is_damaged_or_cannot_be_written_does_not_break_the_client(tmp_path: Path, content: str) -> None:
    (tmp_path / SENT).write_text(content)
    each = ledger(tmp_path)
    each.add("train", 1)
    assert read_sent(tmp_path)["kinds"][KINDS["train"]][:2] == [1, 1]
    (tmp_path / "file").write_text("")
    ledger(tmp_path / "file").write()  # no folder can be there


def test_every_order_has_a_kind(tmp_path: Path) -> None:
    types = {
        each.message_type
        for module in (orders, exchanges, masks)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, orders.Order) and "message_type" in vars(each)
    }
    masked = {"train.keys", "train.shares", "train.confirm", "train.unmask"}
    assert types - KINDS.keys() == {*masked, "query.reference"}
    assert json.loads(json.dumps(KINDS)) == KINDS
