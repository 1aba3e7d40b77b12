"""Lines that grow while they are read."""

import json
from pathlib import Path

from hyperbloom.server.run_lines import Tail, read_lines


def test_only_what_is_new_and_whole_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"round": 1}\n{"rou')
    assert tail.read() == [{"round": 1}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write('nd": 2}\n{"round": 3}\n')
    assert tail.read() == [{"round": 2}, {"round": 3}]
    assert not tail.cut


def test_a_file_that_was_cut_back_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n')
    tail = Tail(path)
    tail.read()
    path.write_text('{"round": 1}\n')
    assert tail.read() == [{"round": 1}]
    assert tail.cut
    path.unlink()
    assert (tail.read(), tail.cut) == ([], True)
    assert (tail.read(), tail.cut) == ([], False)


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "clients.jsonl"
    path.write_bytes(b'{"a": 1}\n\xff\xfe\n[1]\n' + json.dumps({"b": "\ud800\n"}).encode() + b"\n")
    assert list(read_lines(path)) == [{"a": 1}, {"b": "\ud800\n"}]
