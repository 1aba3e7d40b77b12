"""What grows in a long run is found."""

from benchmarks.memory import Footprint, Sample, median
from siege.soak import growth


def test_what_grows_in_a_soak_is_named() -> None:
    def samples(late: Footprint) -> list[Sample]:
        early = Footprint(100, 10, 5)
        return [(done, dict.fromkeys("abcde", early if done < 300 else late)) for done in range(400)]

    def problems(late: Footprint) -> list[str]:
        found = samples(late)
        return growth(median(found, 200, 210), median(found, 390, 400))

    assert problems(Footprint(120, 14, 9)) == []
    assert problems(Footprint(127, 10, 5))[0] == "a: 127 MiB after 100"
    assert problems(Footprint(100, 16, 5))[0] == "a: 16 files after 10"
    assert len(problems(Footprint(50, 10, 11))) == 5
