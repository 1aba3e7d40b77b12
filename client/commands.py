"""The subcommands of `flower-client`."""

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import click

from hyperbloom.client import flags as shared
from hyperbloom.client.backbones import backbone
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.commands import FILE, FOLDER, JSON, Flag, command, section
from hyperbloom.common.program.names import default_state_dir

_STATE = Flag("--state-dir", "where the client keeps its state", type=FOLDER, show_default="per user")
_WEB = "serve this client's own page at this address, without HOST on loopback; port 0 takes a free one"
WEB = Flag("--web", _WEB, metavar="[HOST:]PORT")
_MOST_IN_REPORT = 100
_MODEL_OUT = Flag("--out", "folder for the model", required=True, type=FOLDER)


@command(
    "keygen",
    Flag("--out", "where the private key goes (mode 0600)", type=FILE, required=True),
    example="flower-client keygen --out ward-7.pem",
)
def _keygen(out: Path) -> None:
    """Make this client's key pair.

    The private key stays here, and the server gets the public one. The public key is printed, and written beside the
    private one with the suffix .pub. Send it to whoever runs the server, who adds it with
    `flower-server clients add NAME --public-key FILE`.
    """
    from hyperbloom.common.files.storage import write_bytes
    from hyperbloom.common.secrecy.keys import fingerprint, make_key, public_pem, write_private_key

    public = out.parent / f"{out.stem}.pub"
    if out == public:
        raise ConfigError(f"--out: expected another suffix than .pub, which the public key gets; found {out}")
    for path in (out, public):
        if path.exists():
            raise ConfigError(f"--out: {path} is there already; keys are never overwritten")
    key = make_key()
    write_private_key(out, key)
    pem = public_pem(key)
    write_bytes(public, pem.encode())
    print(f"{pem}fingerprint {fingerprint(pem)}\nthe private key is {out}, the public key {public}")


@command(
    "doctor",
    *shared.CONNECTION,
    *shared.data_flags(required=False),
    Flag("--client-id", "names the default state folder", default="client"),
    _STATE,
    JSON,
    example="flower-client doctor --server gpu-box:9092 --root-certificates ca.pem --key ward-7.pem",
)
def _doctor(key: Path | None, client_id: str, state_dir: Path | None, as_json: bool, **flags: Any) -> int:
    """Check this machine before it joins.

    Looks at packages, GPU, threads, disk, clock, key, with --data at the data, and with --server at the way to the
    server. Prints a table with what to do for each thing that is not ok. Exit code 1 if something would keep the client
    from joining, 0 otherwise. Whether the server knows this client's key shows when it joins.
    """
    from hyperbloom.client.settings import ClientSettings
    from hyperbloom.common.data import load_client_data
    from hyperbloom.common.program import doctor
    from hyperbloom.common.secrecy.keys import fingerprint, public_pem, read_private_key

    folder = state_dir or default_state_dir(client_id)
    findings = [*doctor.check_machine(), doctor.check_folder("state folder", folder)]
    if flags["server"]:  # the CA that it has fetched with a token
        flags = shared.enrolled({**flags, "key": key, "token": None}, client_id, folder)
        key = flags["key"]
    if ca := flags["root_certificates"]:
        findings.append(doctor.check_expiry("CA", ca, "get a new ca.pem from whoever runs the server"))
    if key:
        found = doctor.check_file("key", lambda: f"{key}: {fingerprint(public_pem(read_private_key(key, '--key')))}")
        findings.append(found)
    if flags["data"]:
        settings = ClientSettings(client_id, shared.data_spec(flags), state_dir=state_dir)
        do = "mend the data (docs/own-data.md), or name others"
        findings.append(doctor.check_file("data", lambda: load_client_data(settings.source).summary, do))
    if flags["server"]:
        findings += doctor.check_server(flags["server"], ca, bool(flags["insecure"]))
    return doctor.report(findings, as_json)


