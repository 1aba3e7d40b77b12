"""The text of a token."""

from pathlib import Path

import pytest

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.secrecy.keys import server_of
from hyperbloom.common.secrecy.token import Token
from hyperbloom.server.access.certificates import init


def test_a_token_names_the_servers_ca_and_no_two_have_one_secret(tmp_path: Path) -> None:
    server = server_of(init(tmp_path, []).ca)
    one, other = Token.of(server), Token.of(server)
    assert Token.parse(f" {one}\n") == one and one.server == server
    assert one.secret != other.secret and len(str(one)) == 70


@pytest.mark.parametrize("text", ["", "HB1", "x", str(Token("SHA256:" + "A" * 43, "s" * 22))[:-1]])
def test_what_was_copied_in_part_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--token: expected what the server printed"):
        Token.parse(text)
