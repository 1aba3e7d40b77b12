"""Masks cancel to the bit, shares open for as many as they should, and fixed-point sums keep to their bound."""

import math
import random
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from hyperbloom.common.errors import WireError
from hyperbloom.common.secrecy import masks as sa
from hyperbloom.common.secrecy.masks import Agreement, Scale

PRIVATE = [X25519PrivateKey.from_private_bytes(bytes([index + 1]) * 32) for index in range(6)]
PUBLIC = [sa.public_key(private) for private in PRIVATE]


def agreement(**changes: Any) -> Agreement:
    values: dict[str, Any] = {
        "run_id": "run",
        "round": 1,
        "threshold": 3,
        "scale": Scale(3, 8.0, 100),
        "cipher_keys": tuple(PUBLIC[:3]),
        "mask_keys": tuple(PUBLIC[3:]),
        "identities": (b"a", b"b", b"c"),
    }
    return Agreement(**(values | changes))


# ---------------------------------------------------------------------- shares


def test_the_field_is_of_prime_order() -> None:
    """Miller and Rabin's test with forty bases, written out."""
    prime = sa._PRIME
    odd, twos = prime - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 42):
        powers = [pow(base, odd << k, prime) for k in range(twos)]
        assert powers[0] == 1 or prime - 1 in powers, base


def test_as_many_shares_as_the_threshold_open_a_secret_whichever_they_are() -> None:
    secret = bytes(range(32))
    shares = sa.split(secret, 3, 5)
    assert {len(share) for share in shares} == {sa.SHARE_BYTES} and len(set(shares)) == 5
    for count in (3, 4, 5):
        for places in combinations(range(5), count):
            assert sa.combine({place: shares[place] for place in places}) == secret
    for places in combinations(range(5), 2):
        assert sa.combine({place: shares[place] for place in places}) != secret


def test_fewer_shares_fit_every_secret_alike() -> None:
    """For any other secret there is a polynomial through the same two points: what the third share would then be."""
    shares = sa.split(b"\x01" * 32, 3, 3)
    p = sa._PRIME
    y1, y2 = (int.from_bytes(share, "big") for share in shares[:2])
    for other in (b"\x00" * 32, b"\xff" * 32, b"another secret, of 32 bytes, too"):
        s = int.from_bytes(other, "big")
        third = (s - 3 * y1 + 3 * y2) % p  # third differences of a parabola vanish
        assert sa.combine({0: shares[0], 1: shares[1], 2: third.to_bytes(33, "big")}) == other


@pytest.mark.parametrize("secret", [bytes(32), b"\x07" * 32])
def test_fewer_shares_are_noise_whatever_the_secret(secret: bytes) -> None:
    """Each by itself, and what a pair would open: Pearson's statistic on bytes has mean 255 and deviation 22.6."""
    drawn = [sa.split(secret, 3, 4) for _ in range(500)]
    for places in [*combinations(range(4), 1), *combinations(range(4), 2)]:
        opened = [sa.combine({place: shares[place] for place in places}) for shares in drawn]
        counts = np.bincount(np.frombuffer(b"".join(each or b"" for each in opened), np.uint8), minlength=256)
        expected = 32 * len(drawn) / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 8 * 22.6, places


def test_nobody_who_knows_the_state_of_a_generator_knows_the_shares() -> None:
    shares = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        shares.append(sa.split(bytes(32), 3, 3))
    assert shares[0] != shares[1]


def test_shares_of_no_secret_are_told() -> None:
    wrong = {place: (sa._PRIME - 1).to_bytes(33, "big") for place in range(3)}
    assert sa.combine(wrong) is None  # a constant polynomial, of a value that no 32 bytes hold
    assert sa.combine({0: b"\xff" * 33, 1: b"\x00" * 33, 2: b"\x07" * 33}) != bytes(32)


# ---------------------------------------------------------------------- keys and masks


def test_a_commitment_is_to_one_secret_for_one_purpose_in_one_round() -> None:
    told = [(b"a", "share of key", b"d"), (b"b", "share of key", b"d"), (b"a", "share of secret", b"d")]
    told += [(b"a", "secret", b"d"), (b"a", "share of key", b"e")]
    assert len({sa.commit(*each) for each in told}) == len(told)


def test_two_clients_agree_and_others_do_not() -> None:
    digest = agreement().digest
    shared = sa.agree(PRIVATE[0], PUBLIC[1], "mask", digest)
    assert shared == sa.agree(PRIVATE[1], PUBLIC[0], "mask", digest) and len(shared) == 32
    others = [
        sa.agree(PRIVATE[2], PUBLIC[1], "mask", digest),
        sa.agree(PRIVATE[0], PUBLIC[1], "shares", digest),
        sa.agree(PRIVATE[0], PUBLIC[1], "mask", agreement(round=2).digest),
    ]
    assert shared not in others and len(set(others)) == 3
    with pytest.raises(WireError, match="public key"):
        sa.agree(PRIVATE[0], bytes(32), "mask", digest)


