"""What masks cost is measured on rounds that are played."""

import pytest

from figures import secure_aggregation

pytestmark = pytest.mark.usefixtures("clean_process")


def test_secure_aggregation_plays_all_three_ways() -> None:
    line = {"cohort": 4, **secure_aggregation.measure(4, 1, model="mlp")}
    rows = [row.strip("| ").split(" | ") for row in secure_aggregation.table([line]).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["4", "plain"], ["4", "secure"], ["4", "vanish"]]
    (plain_down, plain_up), (down, up), _ = ([int(number.replace(",", "")) for number in row[4:]] for row in rows)
    assert plain_down < down < plain_down + 4000 and plain_up < up < plain_up + 2000, "masks cost no bytes, shares do"
