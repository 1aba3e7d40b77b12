"""What is read from elsewhere and is not sound raises what its reader says, and nothing else (siege/fuzz.py)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperbloom.common.errors import HyperbloomError
from siege.fuzz import TARGETS, attempt, mutate, sound

ABOUT = (
    b'{"version": "1", "size": "M", "input_shape": [8], "num_classes": 2, "train_examples": 1, "val_examples": 1, '
    b'"test_examples": 1, "class_shares": []}'
)
FOUND = [
    ("roster", b"[" * 3000),
    ("roster", b'{"clients": [{"client_id": "a", "row": 1e999, "about": ' + ABOUT + b"}]}"),
    ("registry", b"[" * 3000),
    ("schema", b'{"label": ["\\ud800"], "columns": [{"name": "a", "kind": "number"}]}'),
    ("schema", b'{"label": ["a"], "columns": [{"name": "a", "kind": "number", "x": 1}]}'),
    ("checkpoint", b"[" * 3000),
]
"""Inputs that broke a target once."""


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_sound_bytes_are_taken(target: str) -> None:
    for content in sound(target):
        TARGETS[target](content)


@pytest.mark.parametrize("target", sorted(TARGETS))
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_other_bytes_are_taken_or_refused(target: str, seed: int) -> None:
    rng = random.Random(seed)
    error = attempt(target, mutate(rng.choice(sound(target)), rng))
    if error is not None:
        raise error


@pytest.mark.parametrize(("target", "content"), FOUND)
def test_what_was_found_is_refused_in_one_line(target: str, content: bytes) -> None:
    with pytest.raises(HyperbloomError) as caught:
        TARGETS[target](content)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("place", "value"), [(4, 13), (8, 99)])
def test_a_zip_of_another_world_is_no_data(place: int, value: int) -> None:
    """The version that it takes to unpack an entry, and the method: in its header and in the directory."""
    content = sound("npz")[0]
    for mark, offset in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        at = content.index(mark) + place + offset
        content = content[:at] + bytes([value * 10 if place == 4 else value]) + content[at + 1 :]
    with pytest.raises(HyperbloomError, match=r"data\.npz"):
        TARGETS["npz"](content)


def test_mutations_reach_values_and_structure() -> None:
    rng, content = random.Random(0), sound("method")[0]
    made = {mutate(content, rng) for _ in range(200)}
    assert len(made) > 150
    assert any(b"null" in each for each in made) and any(len(each) > 2000 for each in made)
