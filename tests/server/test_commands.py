"""`flower-server certs` and `clients`: what they make, print and refuse."""

import datetime as dt
import json
import re
from pathlib import Path

import pytest

from hyperbloom.common.secrecy.keys import fingerprint, make_key, public_pem, write_private_key
from hyperbloom.common.secrecy.token import Token
from hyperbloom.server.access.certificates import Certificates
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry
from hyperbloom.server.cli import main
from hyperbloom.server.grids.fleet import Machines


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERBLOOM_CERTS", raising=False)
    return tmp_path


def public_file(path: Path) -> str:
    """Write a new public key to a file and return it."""
    pem = public_pem(make_key())
    path.write_text(pem)
    return pem


def test_certificates_are_made_shown_and_renewed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "init", "--host", "gpu-box", "--host", "10.0.0.5", "--days", "9"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "next: flower-server clients invite NAME, whose line is all that a client needs"
    assert "gpu-box" in said[1] and "10.0.0.5" in said[1]
    assert main(["certs", "show"]) == 0
    assert capsys.readouterr().out.splitlines() == said[:-1]
    before = (home / "certs/server.pem").read_bytes()
    assert main(["certs", "renew", "--host", "10.0.0.6"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (shown[0], shown[2]) == (said[0], said[2])
    assert "gpu-box" in shown[1] and "10.0.0.6" in shown[1]
    assert shown[-1] == "the server shows it from its next start on; clients need nothing new"
    assert (home / "certs/server.pem").read_bytes() != before


def test_the_folder_can_be_another_one(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["certs", "init", "--dir", "there"]) == 0
    monkeypatch.setenv("HYPERBLOOM_CERTS", str(home / "elsewhere"))
    assert main(["certs", "init"]) == 0
    public_file(home / "a.pub")
    assert main(["clients", "add", "a", "--public-key", "a.pub"]) == 0
    assert main(["clients", "add", "a", "--public-key", "a.pub", "--certs", "there"]) == 0
    files = ["ca.key", "ca.pem", "clients.json", "clients.lock", "server.key", "server.pem"]
    for folder in ("there", "elsewhere"):
        assert sorted(path.name for path in (home / folder).iterdir()) == files


@pytest.mark.parametrize("group", ["certs", "clients", "app"])
def test_a_group_without_a_command_shows_its_help_as_it_is(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([group]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"Usage: flower-server {group} ") and "\nCommands:\n" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "certs init --days 0",
            "certs init: Invalid value for '--days': 0 is not in the range 1<=x<=36500; see flower-server certs init",
        ),
        ("certs init --host a:1", "certs init: --host: expected a name or an IP address, found 'a:1'"),
        ("certs show", "certs show: ca.pem: expected a file, found none at certs/ca.pem"),
        (
            "certs renew",
            "certs renew: certs: expected ca.pem and ca.key; put them back from where they are kept, or make a ",
        ),
        ("report . --out .", "report: Invalid value for '--out': File '.' is a directory"),
        ("clients add a --public-key x", "clients add: --public-key: expected a file, found none at x"),
        (
            "clients invite a --expires 0m",
            "clients invite: --expires: expected minutes, hours or days, such as 30m, 2h or 7d; found '0m'",
        ),
        ("clients invite a --uses 2", "clients invite: --uses: expected without NAME; a name is one client's"),
        ("clients invite a", "clients invite: certs/ca.pem: expected one certificate, the CA's"),
        ("clients revoke a", "clients revoke: a: expected one of no clients in certs/clients.json"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"flower-server {message}")
    assert said.count("\n") == 1


def test_clients_are_added_listed_and_revoked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = [public_file(home / f"{name}.pub") for name in "ab"]
    for name, key in zip("ab", keys, strict=True):
        assert main(["clients", "add", name, "--public-key", f"{name}.pub"]) == 0
        assert capsys.readouterr().out == f"{name} may join with key {fingerprint(key)}\n"
    assert main(["clients", "revoke", "a"]) == 0
    assert capsys.readouterr().out == "a may not join any more; its key is retired for good\n"
    assert main(["clients", "list"]) == 0
    clients = json.loads((home / "certs/clients.json").read_text())["clients"]
    assert capsys.readouterr().out.splitlines() == [
        f"a  {fingerprint(keys[0])}  revoked {clients['a']['revoked']}",
        f"b  {fingerprint(keys[1])}  added {clients['b']['added']}",
    ]


def test_the_printed_line_has_a_token_of_the_name_and_the_time(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "init", "--host", "gpu-box"]) == 0
    invitations, begun = Invitations(Certificates()), dt.datetime.now(dt.UTC).replace(microsecond=0)
    capsys.readouterr()
    for words, name, uses, minutes in (
        ("ward-7 --expires 30m", "ward-7", 1, 30),
        ("--uses 12 --expires 2h --port 9", "NAME", 12, 120),
        ("ward-8 --expires 7d", "ward-8", 1, 7 * 24 * 60),
    ):
        assert main(["clients", "invite", *words.split()]) == 0
        line = capsys.readouterr().out
        port = 9 if "--port" in words else 9092
        assert re.fullmatch(
            rf"flower-client --server gpu-box:{port} --token HB1\.\S+ --client-id {name} --data WHAT\n", line
        )
        made = invitations.all()[-1]
        assert (made.name or "NAME", made.uses) == (name, uses)
        asked = dt.datetime.fromisoformat(made.until) - dt.timedelta(minutes=minutes)
        assert begun <= asked <= dt.datetime.now(dt.UTC)
    secret = Token.parse(line.split()[4]).secret
    invitations.redeem(secret, "ward-8", public_pem(make_key()))
    invitations.invite("late", 1, -60)
    assert main(["clients", "list"]) == 0
    until = [each.until for each in invitations.all()]
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"ward-7  invited until {until[0]}, uses left: 1",
        f"any name  invited until {until[1]}, uses left: 12",
    ]
    assert main(["clients", "invite", "ward-8"]) == 2
    assert "ward-8 has a key already: a token is of no use to it" in capsys.readouterr().err
    assert main(["clients", "invite", "ward-9", "--port", "0"]) == 2, "no client can dial port 0"
    assert main(["clients", "revoke", "wrad-7"]) == 2
    assert [each.until for each in invitations.all()] == until, "a name that nobody has takes nothing back"
    capsys.readouterr()
    assert main(["clients", "revoke", "ward-7"]) == 0, "it was invited, and has not come"
    said = capsys.readouterr().out
    assert "invitations for any name are taken back, too, with 12 uses left" in said and "retired" not in said
    assert main(["clients", "revoke", "ward-8"]) == 0, "it has come, and has a key"
    assert ClientRegistry(home / "certs/clients.json").keys() == {}
    assert [each.name for each in invitations.all()] == ["late"]


