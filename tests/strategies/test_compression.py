"""Runs with compressed replies: the server learns what the codec keeps, and refuses what does not fit."""

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.layout import Layout
from hyperbloom.common.messages import TrainOrder, TrainResult, Weights
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.roster import Roster
from tests.strategies.conftest import (
    Inline,
    assert_same,
    digits_config,
    digits_federation,
    introduction,
    scripted_grid,
)

CODEC = "top-k:0.1+int8"
OPTIONS: dict[str, dict[str, Any]] = {"pfedhn": {"hidden_dim": 16}, "pfedhn-pc": {"hidden_dim": 16}, "fedavg": {}}
Answer = Callable[[str, TrainOrder], TrainResult]


def codec(name: str = CODEC) -> Codec:
    found = Codec.parse(name)
    assert found is not None
    return found


def delta_of(name: str, layout: Layout) -> torch.Tensor:
    return 0.1 * torch.randn(layout.numel, generator=torch.Generator().manual_seed(ord(name)))


def encoded(name: str, order: TrainOrder) -> TrainResult:
    """Answer as a client does that was told to compress."""
    assert order.weights is not None and order.compression == CODEC
    layout = order.weights.layout
    return TrainResult(1.0, 0.0, None, codec().encode(delta_of(name, layout), layout))


def plain(name: str, order: TrainOrder) -> TrainResult:
    """Answer in the clear with what the server is to make of the compressed answer."""
    assert order.weights is not None and order.compression is None
    layout = order.weights.layout
    kept = codec().decode(codec().encode(delta_of(name, layout), layout), layout)
    values = order.weights.values + kept if order.reply == "weights" else kept
    return TrainResult(1.0, 0.0, Weights(layout, values))


def play_round(strategy: str, answer: Answer, compression: str) -> Inline:
    """Return a federation of scripted clients after a round."""
    config = digits_config(strategy=strategy, cohort=3, compression=compression, options=OPTIONS[strategy])
    federation = Inline(config, scripted_grid([introduction(name) for name in "abc"], answer)).join()
    orders = federation.strategy.configure_train(1, None, None, federation.grid)
    federation.strategy.aggregate_train(1, list(federation.federation.exchange([orders], 10.0)))
    return federation


@pytest.mark.parametrize("strategy", OPTIONS)
def test_the_server_learns_exactly_what_the_codec_keeps(strategy: str) -> None:
    compressed = play_round(strategy, encoded, CODEC)
    assert compressed.strategy.round.refused == {}
    assert_same(compressed.state(), play_round(strategy, plain, "none").state())


@pytest.mark.parametrize("strategy", OPTIONS)
def test_real_clients_send_the_codecs_bytes_and_their_server_learns(strategy: str, tmp_path: Path) -> None:
    config = digits_config(strategy=strategy, cohort=2, options=OPTIONS[strategy])
    runs = {}
    for name in ("none", "fp16", CODEC):
        federation = digits_federation(config.model_copy(update={"compression": name}), tmp_path / name)
        history, _ = federation.run()
        assert all(outcome.refused == {} and len(outcome.results) == 2 for outcome in history.rounds)
        results = [fields for fields in federation.grid.fields("train") if "loss" in fields]
        (layout,) = federation.strategy.layouts.values()
        if name == "none":
            assert all("encoded" not in fields and len(fields["values"]) == 4 * layout.numel for fields in results)
            assert not any("compression" in fields for fields in federation.grid.fields("train"))
        else:
            assert {len(fields["encoded"]) for fields in results} == {codec(name).size(layout)}
            assert not any("values" in fields for fields in results)
        runs[name] = torch.cat([tensor.flatten() for tensor in federation.state().values()])
        assert len(list(tmp_path.glob(f"{name}/*/residual.safetensors"))) == (0 if name == "none" else 3)
    off = {name: float((values - runs["none"]).norm() / runs["none"].norm()) for name, values in runs.items()}
    assert 0 < off["fp16"] < 1e-3 < off[CODEC] < 0.5


def test_where_nothing_is_sent_there_is_nothing_to_compress(tmp_path: Path) -> None:
    federation = digits_federation(digits_config(strategy="local", options={}, compression=CODEC), tmp_path)
    history, _ = federation.run()
    assert all(outcome.refused == {} for outcome in history.rounds)
    assert not any({"encoded", "values"} & set(fields) for fields in federation.grid.fields("train"))


def test_a_name_that_is_none_is_told_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"^compression: expected none, fp16, bf16, int8, top-k:SHARE .*found 'gzip'$"
    ):
        make_strategy(digits_config(compression="gzip"), "run", Roster(0))


# ---------------------------------------------------------------------- replies that do not fit


def with_float(at: int, value: float) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + struct.pack("<f", value) + raw[at + 4 :]


# 403 values of size S in four tensors: 40 indices of 3 low bits and 40 + 50 high ones, four scales, 40 values
SPOILED: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "absent": (lambda raw: None, f"expected a change encoded as {CODEC}, found none"),
    "short": (lambda raw: raw[:-1], f"{CODEC}: expected 83 bytes for 403 values in 4 tensors, found 82"),
    "bomb": (lambda raw: raw * 1000, f"{CODEC}: expected 83 bytes for 403 values in 4 tensors, found 83000"),
    "indices": (lambda raw: bytes(27) + raw[27:], f"{CODEC}: expected 40 indices, found 0"),
    "scale": (with_float(27, math.nan), "tensor fc1.weight: expected a finite scale from 0, found nan"),
    "overflow": (with_float(27, 3e38), "values are not finite"),
    "huge": (with_float(27, 1e6), "expected a norm of at most 1e+06"),
}


@pytest.mark.parametrize("strategy", ["pfedhn", "fedavg"])
@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_reply_is_refused_in_one_line_and_the_others_still_count(case: str, strategy: str) -> None:
    spoil, text = SPOILED[case]

    def answer(name: str, order: TrainOrder) -> TrainResult:
        good = encoded(name, order)
        assert good.encoded is not None
        return replace(good, encoded=spoil(good.encoded)) if name == "b" else good

    def silent(name: str, order: TrainOrder) -> TrainResult:
        if name == "b":
            raise RuntimeError("no")
        return encoded(name, order)

    federation = play_round(strategy, answer, CODEC)
    refused = federation.strategy.round.refused
    assert list(refused) == ["b"] and text in refused["b"] and "\n" not in refused["b"]
    assert_same(federation.state(), play_round(strategy, silent, CODEC).state())


def test_weights_in_the_clear_are_no_answer_to_an_order_to_compress_nor_the_other_way() -> None:
    def clear(name: str, order: TrainOrder) -> TrainResult:
        return plain(name, replace(order, compression=None))

    def unasked(name: str, order: TrainOrder) -> TrainResult:
        return encoded(name, replace(order, compression=CODEC))

    refused = play_round("pfedhn", clear, CODEC).strategy.round.refused
    assert set(refused.values()) == {f"expected a change encoded as {CODEC}, found none"}
    refused = play_round("pfedhn", unasked, "none").strategy.round.refused
    assert set(refused.values()) == {"expected weights in the reply, found none"}
