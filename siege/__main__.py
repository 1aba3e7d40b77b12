"""All of the siege in so many minutes: faults, attacks, and damaged input.

python -m siege --minutes 30
"""

import argparse
import subprocess
import sys

PARTS = {"siege.faults": 0.4, "siege.attacks": 0.4, "siege.fuzz": 0.2}
"""Each program's share of the time. Starting and ending real processes takes a minute more."""


def main(minutes: float) -> int:
    """Run one program after the other; return how many of them found something."""
    failed = 0
    for module, share in PARTS.items():
        print(f"python -m {module} --minutes {share * minutes:g}", flush=True)
        failed += bool(subprocess.call([sys.executable, "-m", module, "--minutes", str(share * minutes)]))
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="default: %(default)s")
    sys.exit(bool(main(parser.parse_args().minutes)))
