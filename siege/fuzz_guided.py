"""The targets of `siege/fuzz.py`, guided by coverage (`pip install atheris`; Linux).

    python -m siege.fuzz_guided graph -max_total_time=600

What follows the target are libFuzzer's flags. The first input that breaks the target ends the process, and is kept.
"""

import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def guided(target: str, flags: list[str]) -> None:
    """Let atheris look for what breaks a target; it ends the process."""
    try:
        import atheris
    except ModuleNotFoundError:
        sys.exit("siege.fuzz_guided: expected atheris, which is not installed: pip install atheris")

    with atheris.instrument_imports(include=["hyperbloom"]):  # what is imported before sees no coverage
        from hyperbloom.common.errors import HyperbloomError
        from siege.fuzz import TARGETS, sound

    corpus = Path(tempfile.mkdtemp(prefix=f"corpus-{target}-"))
    for index, content in enumerate(sound(target)):
        (corpus / str(index)).write_bytes(content)

    def one(content: bytes) -> None:
        with suppress(HyperbloomError):
            TARGETS[target](content)

    atheris.Setup([sys.argv[0], str(corpus), *flags], one)
    atheris.Fuzz()


if __name__ == "__main__":
    guided(sys.argv[1], sys.argv[2:])
