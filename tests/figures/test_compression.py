"""Bytes and accuracy of the codecs are those of real runs."""

import pytest

from figures import compression

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.mark.slow
def test_compression_weighs_replies_and_scores_runs() -> None:
    brief = {"rounds": 2, "eval_every": 1, "local.steps": 2, "data.max_train": 20}
    plain, small = (compression.play({"compression": name, **brief}) for name in ("none", "top-k:0.01+int8"))
    forgetful = compression.play({"compression": "top-k:0.01+int8", **brief}, forgetful=True)
    assert 4 * 7510 < plain.reply < 1.04 * 4 * 7510
    assert small.reply == forgetful.reply < plain.reply - 29_000
    assert 0 < plain.last < 100 and 0 < plain.selected < 100
    line = compression.row("int8", [compression.Outcome(50, 1.0, 2.0), compression.Outcome(50, 3.0, 4.0)], 200)
    assert line == "| int8 | 50 | 4.0 | 2.0 (1.0 to 3.0) | 3.0 (2.0 to 4.0) |"
