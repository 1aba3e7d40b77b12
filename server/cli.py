"""`flower-server`: the flags of a run, and the run that they describe."""

import json
import math
import os
import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from hyperbloom.common.errors import ConfigError, printable
from hyperbloom.common.program.commands import FILE, FOLDER, Flag, Program, command, execute, given, names, section
from hyperbloom.common.program.plain import is_loopback
from hyperbloom.common.program.signals import terminate_as_interrupt
from hyperbloom.server.broker.log import trace
from hyperbloom.server.commands.access import certs, clients, doctor
from hyperbloom.server.commands.runs import app, compare, export, report, serve, tune, watch
from hyperbloom.server.flags import ENGINES, LISTENING, OWN_CODE, SUPERLINK, TRACK, WEB, set_flag

if TYPE_CHECKING:
    from hyperbloom.common.config import RunConfig
    from hyperbloom.server.grids.fleet import Machines


class KeyFlag(Flag):
    """A flag for a key of the run. Its help text comes from the configuration."""

    def __init__(self, flag: str, key: str, **details: Any) -> None:
        super().__init__(f"{flag} {key.replace('.', '_')}", "", show_default=False, **details)
        self.key = key

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Fill in the help text now: importing the configuration takes time, and only `--help` needs it."""
        from hyperbloom.common.config import RunConfig

        first, _, name = self.key.partition(".")
        field = RunConfig.model_fields[first]
        field = type(field.default).model_fields[name] if name else field
        default = "" if field.default is None else f"  [default: {field.default}]"
        self.help = f"{field.description}{f' [{self.key}]' if name else ''}{default}"
        return super().get_help_record(ctx)


_KEYS = [
    KeyFlag("--strategy", "strategy"),
    KeyFlag("--rounds", "rounds", type=int),
    KeyFlag("--clients", "clients", type=int),
    KeyFlag("--cohort", "cohort", type=int),
    KeyFlag("--seed", "seed", type=int),
    KeyFlag("--eval-every", "eval_every", type=int),
    KeyFlag("--model", "model"),
    KeyFlag("--init-from", "init_from", metavar="RUN"),
    KeyFlag("--join-timeout", "join_timeout_s", type=float),
    KeyFlag("--round-timeout", "round_timeout_s", type=float),
    KeyFlag("--data", "data.name"),
    KeyFlag("--root", "data.root", metavar="DIR"),
    KeyFlag("--split", "data.split"),
    KeyFlag("--max-train", "data.max_train", type=int),
]
_DP = "sets privacy.where=client: each client clips its change and adds noise before anything leaves it"
_MASKS = "sets secure_aggregation=true: clients mask their changes, and the server learns only the sum"
_RUN = section(
    "The run",
    Flag("--config", "YAML file that describes the run; flags win over it", type=FILE),
    *_KEYS,
    Flag("--dp-clients", _DP, is_flag=True),
    Flag("--secure-aggregation", _MASKS, is_flag=True),
    Flag("--baselines", "strategies to run afterwards with the same clients", metavar="A,B"),
    set_flag("set any key"),
    Flag("--run-dir", "run folder", type=FOLDER, show_default="runs/DATE-STRATEGY"),
)
_GO_ON = "with --run-dir: begin the run, go on with it if it is there, end with code 0 if it is complete"
_AT_ONCE = "with --engine inline: train the clients of a cohort at once"
_METRICS = "serve Prometheus metrics at this address, without HOST on loopback; port 0 takes a free one"
_FLAGS = [
    *_RUN,
    *section(
        "Going on",
        Flag("--resume", "go on from the last checkpoint in this run folder", type=FOLDER, metavar="RUN"),
        OWN_CODE,
        Flag("--go-on", _GO_ON, is_flag=True),
    ),
    *section(
        "Machines",
        Flag("--engine", "clients over gRPC, or virtual ones in this process", type=ENGINES, default="grpc"),
        Flag("--device", "where the server's networks are: auto (CUDA if there is one), cpu, cuda:1", default="auto"),
        Flag("--vectorise/--no-vectorise", _AT_ONCE, default=None, show_default="on a CUDA device"),
        Flag("--workers", "with --engine inline: processes that train clients", type=click.IntRange(1), default=1),
        Flag("--local-clients", "start so many clients beside the server", default=0),
        SUPERLINK,
        Flag("--serve-backbone", "let clients fetch the run's backbone (flower-client --fetch-backbone)", is_flag=True),
    ),
    *LISTENING,
    *section(
        "Watching (of any run: flower-server watch, flower-server report)",
        Flag("--web", WEB, metavar="[HOST:]PORT"),
        Flag("--metrics-port", _METRICS, metavar="[HOST:]PORT"),
        TRACK,
    ),
    Flag("--list", "list strategies, models, data sets and splits", is_flag=True),
    Flag("--json as_json", "with --list: print JSON for programs", is_flag=True),
    Flag("--explain", "list every key of a run of this strategy", metavar="STRATEGY"),
]


def _run(ctx: click.Context, flags: dict[str, Any]) -> int:
    """Personalised federated learning: one hypernetwork here, a different model for every client."""
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    try:
        with terminate_as_interrupt():
            _start(ctx, flags)
    except KeyboardInterrupt as stop:
        folder = next((each for each in stop.args if isinstance(each, Path)), flags["resume"] or flags["run_dir"])
        again = f"{quote(str(folder or 'RUN'))}{' --insecure' * flags['insecure']}"
        how = "goes on from its last checkpoint, if any, and says which flags to give again"
        print(f"flower-server: stopped; --resume {again} {how}", file=sys.stderr)
        return 130
    return 0


def _start(ctx: click.Context, flags: dict[str, Any]) -> Path | None:
    """Print a list, resume a run or begin one, as the flags say; return the run's folder."""
    from rich.console import Console

    console, resume = Console(), flags["resume"]
    if flags.get("as_json") and not flags["list"]:
        raise ConfigError("--json: expected beside --list")
    if flags.get("list") or flags.get("explain"):
        from hyperbloom.server.catalogue import print_catalogue, print_keys

        print_catalogue(console, flags["as_json"]) if flags["list"] else print_keys(console, flags["explain"])
        return None
    from hyperbloom.common.config import check
    from hyperbloom.server.grids.fleet import Machines
    from hyperbloom.server.runs.recorded import read_config

    if resume and not flags["go_on"]:
        flags |= _as_it_began(ctx, flags)
        config = read_config(resume, flags["own_code"])
    else:
        config = _config(flags)
    if flags["go_on"]:
        resume, complete = _begun(flags, config)
        if complete:
            print(f"the run in {flags['run_dir']} is complete; name a new --run-dir for the next one")
            return resume
    machines = check(Machines, flags, "the flags of the run")
    _check(config, machines)
    if not resume:
        machines.check_open(config)
    if machines.engine == "grpc":
        trace()
    # A wrong flag is reported before this import, which takes seconds because of torch and Flower.
    from hyperbloom.server.runs.running import run_federation

    return run_federation(config, machines, console, flags["run_dir"], flags["go_on"], resume)


