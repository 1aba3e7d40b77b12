"""`flower-client`: what its flags mean, what it says of wrong ones, and what it leaves behind."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hyperbloom import __version__
from hyperbloom.client.cli import flower_client, main
from hyperbloom.client.flags import enrolled, log_to
from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.link import runtime
from hyperbloom.client.link.server import Link
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work.client import client_for
from hyperbloom.client.work.introduction import introduce
from hyperbloom.common.data import DATASETS, PARTITIONERS, DataSpec, published
from hyperbloom.common.errors import ConfigError, ConnectionFailed, DataError, HyperbloomError, RefusedError
from hyperbloom.common.secrecy.keys import make_key, public_pem, read_private_key, write_private_key
from hyperbloom.common.wire.orders import Greeting
from hyperbloom.server.access.certificates import init
from tests.parsing import parse

Joined = list[tuple[Link, Callable[..., Any], dict[str, Any], bool]]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    """Return what the command would have joined with; it connects to nothing."""
    calls: Joined = []
    monkeypatch.setattr(
        runtime, "run_client", lambda link, app, config, stay=False: calls.append((link, app, config, stay))
    )
    return calls


@pytest.fixture
def start(tmp_path: Path, joined: Joined) -> Callable[..., int]:
    """Return the command with the flags that it cannot do without."""

    def run(*flags: str) -> int:
        needed = ["--server", "127.0.0.1:9092", "--client-id", "ward-7", "--state-dir", str(tmp_path / "state")]
        said = {"--root-certificates", "--key", "--insecure"} & set(flags)
        return main([*needed, *([] if said else ["--insecure"]), *flags])

    return run


# ---------------------------------------------------------------------- what flags mean


def test_the_least_that_one_must_say(start: Callable[..., int], joined: Joined, tmp_path: Path) -> None:
    assert start() == 0
    link, app, config, stay = joined[0]
    assert link == Link("127.0.0.1:9092", insecure=True)
    assert not stay
    assert callable(app)
    assert ClientSettings.from_node_config(config) == ClientSettings(
        "ward-7", state_dir=tmp_path / "state", server="127.0.0.1:9092"
    )


def test_every_flag_reaches_the_settings(start: Callable[..., int], joined: Joined, tmp_path: Path) -> None:
    flags = ["--data", "digits", "--root", str(tmp_path), "--split", "dirichlet", "--alpha", "5"]
    flags += ["--classes-per-client", "3", "--partition", "2/6", "--max-train", "50", "--data-seed", "9"]
    flags += ["--device", "cpu", "--size", "S", "--stay", "--disclose-class-shares"]
    flags += ["--model", "plain-4", "--disclose", "graph"]
    assert start(*flags) == 0
    _, _, config, stay = joined[0]
    spec = DataSpec("digits", tmp_path, False, "dirichlet", 3, 5.0, 2, 6, 50, 9)
    assert ClientSettings.from_node_config(config) == ClientSettings(
        "ward-7", spec, "cpu", "S", tmp_path / "state", True, "plain-4", "graph", server="127.0.0.1:9092"
    )
    assert stay


def test_threads_are_set(start: Callable[..., int]) -> None:
    before = torch.get_num_threads()
    try:
        assert start("--threads", "2") == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """Return the file of a client's key."""
    write_private_key(tmp_path / "key.pem", make_key())
    return tmp_path / "key.pem"


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    """Return the file of a server's CA."""
    return init(tmp_path / "certs", []).ca


def test_certificates_and_the_key_go_to_the_link(
    start: Callable[..., int], joined: Joined, ca: Path, key: Path
) -> None:
    assert start("--root-certificates", str(ca), "--key", str(key)) == 0
    link = joined[0][0]
    assert (link.address, link.insecure, link.root_certificates) == ("127.0.0.1:9092", False, ca)
    assert link.key is not None
    assert public_pem(link.key) == public_pem(read_private_key(key, "--key"))


