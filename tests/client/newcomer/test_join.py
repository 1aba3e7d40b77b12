"""A newcomer's app and its command."""

import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from hyperbloom.client import flags as shared
from hyperbloom.client.cli import main
from hyperbloom.client.newcomer.guarantee import Guarantee, Promise
from hyperbloom.client.newcomer.join import newcomer_app
from hyperbloom.client.newcomer.ledger import Ledger
from hyperbloom.client.newcomer.newcomer import DECLINED, Newcomer
from hyperbloom.client.newcomer.sources import Sources
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.names import check_name
from hyperbloom.common.wire.orders import Greeting, Notice
from hyperbloom.common.wire.pack import pack, unpack_answer

SHAPE, CLASSES, DIM = (1, 8, 8), 10, 5


DIGITS = DataSpec("digits", partition=1, partitions=30)


def newcomer(folder: Path, data: DataSpec = DIGITS, promise: Promise | None = None, budget: float | None = None):  # type: ignore[no-untyped-def]
    return Newcomer(Sources(data), "S", promise, budget, Ledger(folder / "state"), "box:9092")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--eps", "0.3"], "--eps and --delta: expected both or neither"),
        (["--budget", "1"], "--budget: expected with --eps"),
        (["--eps", "1", "--delta", "0.01", "--budget", "nan"], "--budget: expected a number above 0, found nan"),
        (["--eps", "1", "--delta", "0.01", "--budget", "0"], "--budget: expected a number above 0, found 0"),
        (["--eps", "-1", "--delta", "0.01"], "--eps: expected a number above 0"),
        (["--eps", "1", "--delta", "0.01", "--max-train", "9"], "--eps: expected no --max-train"),
        (["--eps", "1", "--delta", "0.01", "--partition", "0/4"], "--eps: expected no --partition"),
        (["--eps", "1", "--delta", "0.01", "--label", "ill"], "--eps: expected --schema with --label"),
        (["--data", "absent.npy"], "expected a file or folder, found none"),
        (["--partition", "3"], "--partition: expected I/N"),
        (["--root-certificates", "absent.pem"], "--root-certificates: expected a file"),
    ],
)
def test_wrong_flags_are_told_before_anybody_is_asked(
    flags: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    insecure = [] if "--root-certificates" in flags else ["--insecure"]
    needed = ["join", "--server", "127.0.0.1:1", *insecure, "--data", "digits", "--out", str(tmp_path / "model")]
    assert main([*needed, "--state-dir", str(tmp_path / "state"), *flags]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "model").exists() and not (tmp_path / "state").exists()


def test_a_newcomers_name_tells_nothing_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def noted(flags: dict[str, Any], name: str, folder: Path) -> NoReturn:
        names.append(check_name(name, "NAME"))
        raise ConfigError("enough")

    monkeypatch.setattr(shared, "enrolled", noted)
    needed = ["join", "--server", "127.0.0.1:1", "--token", "HB1.x", "--data", "digits", "--out", str(tmp_path / "m")]
    for more in ([], [], ["--client-id", "ward-7"]):
        assert main([*needed, *more]) == 2
    one, other, given = names
    assert len({one, other, socket.gethostname()}) == 3 and given == "ward-7"


def test_a_spent_budget_a_folder_in_use_and_a_damaged_ledger_are_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["join", "--server", "127.0.0.1:1", "--insecure", "--data", "digits", "--state-dir", str(tmp_path)]
    Ledger(tmp_path).spend(Guarantee(0.3, 0.01, 50, 0.1, 0.7), None, "box")
    privacy = ["--eps", "0.3", "--delta", "0.01", "--budget", "0.5"]
    assert main([*needed, "--out", str(tmp_path / "model"), *privacy]) == 3
    assert "epsilon 0.3 of 0.5 has been spent" in capsys.readouterr().err
    (tmp_path / "privacy.json").write_text("{")
    assert main([*needed, "--out", str(tmp_path / "model")]) == 1
    assert "is damaged" in capsys.readouterr().err
    assert main([*needed, "--out", str(tmp_path)]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert main([*needed, "--out", str(tmp_path / "privacy.json" / "model")]) == 2
    assert "--out: cannot write" in capsys.readouterr().err


def test_a_server_that_trains_is_told_apart(tmp_path: Path) -> None:
    one = newcomer(tmp_path)
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    message = Message(pack(Greeting("0")), 1, Greeting.message_type)
    answer = newcomer_app(one)(message, Context(0, 0, {}, RecordDict(), {}))
    assert unpack_answer(Notice, answer.content) == DECLINED  # who is there, it is not told
    assert "this server trains" in str(one.failure) and "`flower-server serve`" in str(one.failure)
