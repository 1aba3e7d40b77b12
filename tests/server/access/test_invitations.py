"""Invitations: who may use one, how often, and how long."""

import json
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.keys import make_key, public_pem
from hyperbloom.server.access.certificates import Certificates, init
from hyperbloom.server.access.invitations import Invitations
from hyperbloom.server.access.registry import ClientRegistry


@pytest.fixture
def files(tmp_path: Path) -> Certificates:
    return init(tmp_path / "certs", [])


def key() -> str:
    return public_pem(make_key())


def test_a_token_lets_as_many_in_as_it_says_and_its_secret_is_not_stored(files: Certificates) -> None:
    invitations = Invitations(files)
    token = invitations.invite(None, 2, 60)
    for name in "ab":
        invitations.redeem(token.secret, name, key())
    assert set(ClientRegistry(files.clients).keys().values()) == {"a", "b"}
    with pytest.raises(ConfigError, match="its token was used before"):
        invitations.redeem(token.secret, "c", key())
    assert token.secret not in invitations.path.read_text()
    assert invitations.path.stat().st_mode & 0o077 == 0


def test_a_token_for_a_name_is_for_no_other_and_ends_with_its_time(files: Certificates) -> None:
    invitations = Invitations(files)
    token, late = invitations.invite("ward-7", 1, 60), invitations.invite(None, 1, -1)
    with pytest.raises(ConfigError, match="for a client of another name"):
        invitations.redeem(token.secret, "ward-8", key())
    with pytest.raises(ConfigError, match="its token has expired at 20"):
        invitations.redeem(late.secret, "ward-7", key())
    with pytest.raises(ConfigError, match="its token is unknown"):
        invitations.redeem("A" * 22, "ward-7", key())
    invitations.redeem(token.secret, "ward-7", key())


def test_a_token_is_not_spent_on_a_name_that_is_taken(files: Certificates) -> None:
    invitations, registry = Invitations(files), ClientRegistry(files.clients)
    registry.add("ward-7", mine := key())
    token = invitations.invite(None, 1, 60)
    with pytest.raises(ConfigError, match="ward-7 has a key already"):
        invitations.redeem(token.secret, "ward-7", key())
    assert registry.clients()["ward-7"].public_key == mine
    invitations.redeem(token.secret, "ward-8", key())


def test_a_token_that_two_show_at_once_lets_one_in(files: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    invitations, real, others, told = Invitations(files), ClientRegistry.add, list[threading.Thread](), list[str]()
    token = invitations.invite(None, 1, 60)

    def second() -> None:
        try:
            invitations.redeem(token.secret, "late", key())
        except ConfigError as error:
            told.append(str(error))

    def add(registry: ClientRegistry, name: str, public: str) -> None:
        if not others:
            others.append(threading.Thread(target=second))
            others[0].start()
            others[0].join(0.2)  # it waits for the first
        real(registry, name, public)

    monkeypatch.setattr(ClientRegistry, "add", add)
    invitations.redeem(token.secret, "early", key())
    others[0].join(30)
    assert set(ClientRegistry(files.clients).clients()) == {"early"} and told == ["its token was used before"]


def test_nobody_is_invited_under_no_name_or_to_a_server_without_a_ca(files: Certificates) -> None:
    invitations = Invitations(files)
    with pytest.raises(ConfigError, match="NAME: expected 1 to 64 letters"):
        invitations.invite("../ward-7", 1, 60)
    files.ca.unlink()
    with pytest.raises(ConfigError, match=r"ca\.pem: expected one certificate, the CA's"):
        invitations.invite("ward-7", 1, 60)
    assert not invitations.path.exists()


def test_an_invitation_is_taken_back_and_old_ones_are_forgotten(files: Certificates) -> None:
    invitations = Invitations(files)
    token, open_, other = (invitations.invite(name, 1, 60) for name in ("ward-7", None, "ward-8"))
    assert invitations.cancel("ward-7") and not invitations.cancel("ward-7")
    for lost in (token, open_):  # whoever is revoked may know the one for any name
        with pytest.raises(ConfigError, match="its token is unknown"):
            invitations.redeem(lost.secret, "ward-7", key())
    invitations.redeem(other.secret, "ward-8", key())
    invitations.invite(None, 1, -2 * 86400)
    assert [each.name for each in invitations.all()] == ["ward-8"]


@pytest.mark.parametrize("form", ["{}\n", " {}", "x", "secp256k1"])
def test_a_member_cannot_damage_the_registry_by_its_key(files: Certificates, form: str) -> None:
    invitations, registry = Invitations(files), ClientRegistry(files.clients)
    odd = public_pem(ec.generate_private_key(ec.SECP256K1())) if form == "secp256k1" else form.format(key())
    token = invitations.invite(None, 1, 60)
    with pytest.raises(ConfigError, match="its key: expected"):
        invitations.redeem(token.secret, "mallory", odd)
    assert registry.clients() == {}
    invitations.redeem(token.secret, "honest", key())


def test_a_damaged_file_is_named(files: Certificates) -> None:
    invitations = Invitations(files)
    invitations.path.write_text(json.dumps({"invitations": [{}]}))
    with pytest.raises(ConfigError, match=r"invitations\.json: expected invitations, found it damaged"):
        invitations.invite(None, 1, 60)