@command(
    "schema",
    click.Argument(["table"], help="a .csv, .tsv or .parquet file", type=FILE),
    Flag("--label", "column to predict, or several: A,B", required=True, metavar="COLUMN"),
    Flag("--owner", "column that says whose a row is", metavar="COLUMN"),
    Flag("--group", "column that says which rows no split may part", metavar="COLUMN"),
    Flag("--backbone", "pretrained network: with a tokenizer, one column holds texts", metavar="FOLDER"),
    Flag("--out", "where the schema goes", type=FILE, show_default="printed"),
    example="flower-client schema patients.csv --label diagnosis --out schema.json",
)
def _schema(table: Path, out: Path | None, **columns: Any) -> None:
    """Propose what the columns of a table mean.

    Columns are numbers, with the mean and the deviation by which they are scaled, or categories, with all their words.
    Read it, mend it, and leave out what should not be learned from: it will leave this machine. One schema serves all
    clients. The server hands it out (--set data.schema_file=FILE), or each client names it (--schema FILE).
    """
    from hyperbloom.common.data import DataSpec
    from hyperbloom.common.data.schema import is_number
    from hyperbloom.common.data.table import read_cells, schema_of
    from hyperbloom.common.files.storage import write_bytes

    if out is not None and out.exists():
        raise ConfigError(f"--out: expected nothing there yet, found {out}, perhaps mended; delete it, or name another")
    proposed = schema_of(DataSpec(str(table), **columns), read_cells(table))
    text = proposed.model_dump_json(indent=2, exclude_defaults=True) + "\n"
    if out is None:
        print(text, end="")
        return
    write_bytes(out, text.encode())
    words = {one.name: one.words for one in proposed.columns}
    few = ", ".join(name for name, them in words.items() if {*them} - {"0", "1"} and all(map(is_number, them)))
    print(f"{out}: {len(proposed.columns)} columns, {proposed.width} inputs, {len(proposed.classes) or 'no'} classes")
    if few:
        print(f"read as categories: {few}; make such a column a number if other sites may have more values")


@command(
    "download",
    click.Argument(["name"], help="name of a data set; see flower-server --list"),
    Flag("--root", "where to", type=FOLDER, show_default="$HYPERBLOOM_DATA or ~/.cache/hyperbloom"),
    example="flower-client download cifar10 --root /data",
)
def _download(name: str, root: Path | None) -> None:
    """Fetch a named data set.

    Clients use it, and also `flower-server` with --engine inline, compare, tune and advise. Files that can be read stay
    as they are. torchvision's downloader fetches CIFAR-10 and -100, MNIST and Fashion-MNIST from their publishers.
    """
    from hyperbloom.common.data import DATASETS, DataSpec, load_client_data

    if name not in DATASETS:
        raise ConfigError(f"expected one of {', '.join(sorted(DATASETS))}; found {name!r}")
    print(f"{name} can be read: {load_client_data(DataSpec(data=name, root=root, download=True)).summary}")


@command(
    "export",
    *shared.data_flags(),
    Flag("--client-id", "this client's name, as it joined", required=True),
    _STATE,
    Flag("--run", "which run, if the state folder holds several"),
    _MODEL_OUT,
    example="flower-client export --client-id ward-7 --data scans.npz --out model",
)
def _export(out: Path, client_id: str, state_dir: Path | None, run: str | None, **data: Any) -> None:
    """Write this client's own model from its state folder.

    Use it for runs in which no one else has the whole model, such as runs of pfedhn-pc, fedrep, ghn or local. It writes
    the model with which the client was last scored. In runs of pfedhn and fedavg the server writes the models:
    flower-server export. Give the same data flags as when the client joined.
    """
    from hyperbloom.client.keep.own_model import write_own_model
    from hyperbloom.client.settings import ClientSettings

    settings = ClientSettings(client_id, shared.data_spec(data), state_dir=state_dir)
    print(f"{out}: {', '.join(write_own_model(settings, run, out))}")


