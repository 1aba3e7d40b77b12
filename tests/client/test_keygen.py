"""`flower-client keygen`: a pair of which the private half stays."""

import stat
from pathlib import Path

import pytest

from hyperbloom.client.cli import main
from hyperbloom.common.keys import fingerprint, public_pem, read_private_key, read_public_key


def test_the_pair_belongs_together_and_the_public_half_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ward-7.pem"
    assert main(["keygen", "--out", str(path)]) == 0
    public = public_pem(read_private_key(path, "--key"))
    assert read_public_key(tmp_path / "ward-7.pub", "--public-key") == public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert capsys.readouterr().out == (
        f"{public}fingerprint {fingerprint(public)}\nthe private key is {path}, the public key {tmp_path}/ward-7.pub\n"
    )


@pytest.mark.parametrize("there", ["ward-7.pem", "ward-7.pub"])
def test_keys_are_never_overwritten(tmp_path: Path, there: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / there).write_text("precious")
    assert main(["keygen", "--out", str(tmp_path / "ward-7.pem")]) == 2
    assert capsys.readouterr().err == (
        f"flower-client keygen: --out: {tmp_path / there} is there already; keys are never overwritten\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_private_key_cannot_be_its_own_public_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", "--out", str(tmp_path / "ward-7.pub")]) == 2
    assert "expected another suffix than .pub, which the public key gets" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