def test_sealed_shares_are_read_by_their_receiver_as_their_senders_in_their_round() -> None:
    digest = agreement().digest
    key = sa.agree(PRIVATE[0], PUBLIC[1], "shares", digest)
    sealed = sa.seal(key, 0, 1, b"shares")
    assert sa.unseal(sa.agree(PRIVATE[1], PUBLIC[0], "shares", digest), 0, 1, sealed) == b"shares"
    assert sa.unseal(sa.agree(PRIVATE[2], PUBLIC[0], "shares", digest), 0, 1, sealed) is None
    assert sa.unseal(key, 1, 0, sealed) is None  # sent back to its sender
    assert sa.unseal(sa.agree(PRIVATE[1], PUBLIC[0], "shares", agreement(round=2).digest), 0, 1, sealed) is None
    assert sa.unseal(key, 0, 1, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert sa.unseal(key, 0, 1, b"") is None
    assert sa.seal(key, 1, 0, b"shares")[:6] != sealed[:6], "two texts are not under one key stream"


def test_masks_between_pairs_cancel_to_the_bit_and_hide_each_summand() -> None:
    generator = np.random.default_rng(0)
    numbers = generator.integers(0, 2**32, (4, 300_000), dtype=np.uint32)  # more than is made at once
    digest = agreement().digest
    masked = numbers.copy()
    for place, other in permutations(range(4), 2):
        sa.pair_mask(masked[place], PRIVATE[place], PUBLIC[other], place, other, digest)
    assert np.array_equal(masked.sum(0, dtype=np.uint32), numbers.sum(0, dtype=np.uint32))
    for place, row in enumerate(masked):
        assert np.mean(row == numbers[place]) < 1e-4
    for other in range(1, 4):  # a half is taken away again
        sa.pair_mask(masked[0], PRIVATE[other], PUBLIC[0], 0, other, digest, -1)
    assert np.array_equal(masked[0], numbers[0])


def test_the_mask_is_the_key_stream_of_aes_in_counter_mode() -> None:
    """NIST SP 800-38A has no counter from zero: FIPS 197's block cipher, on the counter's own blocks."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    words, seed = np.zeros(3 * 2**18 + 5, np.uint32), bytes(range(32))
    sa.add_mask(words, seed)
    block = Cipher(algorithms.AES(seed), modes.ECB()).encryptor()
    for index in (0, 1, 2**16, 3 * 2**16):
        expected = np.frombuffer(block.update(index.to_bytes(16, "big")), "<u4")
        assert np.array_equal(words[4 * index : 4 * index + 4], expected[: len(words) - 4 * index])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_keys": (PUBLIC[3], PUBLIC[4], PUBLIC[0])}, "all different"),
        ({"mask_keys": (PUBLIC[3], PUBLIC[3], PUBLIC[4])}, "all different"),
        ({"mask_keys": (PUBLIC[3], PUBLIC[4], b"short")}, "of 32 bytes"),
        ({"mask_keys": tuple(PUBLIC[3:5])}, "two keys for each of 3"),
        ({"cipher_keys": tuple(PUBLIC[:2]), "mask_keys": tuple(PUBLIC[2:])}, "two keys for each of 3"),
        ({"threshold": 2}, "a threshold of at least 3 of 3 clients, found 2"),
        ({"threshold": 4}, "threshold"),
        ({"identities": (b"a", b"b", b"a")}, "3 clients that sign with keys of their own, found 2"),
        ({"identities": (b"a", b"b")}, "3 clients that sign with keys of their own, found 2"),
        ({"scale": Scale(2, 8.0, 100)}, "3 to 512 clients"),
        ({"scale": Scale(513, 8.0, 100)}, "3 to 512 clients"),
        ({"scale": Scale(3, 0.0, 100)}, "bound"),
        ({"scale": Scale(3, math.inf, 100)}, "bound"),
        ({"scale": Scale(3, 1000.1, 100)}, "bound to 1000"),
        ({"scale": Scale(3, 8.0, 0)}, "examples"),
    ],
)
def test_keys_that_would_not_hide_a_client_are_refused(changes: dict[str, Any], message: str) -> None:
    agreement().check()
    with pytest.raises(WireError, match=message):
        agreement(**changes).check()


def test_the_digest_tells_everything_apart() -> None:
    other = agreement(mask_keys=(*PUBLIC[3:5], b"\x09" * 32))
    told = [agreement(run_id="ru"), agreement(round=2), agreement(threshold=2), other]
    told += [agreement(scale=Scale(*values)) for values in ((4, 8.0, 100), (3, 4.0, 100), (3, 8.0, 99))]
    told.append(agreement(cipher_keys=tuple(PUBLIC[3:]), mask_keys=tuple(PUBLIC[:3])))
    told.append(agreement(identities=(b"a", b"c", b"b")))
    assert len({each.digest for each in [agreement(), *told]}) == 1 + len(told)


def test_a_threshold_of_half_is_refused() -> None:
    """With four of seven the shares of both kinds can be collected from honest clients that were told unlike things."""
    seven = [bytes([index]) * 32 for index in range(14)]
    values = {"scale": Scale(7, 8.0, 1), "cipher_keys": tuple(seven[:7]), "mask_keys": tuple(seven[7:])}
    values["identities"] = tuple(bytes([index]) for index in range(7))
    agreement(**values, threshold=5).check()
    with pytest.raises(WireError, match="at least 5 of 7 clients, found 4"):
        agreement(**values, threshold=4).check()


@pytest.mark.parametrize(
    ("clients", "share", "expected"),
    [(3, 0.0, 3), (4, 0.0, 3), (5, 0.0, 4), (6, 0.0, 4), (10, 0.0, 7), (10, 0.5, 7), (10, 0.9, 9), (75, 0.68, 51)],
)
def test_two_thirds_or_min_replies_must_stay(clients: int, share: float, expected: int) -> None:
    assert sa.threshold_of(clients, share) == expected


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("counts", [(10, 20, 30), (7, 7, 7, 7), (1, 10**9, 5, 5), (3, 9) * 32])
def test_a_mean_of_words_keeps_to_its_bound(counts: tuple[int, ...]) -> None:
    scale = Scale(len(counts), 2.0, max(counts))
    changes = np.random.default_rng(1).uniform(-2, 2, (len(counts), 2000))
    weights = [scale.weight(count) for count in counts]
    words = [scale.encode(change, weight) for change, weight in zip(changes, weights, strict=True)]
    mean = scale.decode(np.sum(words, axis=0, dtype=np.uint32), sum(weights))
    exact = np.average(changes, axis=0, weights=weights)
    bound = scale.bound / scale.limit / 2 * len(counts) * scale.whole / sum(weights)
    assert np.abs(mean - exact).max() <= bound * (1 + 1e-9)
    assert np.abs(mean - exact).max() > bound / 100, "the bound is of the right size"
    if max(counts) < scale.limit:
        assert weights == list(counts), "numbers of examples count as they are"


def test_a_mean_may_be_of_nothing() -> None:
    scale = Scale(4, 8.0, 100)
    assert len(scale.decode(scale.encode(np.zeros(0), 100), 100)) == 0


def test_no_sum_can_overflow() -> None:
    for clients in (3, 4, 64, 512):
        scale = Scale(clients, 8.0, 100)
        for extreme in (8.0, -8.0, 1e300, -1e300):
            words = scale.encode(np.array([extreme]), scale.whole)
            total = np.sum([words] * clients, axis=0, dtype=np.uint32)
            mean = scale.decode(total, clients * scale.whole)
            assert mean[0] == pytest.approx(np.clip(extreme, -8, 8))


def test_a_sum_with_a_mask_in_it_is_told() -> None:
    scale, words = Scale(4, 8.0, 100), np.zeros(40, np.uint32)
    sa.add_mask(words, bytes(32))
    with pytest.raises(WireError, match="beyond what clients can have sent"):
        scale.decode(words, 400)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_honest_sum_is_read_and_a_larger_one_is_not(sign: int) -> None:
    scale = Scale(4, 8.0, 100)
    words = np.array([0, sign * 2**27], np.int32)
    assert scale.decode(words.view(np.uint32), 400)[1] == pytest.approx(sign * 8.0)
    with pytest.raises(WireError, match="beyond what clients can have sent"):
        scale.decode((words + sign).view(np.uint32), 400)


def test_nobody_counts_for_nothing_or_for_more_than_the_most() -> None:
    scale = Scale(4, 8.0, 100)
    assert [scale.weight(examples) for examples in (0, 1, 50, 100, 10**6)] == [1, 1, 50, 100, 100]
    many = Scale(4, 8.0, 10**9)
    assert many.encode(np.array([8.0, -8.0]), many.weight(1)).view(np.int32).tolist() == [1, -1]
