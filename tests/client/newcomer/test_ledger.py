"""The ledger of what newcomers have spent: nothing is forgotten."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hyperbloom.client.newcomer import ledger as module
from hyperbloom.client.newcomer.guarantee import Guarantee, Promise
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.common.errors import HyperbloomError, RefusedError

PROMISED = Guarantee(0.3, 0.01, 50, 0.1, 0.7)


def test_joining_again_spends_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "state")
    assert ledger.read() == []
    assert ledger.spend(PROMISED, None, "box:9092") == (0.3, 0.01)
    assert Ledger(tmp_path / "state").spend(PROMISED, 0.6, "box:9092") == pytest.approx((0.6, 0.02))
    entries = ledger.read()
    assert [entry["server"] for entry in entries] == ["box:9092"] * 2
    assert {"time", "epsilon", "delta", "examples", "sensitivity", "sigma"} <= entries[0].keys()
    assert (tmp_path / "state" / "privacy.json").stat().st_mode & 0o777 == 0o600


def test_beyond_the_budget_nothing_is_entered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for _ in range(3):  # 0.1 + 0.2 is a little more than 0.3 in binary
        ledger.spend(Guarantee(0.1, 0.001, 50, 0.1, 0.7), 0.3, "box")
    with pytest.raises(RefusedError, match=r"epsilon 0.3 of 0.5 has been spent .* another 0.3 would be beyond"):
        ledger.spend(PROMISED, 0.5, "box")
    with pytest.raises(RefusedError, match="would be beyond it"):
        ledger.afford(Promise(0.3, 0.01), 0.5)
    ledger.afford(Promise(0.2, 0.01), 0.5)
    with pytest.raises(RefusedError, match=r"delta 0.003 has been spent .* nothing would be promised at all"):
        ledger.afford(Promise(0.2, 0.997), 0.5)
    assert len(ledger.read()) == 3


def test_a_descriptor_without_noise_ends_every_budget(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.spend(None, None, "box") is None
    with pytest.raises(RefusedError, match="without noise has left"):
        ledger.spend(PROMISED, 100.0, "box")
    assert ledger.spend(PROMISED, None, "box") is None


@pytest.mark.parametrize("content", ["", "[]", '{"spent": [{}]}', '{"spent": 3}', '{"spent": [{"epsilon": "x"}]}'])
def test_a_damaged_ledger_is_not_started_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "privacy.json").write_text(content)
    with pytest.raises(HyperbloomError, match="is damaged"):
        Ledger(tmp_path).spend(PROMISED, None, "box")
    assert (tmp_path / "privacy.json").read_text() == content


def test_two_who_spend_at_once_lose_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each opens the lock for itself, as processes do."""
    others, write = list[threading.Thread](), module.write_json

    def interrupted(path: Path, value: Any, mode: int) -> None:
        if not others:
            others.append(threading.Thread(target=Ledger(tmp_path).spend, args=(PROMISED, None, "box")))
            others[0].start()
            others[0].join(0.5)  # it waits for the first
        write(path, value, mode)

    monkeypatch.setattr(module, "write_json", interrupted)
    Ledger(tmp_path).spend(PROMISED, None, "box")
    others[0].join()
    assert len(json.loads((tmp_path / "privacy.json").read_text())["spent"]) == 2