@command(
    "watch",
    Flag("--client-id", "names the default state folder", default="client"),
    _STATE,
    WEB,
    example="flower-client watch --client-id ward-7 --web 8080",
)
def _watch(client_id: str, state_dir: Path | None, web: str | None) -> None:
    """Show a browser what has left this machine, until Ctrl-C.

    When the client last trained, what has left by kind, its privacy budget, its accuracy against training alone, and
    how to leave. The page is made from the state folder alone; the client may run or not.
    """
    from hyperbloom.client.page import serve

    serve(state_dir or default_state_dir(client_id), web or "0", lambda line: print(line, flush=True))


@command(
    "predict",
    click.Argument(
        ["files"], help="image, .npy, .npz, .txt, table or folder of images", nargs=-1, required=True, type=FILE
    ),
    Flag("--model", "model folder, from export or join", required=True, type=FOLDER),
    Flag("--json as_json", "a JSON object per input, with all probabilities", is_flag=True),
    Flag("--masks", "segmentation: folder for the masks as PNG, a colour for each class", type=FOLDER),
    Flag("--report", "page with the images, at most 100, and the answers; masks lie over the images", type=FILE),
    example="flower-client predict --model models/ward-7 scan-1.png scan-2.png",
)
def _predict(files: tuple[Path, ...], model: Path, as_json: bool, masks: Path | None, report: Path | None) -> None:
    """Answer for images or arrays with an exported model.

    FILES are images (converted to the model's size and channels), .npy or .npz (key x), and folders of images. For a
    model of a table they are .csv, .tsv or .parquet with the same columns; the label may be missing. For a model of
    texts a line of a .txt file is a text, too. Prints a table, or
    tab-separated lines when piped: the file, then what the model's task tells: a class and its probability,
    each label's probability, numbers in their units, or the share of each class in a mask.

    The report is one HTML file. It holds the images, so it belongs where they may be.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from hyperbloom.common.data.texts import TOKENIZER
    from hyperbloom.common.data.unlabelled import read_inputs
    from hyperbloom.common.files.export import read_model
    from hyperbloom.common.files.pictures import draw, write_mask, write_page

    described, outputs_of = read_model(model)
    if report and described.input_shape[:-2] not in ((1,), (3,)):
        raise ConfigError(f"--report: expected a model of images, found inputs of shape {described.input_shape}")
    table, classes = Table(box=None, pad_edge=False), tuple[str, ...]()
    shown = list[tuple[bytes, list[tuple[str, str]]]]()
    in_table, tokenizer = sys.stdout.isatty() and not as_json, str(model / TOKENIZER)
    for inputs in read_inputs(files, described.input_shape, described.preprocessing, described.table, tokenizer):
        for start in range(0, len(inputs.names), 256):
            answers = described.learned.show(outputs_of(inputs.values[start : start + 256]), described.class_names)
            for place, answer in enumerate(answers, start):
                file, mask = inputs.names[place], answer.pop("mask", None)
                if mask is not None and masks:
                    answer["mask"] = str(write_mask(masks, file, mask))
                cells = _cells(answer, 4 if in_table else 6)
                if report and len(shown) < _MOST_IN_REPORT:
                    shown.append((draw(inputs.values[place].numpy(), mask), [("file", file), *cells]))
                    classes = described.class_names if mask else classes
                if as_json:
                    print(json.dumps({"file": file, **answer}))
                elif in_table:
                    for name in ("file", *(name for name, _ in cells)) if not table.columns else ():
                        table.add_column(escape(name))
                    table.add_row(escape(file), *(escape(value) for _, value in cells))
                else:
                    print(file, *(value for _, value in cells), sep="\t")
    if in_table:
        Console().print(table)
    if report:
        write_page(report, f"Answers of {model.name}", shown, classes)


def _cells(answer: dict[str, Any], digits: int) -> list[tuple[str, str]]:
    """Return an answer as a name and a text for each column; lists of numbers are for JSON alone."""
    cells: list[tuple[str, str]] = []
    for name, value in answer.items():
        if isinstance(value, dict):
            cells += _cells(value, digits)
        elif isinstance(value, list) and all(isinstance(each, str) for each in value):
            cells.append((name, ", ".join(value) or "none"))
        elif not isinstance(value, list):
            cells.append((name, f"{value:.{digits}f}" if isinstance(value, float) else str(value)))
    return cells


@command(
    "join",
    *shared.CONNECTION,
    *shared.data_flags(),
    *section(
        "Differential privacy of what is sent",
        Flag("--eps", "add noise for this epsilon", type=float, show_default="no noise"),
        Flag("--delta", "and this delta; less than one over the number of examples", type=float),
        Flag("--budget", "refuse if all joins together spend more than this epsilon", type=float),
    ),
    shared.SIZE,
    shared.VERBOSE,
    Flag("--client-id", "the name that the token is for", show_default="a random one"),
    Flag("--state-dir", "where privacy spent on these data is entered", type=FOLDER, show_default="per user"),
    _MODEL_OUT,
    example="flower-client join --server gpu-box:9092 --root-certificates ca.pem --key me.pem --data x.npz --out model",
    epilog="exit codes: 0 the model is there, 2 wrong settings or data, 3 refused, or beyond the privacy budget, 5 no "
    "connection",
)
@click.pass_context
def _join(ctx: click.Context, /, eps: float | None, delta: float | None, budget: float | None, **flags: Any) -> None:
    """Get a model for this machine's data.

    It needs neither labels nor training, and the server never sees the data. The server (`flower-server serve`) sends
    an encoder. This machine sends back the descriptor that the encoder computes from the data. With --eps, noise makes
    it differentially private. The server answers with weights, which become a model folder for `predict`. Before the
    descriptor leaves, this command says what may be expected; afterwards, which model it got.

    --data takes what flower-client takes, and also inputs without labels: .npy, .npz with only x, a folder of images.
    """
    if not flags["server"]:
        ctx.fail("Missing --server.")
    shared.log_to("join", flags["verbose"])
    if (eps is None) != (delta is None):
        raise ConfigError("--eps and --delta: expected both or neither")
    for flag, given in (("--max-train", flags["max_train"]), ("--partition", flags["partition"])):
        if eps is not None and given is not None:
            raise ConfigError(f"--eps: expected no {flag}: which examples it leaves depends on all labels")
    if eps is not None and flags["label"] and not flags["schema"]:
        raise ConfigError("--eps: expected --schema with --label, or a server could ask which words occur")
    if budget is not None and eps is None:
        raise ConfigError("--budget: expected with --eps and --delta; without noise no budget holds")
    if budget is not None and not 0 < budget < float("inf"):
        raise ConfigError(f"--budget: expected a number above 0, found {budget:g}")
    out, folder = flags["out"], flags["state_dir"] or default_state_dir("on-demand")
    flags = shared.enrolled(flags, flags["client_id"] or secrets.token_hex(8), folder)
    shared.check_security(flags)
    from hyperbloom.common.files.export import beside

    with beside(out):  # it can be written, or the budget would be spent for nothing
        pass
    link = shared.make_link(flags)

    from hyperbloom.client.newcomer.guarantee import Promise
    from hyperbloom.client.newcomer.join import join
    from hyperbloom.client.newcomer.ledger import Ledger
    from hyperbloom.client.newcomer.newcomer import Newcomer
    from hyperbloom.client.newcomer.sources import Sources

    promise = Promise(eps, delta) if eps is not None and delta is not None else None
    spec = shared.data_spec(flags)
    ledger = Ledger(folder)
    ledger.afford(promise, budget)  # report a damaged ledger or an exhausted budget before connecting
    newcomer = Newcomer(Sources(spec), flags["size"], promise, budget, ledger, flags["server"])
    join(link, newcomer)
    print(f"{out}: {', '.join(newcomer.write(out))}")


COMMANDS = (backbone, _doctor, _download, _export, _join, _keygen, _predict, _schema, _watch)
