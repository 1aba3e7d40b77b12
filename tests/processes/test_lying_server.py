"""A server that lies to real clients: what they carry out, and that they live on."""

from collections import Counter
from collections.abc import Callable

import pytest

from hyperbloom.server.broker.superlink import superlink
from siege.lying_server import ESCAPE, HARMLESS, LIES, TRUSTING, tell
from tests.processes.conftest import Site

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(120)]

ALLOWED = 2
GOODBYE = "control characters"  # nodes without keys are others after it


def test_clients_refuse_what_a_lying_server_orders(
    site: Site, until: Callable[[Callable[[], bool], str], None]
) -> None:
    flags = ["--max-train", "60", "--stay"]
    careful = site.client("careful", "--min-noise", "4", "--max-changes", str(ALLOWED), *flags)
    trusting = site.client("trusting", *flags)
    with superlink(f"127.0.0.1:{site.port}", site.folder / "lies") as grid:
        until(lambda: len(grid.get_nodes()) == 2, "two clients")
        done: dict[str, Counter[str]] = {}
        for what in [each for each in LIES if each != GOODBYE for _ in range(ALLOWED + 1)]:
            for name, carried_out in tell(grid, what).items():
                done.setdefault(name, Counter())[what] += carried_out
        assert list(tell(grid, GOODBYE).values()) == [True, True]
        until(lambda: all("the server says:" in each.output for each in (careful, trusting)), "the goodbye")
        assert [client.popen.poll() for client in (careful, trusting)] == [None, None]
    told = sorted(done.values(), key=lambda each: sum(each.values()))
    assert [{what for what, count in each.items() if count} for each in told] == [
        HARMLESS - {GOODBYE},
        (HARMLESS | TRUSTING) - {GOODBYE},
    ]
    assert told[0]["a change with noise"] == ALLOWED
    assert ESCAPE[0] not in careful.output + trusting.output
    assert len(list(site.folder.rglob("*.safetensors"))) <= 4, "private parts lie in the state folders alone"
