"""The probes of the page: advice on three federations."""

import pytest

from figures import probes


def test_a_probe_is_the_commands_advice_and_the_table_has_its_differences() -> None:
    short = "--split iid --clients 2 --cohort 2 --max-train 30 --rounds 1 --set local.steps=1"
    line = {"probe": short, **probes.measure(short)}
    assert line["strategy"] in ("local", "fedavg", "pfedhn")
    assert line["says"][0].startswith("2 clients have 30 to 30 training examples, the median is 30: few")
    (row,) = probes.table([line]).splitlines()[2:]
    assert row.startswith(f"| `{short}` | `{line['strategy']}` | ") and "accuracy on" not in row


def test_a_probe_that_fails_has_no_line() -> None:
    with pytest.raises(RuntimeError, match="ended with code 2"):
        probes.measure("--split nonsense")