def _config(flags: dict[str, Any]) -> "RunConfig":
    """Return the run that the flags describe."""
    from hyperbloom.common.config import load_run_config, parse_assignment

    values = {flag.key: flags[str(flag.name)] for flag in _KEYS}
    overrides = {key: value for key, value in values.items() if value is not None}
    if flags["baselines"] is not None:
        overrides["baselines"] = names(flags["baselines"])
    if flags["dp_clients"]:
        overrides["privacy.where"] = "client"
    if flags["secure_aggregation"]:
        overrides["secure_aggregation"] = True
    overrides |= dict(parse_assignment(text) for text in flags["assignments"])
    if flags["local_clients"] and "clients" not in overrides and flags["config"] is None:
        overrides["clients"] = flags["local_clients"]
    return load_run_config(flags["config"], overrides)


def _check(config: "RunConfig", machines: "Machines") -> None:
    """Raise a ConfigError for flags that contradict each other."""
    if machines.superlink and (machines.engine != "grpc" or machines.local_clients or machines.serve_backbone):
        raise ConfigError("--superlink: expected with --engine grpc, without --local-clients and --serve-backbone")
    if machines.vectorise is not None and machines.engine != "inline":
        raise ConfigError(f"--vectorise: expected with --engine inline, found --engine {machines.engine}")
    if machines.workers > 1 and (machines.engine != "inline" or machines.vectorise):
        raise ConfigError("--workers: expected with --engine inline and without --vectorise")
    if not 0 <= machines.local_clients <= config.clients:
        found = machines.local_clients
        raise ConfigError(f"--local-clients: expected 0 to clients = {config.clients}, found {found}")
    if machines.engine == "grpc" and not machines.first_start:
        machines.certificates()


def _begun(flags: dict[str, Any], config: "RunConfig") -> tuple[Path | None, bool]:
    """Return the folder of `--go-on` if its run has begun, and whether the run is complete."""
    folder = flags["run_dir"]
    if flags["resume"] or not folder:
        raise ConfigError("--go-on: expected --run-dir DIR and no --resume")
    if not flags["port"]:
        raise ConfigError("--go-on: expected a --port, at which clients find the server again; found 0")
    from hyperbloom.server.runs.checkpoint import begun_as
    from hyperbloom.server.runs.recorded import has_ended

    if not begun_as(config, folder, "--go-on"):
        return None, False
    over = has_ended(folder)
    if not over and not config.checkpoint_every:
        raise ConfigError(f"--go-on: {folder} has no checkpoints (checkpoint_every); delete it to begin anew")
    return folder, over


