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


def test_a_row_has_times_less_than_without_compression_and_means_over_seeds() -> None:
    def line(codec: str, reply: int, last: float) -> dict[str, object]:
        return {"strategy": "pfedhn", "codec": codec, "reply": reply, "last": last, "selected": last + 1}

    lines = [line("none", 200, 5.0), line("int8", 50, 1.0), line("int8", 50, 3.0)]
    assert compression.table(lines, "pfedhn").splitlines()[2:] == [
        "| none | 200 | 1.0 | 5.0 (5.0 to 5.0) | 6.0 (6.0 to 6.0) |",
        "| int8 | 50 | 4.0 | 2.0 (1.0 to 3.0) | 3.0 (2.0 to 4.0) |",
    ]
