"""`flower-client join`."""

from pathlib import Path
from typing import Any

import click

from hyperbloom.client.flags import (
    CONNECTION,
    SIZE,
    VERBOSE,
    check_security,
    data_flags,
    data_spec,
    log_to_stderr,
    make_link,
)
from hyperbloom.common.commands import FOLDER, Command, Flag, section
from hyperbloom.common.errors import ConfigError

_EPILOG = """\
\b
Example:
  flower-client join --server gpu-box:9092 --root-certificates ca.pem --key me.pem \\
      --data scans.npz --out model

exit codes: 0 the model is there, 2 wrong settings or data, 3 refused, or beyond the privacy budget, 5 no connection
"""
_PRIVACY = section(
    "Differential privacy of what is sent",
    Flag("--eps", type=float, metavar="EPSILON", help="add noise for this epsilon", show_default="no noise"),
    Flag("--delta", type=float, help="and this delta; less than one over the number of examples"),
    Flag("--budget", type=float, metavar="EPSILON", help="refuse if all joins together spend more"),
    Flag(
        "--state-dir",
        type=FOLDER,
        metavar="DIR",
        help="where privacy spent on these data is entered",
        show_default="per user",
    ),
)


@click.command("join", cls=Command, params=[*CONNECTION, *data_flags(), SIZE, *_PRIVACY, VERBOSE], epilog=_EPILOG)
@click.option("--out", required=True, type=FOLDER, metavar="DIR", help="folder for the model")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    out: Path,
    eps: float | None,
    delta: float | None,
    budget: float | None,
    state_dir: Path | None,
    **flags: Any,
) -> None:
    """Get a model for this machine's data.

    The server never saw these data, and it takes neither labels nor training. The server (`flower-server serve`) sends
    an encoder. This machine sends back what the encoder makes of the data (with --eps: with noise that makes it
    differentially private), and gets weights. They become a model folder for `predict`.

    --data takes what flower-client takes, and also inputs without labels: .npy, .npz with x alone, a folder of images.
    """
    from hyperbloom.common.export import check_writable

    if not flags["server"]:
        ctx.fail("Missing --server.")
    log_to_stderr("join", flags["verbose"])
    if (eps is None) != (delta is None):
        raise ConfigError("--eps and --delta: expected both or neither")
    if budget is not None and eps is None:
        raise ConfigError("--budget: expected with --eps and --delta; without noise no budget holds")
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(f"--budget: expected a number above 0, found {budget:g}")
    check_security(flags)
    check_writable(out)  # before the budget is spent
    link = make_link(flags)

    from hyperbloom.client.join import join
    from hyperbloom.client.newcomer import Newcomer, Promise, Sources
    from hyperbloom.client.privacy import Ledger
    from hyperbloom.client.state import default_state_dir

    promise = Promise(eps, delta) if eps is not None and delta is not None else None
    spec = data_spec(flags)
    ledger = Ledger(state_dir or default_state_dir("on-demand"))
    ledger.read()  # a damaged one is told before anybody is asked, and so is an exhausted budget
    if promise and budget is not None:
        ledger.afford(promise.epsilon, promise.delta, budget)
    newcomer = Newcomer(Sources(spec), flags["size"], promise, budget, ledger, flags["server"])
    join(link, newcomer)
    print(f"{out}: {', '.join(newcomer.write(out))}")