def _as_it_began(ctx: click.Context, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags with which the run of `--resume` began, except those given anew on the command line.

    The folder may be somebody else's. So `--insecure`, `--superlink`, addresses beyond loopback that need no key,
    certificates inside the folder, and `--serve-backbone`, which hands out files, must be given anew.
    """
    from hyperbloom.server.grids.fleet import SECURITY, Machines

    anew = given(ctx)
    for flag in _RUN:
        if flag.name in anew:
            raise ConfigError(f"--resume: {flag.opts[0]} would change the run; leave it out, or start a new run")
    path = flags["resume"] / "environment.json"
    try:
        began = dict(json.loads(path.read_text()).get("machines", {}))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"--resume: expected the folder of a run, found no readable {path} ({error})") from None
    if "vectorise" in anew and flags["vectorise"] != began.get("vectorise"):
        raise ConfigError("--resume: --vectorise would change the run (in the last bits); leave it out")
    if anew & SECURITY:
        anew |= SECURITY
    elif began.get("insecure") and began.get("engine") == "grpc":
        raise ConfigError(f"--resume: the run in {flags['resume']} was in plain text; give --insecure again or --certs")
    taken = {name: began[name] for name in Machines.model_fields.keys() & began.keys() - anew - {"insecure"}}
    for name in {"certs", "superlink", "web", "metrics_port", "serve_backbone"} & taken.keys():
        value, word = str(taken[name] or ""), f"--{name.replace('_', '-')}"
        host = value.rpartition(":")[0]
        inside = name == "certs" and path.parent.resolve() in Path(value).resolve().parents
        far = name != "certs" and host and not is_loopback(host)
        if inside or far or (name == "serve_backbone" and value):
            raise ConfigError(f"--resume: the run in {path.parent} had {word} {value}; give it again if you mean it")
    return taken


@command(
    "advise",
    click.Argument(["run"], required=False, help="a finished run with baselines", type=FOLDER),
    *(flag for flag in _FLAGS if flag.section != Flag.section),
    example="flower-server advise --config run.yaml --clients 4 --cohort 2",
)
@click.pass_context
def advise(ctx: click.Context, /, run: Path | None, **flags: Any) -> None:
    """Say which strategy is for your clients.

    Clients join as for any run, and tell what they disclose: sizes, class shares, whether they have networks of their
    own. They train alone (local), then one model for all (fedavg), then a model for each (pfedhn), or what --strategy
    and --baselines name. Each client trains twenty times and is scored ten times, unless --rounds and --eval-every
    say otherwise: the defaults below are those of a run. The advice goes into RUN/advice.json and the report. For a
    finished run with baselines, `advise RUN` gives the advice at once.
    """
    if run and given(ctx) - {"own_code"} != {"run"}:
        raise ConfigError("expected either the folder of a finished run or the flags of a new one, found both")
    folder = run or _start(ctx, flags | ({} if flags["resume"] else _probe(flags)))
    from hyperbloom.common.files.storage import write_json
    from hyperbloom.server.pages.report import write_report
    from hyperbloom.server.runs.advice import advise_on
    from hyperbloom.server.runs.lines import ADVICE

    assert folder
    advice = advise_on(folder, not run or flags["own_code"])
    write_json(folder / ADVICE, vars(advice))
    write_report(folder)
    print(f"\nadvice: {advice.strategy}", *map(printable, advice.says), sep="\n- ")


def _probe(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that make a run short, with baselines. `local` takes clients with and without own networks."""
    config = _config(flags)
    first = config.strategy if "strategy" in config.model_fields_set or config.options else "local"
    others = config.baselines or [name for name in ("local", "fedavg", "pfedhn") if name != first]
    rounds = flags["rounds"] or min(config.rounds, 20 * math.ceil(config.clients / config.cohort))
    every = flags["eval_every"] or min(config.eval_every, math.ceil(rounds / 10))
    short = {"strategy": first, "baselines": ",".join(others), "rounds": rounds, "eval_every": every}
    return {**short, "assignments": (*flags["assignments"], "gains=false")}


_COMMANDS = (advise, app, certs, clients, compare, doctor, export, report, serve, tune, watch)
flower_server = Program("flower-server", _COMMANDS, _run, _FLAGS, Path(__file__).with_name("help.txt"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return execute(flower_server, arguments)