def test_a_list_of_clients_alone_does_not_keep_the_first_start_from_making_certificates(home: Path) -> None:
    assert main(["clients", "revoke", "ward-7"]) == 2
    public_file(home / "a.pub")
    assert main(["clients", "add", "a", "--public-key", "a.pub"]) == 0
    assert Machines().make_certificates() and (home / "certs/server.pem").exists()
    assert not Machines().make_certificates()


def test_a_name_becomes_a_file_and_so_is_checked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public_file(home / "a.pub")
    assert main(["clients", "add", "../a", "--public-key", "a.pub"]) == 2
    assert "clients add: NAME: expected 1 to 64 letters" in capsys.readouterr().err


def test_a_key_is_replaced_when_said_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    public_file(home / "old.pub")
    new = public_file(home / "new.pub")
    assert main(["clients", "add", "a", "--public-key", "old.pub"]) == 0
    assert main(["clients", "add", "a", "--public-key", "new.pub"]) == 2
    assert main(["clients", "add", "a", "--public-key", "new.pub", "--replace"]) == 0
    assert ClientRegistry(home / "certs/clients.json").keys() == {new: "a"}


def test_a_private_key_is_not_taken_for_a_public_one(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_private_key(home / "a.pem", make_key())
    assert main(["clients", "add", "a", "--public-key", "a.pem"]) == 2
    assert "it should never leave its client" in capsys.readouterr().err
    assert not (home / "certs").exists()