def test_the_systems_certificates_do_without_a_flag(start: Callable[..., int], joined: Joined, key: Path) -> None:
    assert start("--key", str(key)) == 0
    assert (joined[0][0].root_certificates, joined[0][0].stock) == (None, False)
    assert start("--key", str(key), "--stock-superlink") == 0
    assert joined[1][0].stock and not joined[1][0].http


def test_flowers_superlink_over_http_signs_for_nobody_and_may_ask_for_no_key(
    start: Callable[..., int], joined: Joined, ca: Path, key: Path
) -> None:
    for flags in (["--key", str(key)], ["--root-certificates", str(ca)], ["--insecure"]):
        assert start("--http", *flags) == 0
    links = [link for link, *_ in joined]
    assert all(link.http and link.stock for link in links)
    assert [(link.key is None, link.insecure) for link in links] == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("flag", ["stock_superlink", "http"])
def test_what_was_enrolled_elsewhere_is_not_used_for_a_superlink_of_flower(tmp_path: Path, flag: str) -> None:
    """Its certificate is of another CA, perhaps a public one."""
    (tmp_path / "servers/a_9092").mkdir(parents=True)
    (tmp_path / "servers/a_9092/ca.pem").write_text("")
    flags = dict.fromkeys(("insecure", "key", "root_certificates", "token", "stock_superlink", "http"))
    flags |= {"server": "other:443", flag: True}
    assert enrolled(flags, "ward-7", tmp_path) == {**flags, "secret": ""}
    with pytest.raises(ConfigError, match=f"HYPERBLOOM_TOKEN: expected without --{flag.replace('_', '-')}"):
        enrolled({**flags, "token": "HB1"}, "ward-7", tmp_path)


