"""Seeds: pinned, because a change of them changes every published number."""

import pytest

from hyperbloom.common.seeds import derive


@pytest.mark.parametrize(
    ("arguments", "seed"),
    [
        ((0,), 3456079177858693020),
        ((0, "cohort", 1), 2197664106130597498),
        ((0, "cohort", 2), 8299365623558774632),
        ((1, "cohort", 1), 9051328336261562110),
        ((0, "embedding", "client-0"), 3702589323821329189),
        ((2**70, "ü"), 9156484885526577195),
    ],
)
def test_known_values(arguments: tuple[int | str, ...], seed: int) -> None:
    assert derive(*arguments) == seed  # type: ignore[arg-type]


def test_labels_do_not_run_together() -> None:
    seeds = [
        derive(0, "ab", "c"),
        derive(0, "a", "bc"),
        derive(0, "abc"),
        derive(0, "a", "b", "c"),
        derive(0, "c", "ab"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive(1, "1") != derive(11)


def test_a_seed_fits_what_torch_and_the_wire_carry() -> None:
    seeds = [derive(0, "client", number) for number in range(2000)]
    assert len(set(seeds)) == 2000
    assert 0 <= min(seeds) <= max(seeds) < 2**63
    assert 0.48 < sum(seed >> 62 for seed in seeds) / 2000 < 0.52  # the top bit is fair as well
