"""The codecs: what they keep is what their names say, their length is known, and no bytes can do harm."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hyperbloom.common.compression import Codec
from hyperbloom.common.errors import ConfigError, WireError
from hyperbloom.common.layout import Layout

LAYOUT = Layout((("fc.weight", (30, 7)), ("fc.bias", (30,)), ("none", (0, 3)), ("head", (60,))))
NAMES = ("int8", "top-k:0.1", "top-k:0.1+int8", "top-k:0.7", "top-k:0.7+int8")


def codec(name: str) -> Codec:
    """Return a codec that is one."""
    found = Codec.parse(name)
    assert found is not None
    return found


def change(layout: Layout = LAYOUT, seed: int = 0) -> Tensor:
    """Return values such as training changes weights by: no two alike, most of them small."""
    return 0.01 * torch.randn(layout.numel, generator=torch.Generator().manual_seed(seed)) ** 3


def there_and_back(name: str, flat: Tensor, layout: Layout = LAYOUT) -> Tensor:
    """Encode and decode."""
    encoded = codec(name).encode(flat, layout)
    assert len(encoded) == codec(name).size(layout)
    return codec(name).decode(encoded, layout)


# ---------------------------------------------------------------------- names


def test_names_say_what_is_kept_and_how() -> None:
    assert Codec.parse("none") is None
    assert Codec.parse("int8") == Codec("int8", True, None)
    assert Codec.parse("top-k:0.05") == Codec("top-k:0.05", False, 0.05)
    assert Codec.parse("top-k:1e-2+int8") == Codec("top-k:1e-2+int8", True, 0.01)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "zip",
            "None",
            "fp16",
            "int8 ",
            "int8\n",
            "int8+int8",
            "int8+top-k:0.1",
            "top-k",
            "top-k:",
            "top-k:0",
            "top-k:1",
        ),
        *("top-k:\u0660.\u0661", "top-k:-0.1", "top-k:nan", "top-k:1.5", "top-k:.", "top-k:0.1+", "top-k:0.1+zip"),
        *("top-k:0.1+int8+int8", "top-k:1e-999", "x" * 1000),
    ],
)
def test_other_names_are_refused_with_the_ones_there_are(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Codec.parse(name)
    assert str(caught.value) == (
        "compression: expected none, int8, top-k:SHARE with a share between 0 and 1, or top-k:SHARE+int8, "
        f"found {name[:60]!r}"
    )


# ---------------------------------------------------------------------- values


def test_int8_is_off_by_half_a_step_of_its_own_tensor_at_most() -> None:
    flat = change()
    views = LAYOUT.views(flat)
    views["fc.bias"].mul_(1e-6)  # would vanish beside the others if they shared a scale
    views["head"].mul_(1e4)
    decoded = LAYOUT.views(there_and_back("int8", flat))
    for name, tensor in views.items():
        if tensor.numel():
            step = float(tensor.abs().max()) / 127
            error = (decoded[name] - tensor).abs().max()
            assert 0.3 * step < error <= 0.5 * step * (1 + 1e-5), name
    assert codec("int8").size(LAYOUT) == LAYOUT.numel + 4 * 4


def test_int8_keeps_whole_steps_exactly() -> None:
    flat = torch.randint(-127, 128, (LAYOUT.numel,), generator=torch.Generator().manual_seed(1)).float()
    for (_, place, _), step in zip(LAYOUT.slices(), (0.5, 2.0**-20, 1.0, 0.0), strict=True):
        flat[place] *= step
        if step and place.start < place.stop:
            flat[place.start] = 127 * step
    assert torch.equal(there_and_back("int8", flat), flat)


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_and_the_largest_values_stay_finite(name: str) -> None:
    for scale in (0.0, 1e-45, 1e-38, 1e36):
        flat = scale * torch.arange(-165.0, 135.0)
        decoded = there_and_back(name, flat)
        assert bool(decoded.isfinite().all()), scale
        assert bool(((decoded - flat).abs() <= flat.abs().max()).all()), scale


# ---------------------------------------------------------------------- the largest


@pytest.mark.parametrize(("share", "kept"), [(0.001, 1), (0.01, 3), (0.1, 30), (0.5, 150), (0.999, 300)])
def test_top_k_keeps_the_largest_of_the_whole_vector(share: float, kept: int) -> None:
    flat = change()
    expected = torch.zeros_like(flat)
    expected[flat.abs().topk(kept).indices] = flat[flat.abs().topk(kept).indices]
    decoded = there_and_back(f"top-k:{share}", flat)
    assert int((decoded != 0).sum()) == kept
    assert torch.equal(decoded, expected)


def test_what_top_k_keeps_is_stored_as_the_second_name_says() -> None:
    flat = change()
    kept = there_and_back("top-k:0.2", flat)
    decoded = there_and_back("top-k:0.2+int8", flat)
    # A vector of zeros and the kept values has the scales that the kept values have.
    assert torch.equal(decoded, there_and_back("int8", kept))
    assert int((decoded != 0).sum()) > 40


def test_a_tensor_of_which_nothing_is_kept_has_no_say() -> None:
    flat = change()
    LAYOUT.views(flat)["fc.weight"].zero_()
    LAYOUT.views(flat)["head"].mul_(100)
    decoded = LAYOUT.views(there_and_back("top-k:0.05+int8", flat))
    assert not decoded["fc.weight"].any() and not decoded["fc.bias"].any()
    assert int((decoded["head"] != 0).sum()) == 15


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), max_size=4),
    name=st.sampled_from(NAMES),
    share=st.floats(0.001, 0.999),
    seed=st.integers(0, 99),
)
def test_every_length_is_what_the_layout_says_and_twice_is_as_good_as_once(
    sizes: list[int], name: str, share: float, seed: int
) -> None:
    layout = Layout(tuple((str(number), (size,)) for number, size in enumerate(sizes)))
    name = name.replace("0.1", repr(share))
    once = there_and_back(name, change(layout, seed), layout)
    torch.testing.assert_close(there_and_back(name, once, layout), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("numel", "share", "kind"),
    [(37, 0.05, "H"), (2**16, 0.06, "H"), (2**16 + 1, 0.03, "I"), (1, 0.5, ""), (37, 0.1, ""), (2**16 + 1, 0.04, "")],
)
def test_places_are_bits_or_indices_whichever_is_shorter(numel: int, share: float, kind: str) -> None:
    layout, name = Layout((("a", (numel,)),)), f"top-k:{share}"
    flat = change(layout)
    chosen = there_and_back(name, flat, layout) != 0
    indices = [index for index, one in enumerate(chosen.tolist()) if one]
    bits = "".join(str(int(one)) for one in chosen.tolist()) + "0" * (-numel % 8)
    as_bits = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
    as_indices = struct.pack(f"<{len(indices)}{kind}", *indices) if kind else b""
    assert bool(kind) == (len(indices) * (2 if numel <= 2**16 else 4) <= len(as_bits))
    values = struct.pack(f"<{len(indices)}f", *flat[indices])
    assert codec(name).encode(flat, layout) == (as_indices or as_bits) + values


# ---------------------------------------------------------------------- what others send


@pytest.mark.parametrize("name", NAMES)
def test_another_length_is_refused(name: str) -> None:
    size = codec(name).size(LAYOUT)
    for length in (0, size - 1, size + 1, size + 10**6):
        with pytest.raises(WireError) as caught:
            codec(name).decode(bytes(length), LAYOUT)
        assert str(caught.value) == f"{name}: expected {size} bytes for 300 values in 4 tensors, found {length}"


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0])
def test_a_scale_that_is_none_is_refused_with_its_tensor(scale: float) -> None:
    encoded = bytearray(codec("int8").encode(change(), LAYOUT))
    encoded[4:8] = struct.pack("<f", scale)
    with pytest.raises(WireError) as caught:
        codec("int8").decode(bytes(encoded), LAYOUT)
    assert str(caught.value) == f"tensor fc.bias: expected a finite scale from 0, found {scale}"


@pytest.mark.parametrize("indices", [(0, 0, 0), (2, 1, 3), (0, 8, 60)])
def test_indices_that_are_repeated_out_of_order_or_outside_are_refused(indices: tuple[int, ...]) -> None:
    layout, name = Layout((("a", (60,)),)), "top-k:0.05"
    assert codec(name).encode(torch.arange(60.0), layout)[:6] == struct.pack("<3H", 57, 58, 59)
    with pytest.raises(WireError) as caught:
        codec(name).decode(struct.pack("<3H", *indices) + bytes(12), layout)
    assert str(caught.value) == f"{name}: expected indices in ascending order below 60, found others"


@pytest.mark.parametrize(("bits", "found"), [(b"\0\0\0\0\7", 0), (b"\x80\0\0\0\x80", 2), (b"\xff\0\0\0\0", 8)])
def test_bits_that_are_too_few_or_too_many_are_refused(bits: bytes, found: int) -> None:
    layout, name = Layout((("a", (37,)),)), "top-k:0.1"
    with pytest.raises(WireError) as caught:
        codec(name).decode(bits + bytes(16), layout)
    assert str(caught.value) == f"{name}: expected 4 indices, found {found}"


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_any_bytes_are_refused_or_a_vector_of_the_right_size(name: str, data: st.DataObject) -> None:
    encoded = bytearray(codec(name).encode(change(), LAYOUT))
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(encoded) - 1), st.integers(0, 255)))):
        encoded[place] = byte
    tail = data.draw(st.binary(max_size=2))
    try:
        decoded = codec(name).decode(bytes(encoded) + tail, LAYOUT)
    except WireError as error:
        assert "\n" not in str(error) and len(str(error)) < 120
    else:
        assert not tail
        assert (decoded.shape, decoded.dtype) == ((300,), torch.float32)
        assert int((decoded != 0).sum()) <= codec(name).kept(300)