def test_certificates_that_cannot_be_read_are_told(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read all."""

    def refuse(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("hyperbloom.client.flags.ssl.create_default_context", refuse)
    assert start("--root-certificates", str(ca)) == 2
    expected = f"--root-certificates: expected certificates (PEM) in {ca}, found Permission denied"
    assert capsys.readouterr().err == f"flower-client: {expected}\n"


def test_without_a_key_there_is_plain_text_only(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], joined: Joined, ca: Path, key: Path
) -> None:
    assert start("--root-certificates", str(ca)) == 2
    assert capsys.readouterr().err == (
        "flower-client: expected --token TOKEN, which the server prints (flower-server clients invite NAME), --key "
        "FILE, this client's private key (flower-client keygen --out FILE), or --insecure for plain text on this "
        "machine\n"
    )
    assert start("--insecure", "--key", str(key)) == 2
    assert "--key: expected without --insecure" in capsys.readouterr().err
    for alone in (["--insecure"], ["--key", str(key)], ["--root-certificates", str(ca)]):
        assert start(*alone, "--token", "HB1") == 2
        assert f"--token or HYPERBLOOM_TOKEN: expected without {alone[0]}" in capsys.readouterr().err
    assert start("--insecure", "--stock-superlink") == 2
    assert "--stock-superlink: expected without --insecure" in capsys.readouterr().err
    key.chmod(0o644)
    assert start("--key", str(key)) == 2
    assert f"everyone on this machine can use {key} (mode 0644)" in capsys.readouterr().err
    assert joined == []


@pytest.mark.parametrize("server", ["gpu-box:9092", "10.0.0.5:9092", "[2001:db8::1]:9092", "localhost.example:9092"])
def test_plain_text_over_a_network_must_be_said_twice(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], joined: Joined, server: str
) -> None:
    assert start("--insecure", "--server", server) == 2
    assert capsys.readouterr().err == (
        f"flower-client: --insecure: --server {server.rsplit(':', 1)[0]} is not loopback, and everyone on the network "
        "could read and forge what is sent; use certificates (docs/security.md), or say --insecure --insecure\n"
    )
    assert joined == []
    assert start("--insecure", "--insecure", "--server", server) == 0
    assert joined[0][0] == Link(server, insecure=True)


@pytest.mark.parametrize("server", ["localhost:1", "127.0.0.1:1", "127.8.8.8:1", "[::1]:1"])
def test_plain_text_on_loopback_may_be_said_once(start: Callable[..., int], joined: Joined, server: str) -> None:
    assert start("--insecure", "--server", server) == 0
    assert joined[0][0] == Link(server, insecure=True)


def test_a_client_that_runs_already_is_refused(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, joined: Joined
) -> None:
    with ClientState(tmp_path / "state").lock():
        assert start() == 3
    assert capsys.readouterr().err == (
        f"flower-client: process {os.getpid()} already runs as this client (state in {tmp_path / 'state'}); "
        "stop it, or choose another --client-id or --state-dir\n"
    )
    assert joined == []


# ---------------------------------------------------------------------- a model of one's own

NETS = """
from torch import nn


def make(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Bilinear(8, 8, 10)

    def forward(self, x):
        return self.body(x[:, 0, 0], x[:, 0, 1])


def odd(input_shape, num_classes):
    return Odd()


def broken(input_shape, num_classes):
    raise KeyError("width")
"""


def test_the_graph_of_an_own_model_is_shown_and_nothing_is_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], joined: Joined
) -> None:
    (tmp_path / "nets_to_show.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    assert main(["--model", "nets_to_show:make", "--data", "digits", "--show-graph"]) == 0
    shown = capsys.readouterr().out
    assert [" ".join(line.split()) for line in shown.splitlines()] == [
        "node type inputs parameters",
        "0 input",
        "1 linear 64,10 wb 0 1.weight (10x64), 1.bias (10)",
        "2 output 1",
        "3 nodes, 2 edges, 3 types, 650 parameters",
    ]
    assert joined == []


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("nope", "model: expected one of "),
        ("nets_refused:nope", "found AttributeError: module 'nets_refused' has no attribute 'nope'"),
        ("nets_refused:broken", "found that it fails with KeyError: 'width'"),
    ],
)
@pytest.mark.parametrize("show", [True, False])
def test_a_model_that_cannot_be_used_is_refused_in_one_line_before_anything_is_joined(
    start: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    joined: Joined,
    model: str,
    text: str,
    show: bool,
) -> None:
    (tmp_path / "nets_refused.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    assert start("--model", model, *(["--show-graph"] if show else [])) == 2
    told = capsys.readouterr().err
    assert told.startswith("flower-client: ") and text in told and told.count("\n") == 1
    assert joined == []


def test_a_model_without_a_graph_joins_with_a_warning(
    start: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    joined: Joined,
) -> None:
    (tmp_path / "nets_odd.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    assert start("--model", "nets_odd:odd", "--show-graph") == 2
    assert "body: cannot represent Bilinear with parameters weight, bias; " in capsys.readouterr().err
    assert joined == []
    assert start("--model", "nets_odd:odd") == 0
    told = capsys.readouterr().err
    what = "Bilinear with parameters weight, bias"
    assert told.endswith(
        f"strategies that read the own model's graph (ghn) cannot use it: body: cannot represent {what}\n"
    )
    client = client_for(ClientSettings.from_node_config(joined[0][2]))
    assert introduce(client, Greeting("0", "own")).types == ()
    with pytest.raises(HyperbloomError, match="the client's own model fails; the client's log says how"):
        introduce(client, Greeting("0", "types"))


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--show-graph", "--show-graph: expected with --model"),
        ("--model mlp", "Missing --server and --client-id"),
        ("--server a:1 --insecure", "Missing --client-id"),
        ("--client-id a --insecure", "Missing --server"),
        ("--server a:1 --client-id a --size XL", "Invalid value for '--size': 'XL' is not one of 'S', 'M', 'L'"),
        ("--server a:1 --client-id a --size SM", "Invalid value for '--size': 'SM' is not one of 'S', 'M', 'L'"),
        ("--server a:1 --client-id a --alpha x", "Invalid value for '--alpha': 'x' is not a valid float"),
        ("--server a:1 --client-id a --threads=0", "Invalid value for '--threads': 0 is not in the range x>=1"),
    ],
)
def test_flags_that_do_not_parse_are_one_line(flags: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    assert capsys.readouterr().err == f"flower-client: {text}; see flower-client --help\n"


@pytest.mark.parametrize("server", ["gpu-box", "gpu-box:http", ":9092", "gpu-box:99999"])
def test_an_address_without_a_port_is_told_before_anything_is_tried(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_private_key(tmp_path / "key.pem", make_key())
    words = f"--server {server} --key {tmp_path / 'key.pem'} --client-id a --data digits --state-dir {tmp_path / 'a'}"
    assert main(words.split()) == 2
    assert (
        f"--server: expected HOST:PORT, such as gpu-box:9092 or [::1]:9092; found '{server}'" in capsys.readouterr().err
    )


# ---------------------------------------------------------------------- how it ends


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RefusedError("the server refused this client: no"), 3, "the server refused this client: no"),
        (ConnectionFailed("cannot open a session"), 5, "cannot open a session"),
        (KeyboardInterrupt(), 0, "left the federation"),
    ],
)
def test_exit_codes(
    start: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    text: str,
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(runtime, "run_client", end)
    assert start() == code
    assert capsys.readouterr().err == f"flower-client: {text}\n"


# ---------------------------------------------------------------------- wrong flags

NAME = (
    "--client-id: expected 1 to 64 letters, digits, dots, hyphens and underscores, starting with a letter or digit; "
    "found '../x'"
)
PARTITION = "--partition: expected I/N with 0 <= I < N, such as 2/6; found "
NO_DATA = (
    f"data: expected one of {', '.join(DATASETS)}; a path to .npz, .csv, .tsv or .parquet; an "
    "existing folder of images by class; hf:NAME; or package.module:function; found 'nowhere'"
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition", "x"], PARTITION + "'x'"),
        (["--partition", "6/6"], PARTITION + "'6/6'"),
        (["--partition=-1/6"], PARTITION + "'-1/6'"),
        (["--partition", "2"], PARTITION + "'2'"),
        (["--partition", "2/"], PARTITION + "'2/'"),
        (["--partition", "0/0"], PARTITION + "'0/0'"),
        (["--partition", "1.0/2"], PARTITION + "'1.0/2'"),
        (["--data", "nowhere"], NO_DATA),
        (
            ["--split", "nothing", "--partition", "0/3"],
            f"split: expected one of {', '.join(PARTITIONERS)}, found 'nothing'",
        ),
        (["--max-train", "0"], "max_train: expected at least 1 or nothing at all, found 0"),
        (["--alpha", "nan"], "alpha: expected a number above 0, found nan"),
        (["--classes-per-client", "0"], "classes_per_client: expected at least 1, found 0"),
        (["--client-id", "../x"], NAME),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], joined: Joined, flags: list[str], message: str
) -> None:
    assert start(*flags) == 2
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == (f"flower-client: {message}\n", "")
    assert joined == []


@pytest.mark.parametrize("words", [["join", "--server", "a:1", "--insecure"], ["export", "--client-id", "a"]])
def test_missing_data_are_a_missing_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--out", "model"]) == 2
    assert f"flower-client {words[0]}: Missing option '--data'" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_told_in_one_line(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("--device", "gpu") == 2
    error = capsys.readouterr().err
    assert error.startswith("flower-client: --device: expected auto or a device of this machine, found 'gpu' (")
    assert error.count("\n") == 1


def test_missing_data_are_told_with_the_way_out(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert start("--data", "cifar10", "--root", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("flower-client: cifar10 not found; looked at ")
    assert f"Fetch them: flower-client download cifar10 --root {tmp_path}; or put the official files" in error
    assert error.count("\n") == 1
    assert start("--data", str(tmp_path / "own.npz")) == 2
    assert "expected an .npz file, found none of this name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ca.pem", ""])
def test_certificates_that_are_no_file_are_told(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], joined: Joined, tmp_path: Path, name: str
) -> None:
    assert start("--root-certificates", str(tmp_path / name)) == 2
    message = f"flower-client: --root-certificates: expected a file, found none at {tmp_path / name}\n"
    assert capsys.readouterr().err == message
    assert joined == []


@pytest.mark.parametrize("more", [[], ["--http"]])
def test_a_file_without_certificates_is_told(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], joined: Joined, tmp_path: Path, more: list[str]
) -> None:
    """A client with it would only say that the server does not answer, and try for ever."""
    (tmp_path / "ca.pem").write_text("no certificate")
    assert start("--root-certificates", str(tmp_path / "ca.pem"), *more) == 2
    found = f"expected certificates (PEM) in {tmp_path / 'ca.pem'}, found none"
    assert capsys.readouterr().err == f"flower-client: --root-certificates: {found}\n"
    assert joined == []


def test_a_state_folder_that_cannot_be_made_is_told(
    start: Callable[..., int], capsys: pytest.CaptureFixture[str], joined: Joined, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert start("--state-dir", str(tmp_path / "file")) == 2
    assert "'--state-dir': Dir '" in capsys.readouterr().err
    path = tmp_path / "file" / "deeper"
    assert start("--state-dir", str(path)) == 2
    assert capsys.readouterr().err == f"flower-client: --state-dir: cannot use {path}: Not a directory\n"
    assert joined == []


# ---------------------------------------------------------------------- help


def test_help_shows_how_to_join_and_what_leaves_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "flower-client --server 127.0.0.1:9092 --insecure --client-id client-2 --data digits --partition 2/6" in text
    assert "--data our.data:load" in text
    assert "Examples, labels and a personal classifier never do." in text
    for sent in ("version of this program", "losses", "descriptors", "moments", "docs/privacy.md"):
        assert sent in text
    assert "--parent-pid" not in text


def test_the_examples_in_the_help_parse() -> None:
    lines = [line.split() for line in str(flower_client.epilog).splitlines() if "  flower-client --" in line]
    assert len(lines) == 7
    found = [parse(flower_client, words[1:]).params for words in lines]
    assert [given["data"] for given in found[:5]] == ["digits", "scans.npz", "./scans", "patients.csv", "our.data:load"]
    assert [given["server"] for given in found[:6]] == ["127.0.0.1:9092", *["gpu:9092"] * 5]
    assert [given["insecure"] for given in found[:6]] == [1, 0, 0, 0, 0, 0]
    assert [given["token"] for given in found[:6]] == [None, "HB1...", None, None, None, None]
    assert [given["model"] for given in found[4:]] == [None, "our.nets:make", "our.nets:make"]
    assert [given["show_graph"] for given in found[4:]] == [False, False, True]


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyperbloom {__version__}\n"


def test_the_module_is_the_command_and_a_wrong_flag_costs_no_import_of_torch() -> None:
    code = (
        "import atexit, runpy, sys; sys.argv = ['flower-client', '--server']\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'flwr' in sys.modules))\n"
        "runpy.run_module('hyperbloom.client', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "False False\n")
    assert done.stderr == "flower-client: Option '--server' requires an argument; see flower-client --help\n"


def test_download_fetches_what_is_missing_or_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision: ModuleType
) -> None:
    def fetch(dataset: str, root: Path) -> None:
        fetched.append((dataset, root))
        raise DataError("the publisher does not answer")

    fetched: list[tuple[str, Path]] = []
    monkeypatch.setattr(published, "download", fetch)
    assert main(["download", "fashion-mnist", "--root", str(tmp_path)]) == 2
    assert fetched == [("FashionMNIST", tmp_path)]
    assert capsys.readouterr().err == "flower-client download: the publisher does not answer\n"
    assert main(["download", "mnits"]) == 2
    assert "expected one of" in capsys.readouterr().err
    assert main(["download", "digits"]) == 0
    assert capsys.readouterr().out.startswith("digits can be read: ")


def test_control_characters_of_a_server_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("hyperbloom")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    log_to("ward-7", verbose=False)
    logging.getLogger("hyperbloom.client").info("the server says: %s", "\x1b[2J\r bye")
    assert capsys.readouterr().err.endswith(" ward-7 the server says:  [2J  bye\n")
