"""What a client loads, once for each of its settings."""

import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.work import evaluation, introduction, methods
from hyperbloom.client.work.client import LOADED_CLIENTS, MOST_SCHEMAS, Client, client_for
from hyperbloom.client.work.introduction import introduce
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import DataError, HyperbloomError, RefusedError
from hyperbloom.common.wire.orders import Greeting

from ..conftest import SHARE
from ..orders import Worker, answer, evaluate_order, train_order

MakeWorker = Callable[..., Worker]


def test_data_that_cannot_be_loaded_are_told_before_anything_else(make_worker: MakeWorker) -> None:
    with pytest.raises(DataError, match="found 'nowhere'"):
        make_worker(data=DataSpec("nowhere"))


def test_a_process_loads_the_data_of_the_same_settings_once() -> None:
    settings = ClientSettings("a", SHARE, "cpu")
    worker = client_for(settings)
    assert client_for(ClientSettings("a", SHARE, "cpu")) is worker
    assert client_for(ClientSettings("b", SHARE, "cpu")) is not worker


def test_a_process_keeps_a_limited_number_of_clients_loaded(make_worker: MakeWorker) -> None:
    first = ClientSettings("client-0", SHARE, "cpu", state_dir=make_worker("client-0").state.folder)
    loaded = [client_for(first)]
    answer(loaded[0], train_order("head"))
    for index in range(LOADED_CLIENTS):
        client_for(ClientSettings(f"other-{index}", SHARE, "cpu"))
    loaded.append(client_for(first))
    assert loaded[0] is not loaded[1]
    assert answer(loaded[1], evaluate_order("head")) == answer(loaded[0], evaluate_order("head"))


CPU = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried 48 GB")
MPS = RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB)")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), CPU, MPS])
def test_out_of_memory_is_told_and_the_client_lives_on(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    worker = make_worker()
    twin = Worker(dataclasses.replace(worker.settings, state_dir=worker.state.folder.with_name("twin")))
    expected = twin.answer(train_order("head"))

    def starved(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(methods, "train", starved)
        patch.setattr(evaluation, "evaluate", starved)
        with pytest.raises(HyperbloomError, match=r"memory is not enough; lower local\.batch_size"):
            worker.answer(train_order("head"))
        with pytest.raises(HyperbloomError, match="memory is not enough"):
            worker.answer(evaluate_order("head"))
    result = worker.answer(train_order("head"))
    assert result.loss == expected.loss and result.weights is not None and expected.weights is not None
    assert torch.equal(result.weights.values, expected.weights.values)


def test_with_little_memory_examples_lie_on_the_disk_and_the_result_is_the_same(make_worker: MakeWorker) -> None:
    usual = make_worker("usual")
    little = Worker(dataclasses.replace(usual.settings, state_dir=usual.state.folder / "little", low_memory=True))
    before, after = usual.train_data, little.train_data
    assert torch.equal(before.inputs, after.inputs)
    layouts = [each.inputs.is_contiguous(memory_format=torch.channels_last) for each in (before, after)]
    assert layouts[0] == layouts[1]
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert sum(str(little.state.folder) in line and "(deleted)" in line for line in maps) == 3  # train, val, test
    order = train_order("none")
    one, other = (worker.answer(order).weights for worker in (usual, little))
    assert torch.equal(one.values, other.values)


FULL = """
import sys
from pathlib import Path
import torch
from hyperbloom.common.data import Examples
try:
    Examples(torch.rand(1000, 100), torch.zeros(1000, dtype=torch.int64)).on_disk(Path(sys.argv[1]))
except OSError as error:
    print(error.strerror)
"""


def test_with_little_memory_a_full_disk_is_told(tmp_path: Path) -> None:
    """To write to a map of a sparse file would end the process with a bus error."""
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    small = f"mount -t tmpfs -o size=200k none {tmp_path}"
    if subprocess.run([*alone, small], capture_output=True).returncode:
        pytest.skip("this machine allows no file system of one's own")
    done = subprocess.run(
        [*alone, f'{small} && exec "$0" -c "$1" {tmp_path}', sys.executable, FULL], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr


SCHEMA = """{"label": ["ill"], "classes": ["no", "yes"], "columns": [{"name": "age", "kind": "number", "std": 2.0}]}"""


def table(folder: Path, cell: str = "1") -> str:
    """Write a table of 40 rows and two columns of inputs, of which the schema knows one."""
    rows = [f"{age / 3},{age * 7 % 5},{'yes' if age % 2 else 'no'}" for age in range(39)]
    (folder / "t.csv").write_text("\n".join(["age,dose,ill", *rows, f"{cell},1,no"]))
    return str(folder / "t.csv")


def test_a_table_is_read_by_the_servers_schema_now_and_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = ClientSettings("a", DataSpec(table(tmp_path), label="ill"), "cpu", state_dir=tmp_path / "a")
    worker = Client(settings)
    assert worker.input_shape == (8,)
    told = introduce(worker, Greeting("1", schema=SCHEMA))
    assert (told.input_shape, json.loads(told.schema or "")["columns"][0]["std"]) == ((2,), 2.0)
    assert "by the schema, reads ['" in caplog.messages[-1]
    assert Client(settings).input_shape == worker.train_data.inputs.shape[1:] == (2,)
    again = introduce(Client(settings), Greeting("1"))
    assert again == told


@pytest.mark.parametrize(
    ("cell", "label", "schema", "message"),
    [
        ("secret-cell", "ill", SCHEMA, "row 41, column 'age': expected a number, .*, found 'secret-cell'"),
        ("1", "dose", SCHEMA, "--label: expected ill as in .*, found dose"),
        ("1", "ill", "{}", "the server's schema"),
    ],
)
def test_a_table_that_does_not_fit_stays_as_it_was_and_the_server_learns_nothing_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cell: str, label: str, schema: str, message: str
) -> None:
    settings = ClientSettings("a", DataSpec(table(tmp_path, cell), label=label), "cpu", state_dir=tmp_path / "a")
    worker = Client(settings)
    before = worker.input_shape
    with pytest.raises(
        RefusedError, match=r"^the table does not fit the server's schema; the client's log says where$"
    ):
        introduce(worker, Greeting("1", schema=schema))
    assert re.search(message, caplog.text)
    assert (worker.input_shape, Client(settings).input_shape) == (before, before)


def test_a_schema_is_of_the_server_that_handed_it_out(tmp_path: Path) -> None:
    settings = ClientSettings(
        "a", DataSpec(table(tmp_path), label="ill"), "cpu", state_dir=tmp_path / "a", server="one:9092"
    )
    introduce(Client(settings), Greeting("1", schema=SCHEMA))
    assert introduce(Client(settings), Greeting("1")).schema is not None
    with pytest.raises(RefusedError, match="the server has no schema"):
        introduce(Client(replace(settings, server="another:9092")), Greeting("1"))


def test_a_schema_that_no_longer_fits_the_table_does_not_keep_the_client_from_asking_anew(tmp_path: Path) -> None:
    data = DataSpec(table(tmp_path), label="ill")
    settings = ClientSettings("a", data, "cpu", state_dir=tmp_path / "a")
    introduce(Client(settings), Greeting("1", schema=SCHEMA))
    table(tmp_path, "a word where all were numbers")
    with pytest.raises(RefusedError):
        introduce(Client(settings), Greeting("1", schema=SCHEMA))
    corrected = SCHEMA.replace('"number"', '"number", "missing": ["a word where all were numbers"]')
    assert introduce(Client(settings), Greeting("1", schema=corrected)).schema is not None


def test_the_site_whose_table_the_schema_is_proposed_from_joins_as_well(tmp_path: Path) -> None:
    settings = ClientSettings("a", DataSpec(table(tmp_path), label="ill"), "cpu", state_dir=tmp_path / "a")
    worker = Client(settings)
    assert worker.schema is not None
    told = introduce(worker, Greeting("1", schema=worker.schema.text))
    assert told.schema == worker.schema.text and settings.schema_file.exists()


def test_a_schema_of_the_users_own_must_be_the_servers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "own.json").write_text(SCHEMA)
    spec = DataSpec(table(tmp_path), schema=tmp_path / "own.json")
    worker = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / "a"))
    introduce(worker, Greeting("1", schema=SCHEMA.replace(" ", "")))
    with pytest.raises(RefusedError):
        introduce(worker, Greeting("1", schema=SCHEMA.replace("2.0", "3.0")))
    assert "--schema: not the server's: expected the column" in caplog.text


def test_moments_are_told_with_the_same_noise_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 400 times
    wide = SCHEMA.replace(', "std": 2.0', "")
    (tmp_path / "own.json").write_text(wide)
    spec = DataSpec(table(tmp_path), schema=tmp_path / "own.json")

    def told(name: str, **more: Any) -> tuple[float, ...]:
        settings = ClientSettings("a", spec, "cpu", state_dir=tmp_path / name, **more)
        return introduce(Client(settings), Greeting("1")).moments

    ages = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / "a")).train_data.inputs[:, 0].double()
    exact = (len(ages), float(ages.mean()), float(ages.std(correction=0)))
    assert told("a") == () and told("a", disclose_moments=True) == pytest.approx(exact)
    noisy = {"disclose_moments": True, "moments_noise": 0.5}
    first, errors = told("b", **noisy), []
    assert told("b", **noisy) == first != told("c", **noisy)
    assert told("b", disclose_moments=True, moments_noise=0.25) not in (first, pytest.approx(exact)), "less noise"
    again = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / "d", **noisy))
    for _ in range(400):
        count, mean, deviation = introduce(again, Greeting("1")).moments
        (again.settings.folder / "moments.json").unlink()  # so that the next ones are drawn anew
        errors.append([(mean - exact[1]) / exact[2], np.log(deviation / exact[2]), count / exact[0] - 1])
    found = np.sqrt(np.square(errors).mean(0))
    # A count above that of the examples, half of all, is cut to it.
    expected = 0.5 / np.sqrt([len(ages), 2 * len(ages), 2 * len(ages)])
    np.testing.assert_allclose(found, expected, rtol=0.4)  # of 400 draws, so seven times their error
    assert stat.S_IMODE((tmp_path / "b" / "moments.json").stat().st_mode) == 0o600
    for place in range(10):  # however much noise, it is a count of examples, or the server refuses the client
        assert 1 <= told(f"e{place}", disclose_moments=True, moments_noise=50.0)[0] <= len(ages)


def test_noise_moves_moments_by_the_standard_errors_that_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Z = 1/2: the mean by Z s / sqrt(n), the logarithm of the deviation by Z / sqrt(2 n), n by Z sqrt(n)."""
    (tmp_path / "own.json").write_text(SCHEMA.replace(', "std": 2.0', ""))
    spec = DataSpec(table(tmp_path), schema=tmp_path / "own.json")
    told = []
    for place, drawn in enumerate(([0.0, 0.0, 0.0], [1.0, -2.0, -0.5])):
        monkeypatch.setattr(introduction, "noise", lambda count, drawn=drawn: np.array(drawn[:count]))
        more: dict[str, Any] = {"disclose_moments": True, "moments_noise": 0.5}
        client = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / str(place), **more))
        told.append(introduce(client, Greeting("1")).moments)
    (count, mean, deviation), moved = told
    expected = count - 0.25 * count**0.5, mean + 0.5 * deviation / count**0.5, deviation / np.exp((2 * count) ** -0.5)
    assert moved == pytest.approx(expected)


@pytest.mark.parametrize("damaged", ["{", "3", "[]"])
def test_noise_that_is_lost_is_not_drawn_anew(tmp_path: Path, damaged: str) -> None:
    """Else the same numbers would be told twice."""
    spec = DataSpec(table(tmp_path), label="ill")
    worker = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / "a", disclose_moments=True, moments_noise=1))
    path, greeting = tmp_path / "a" / "moments.json", Greeting("1", schema=SCHEMA.replace(', "std": 2.0', ""))
    first = introduce(worker, greeting).moments
    whole = path.read_bytes()
    path.write_text(damaged)
    with pytest.raises(
        HyperbloomError,
        match=r"^moments\.json in the client's state folder cannot be used \(it is damaged\); restore it",
    ):
        introduce(worker, greeting)
    path.write_bytes(whole)
    assert introduce(worker, greeting).moments == first


def test_a_schema_without_scales_takes_those_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(SCHEMA.replace(', "std": 2.0', ""))
    settings = ClientSettings(
        "a", DataSpec(table(tmp_path), schema=tmp_path / "own.json"), "cpu", state_dir=tmp_path / "a"
    )
    worker = Client(settings)
    plain = worker.train_data.inputs.clone()
    introduce(worker, Greeting("1", schema=SCHEMA))
    torch.testing.assert_close(worker.train_data.inputs[:, 0], plain[:, 0] / 2)
    torch.testing.assert_close(Client(settings).train_data.inputs[:, 0], plain[:, 0] / 2)  # after a restart
    introduce(worker, Greeting("1"))  # another run, in which nobody says how
    torch.testing.assert_close(worker.train_data.inputs, plain)


def test_a_server_may_not_go_through_schemas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From how many values each leaves, and which fit, it would learn the values."""
    settings = ClientSettings("a", DataSpec(table(tmp_path), label="ill"), "cpu", state_dir=tmp_path / "a")
    plain = SCHEMA.replace(', "std": 2.0', "")
    for first in (plain.replace("ill", "dead"), plain):  # it does not fit, or does
        worker = Client(settings)
        for schema in (first, first.replace('"number"', '"number", "missing": ["1"]')):
            with suppress(RefusedError):
                introduce(worker, Greeting("1", schema=schema))
        assert "the server has handed out another schema before: expected the column" in caplog.text
        caplog.clear()
    introduce(worker, Greeting("1", schema=first.replace('"number"', '"number", "mean": 3.0, "std": 2.0')))
    assert "another schema" not in caplog.text, "scales that all clients have told are no other schema"


def test_nor_may_a_server_that_makes_the_client_start_again_and_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ClientSettings("a", DataSpec(table(tmp_path), label="ill"), "cpu", state_dir=tmp_path / "a")
    schemas = [SCHEMA.replace('"number"', f'"number", "missing": ["{each}"]') for each in range(MOST_SCHEMAS + 1)]
    for _ in range(2):  # the same ones again are no others
        for schema in schemas[:-1]:
            with suppress(RefusedError):
                introduce(Client(settings), Greeting("1", schema=schema))
    assert f"handed out {MOST_SCHEMAS} schemas" not in caplog.text
    with pytest.raises(RefusedError):
        introduce(Client(settings), Greeting("1", schema=schemas[-1]))
    assert f"servers have handed out {MOST_SCHEMAS} schemas; delete {tmp_path}" in caplog.text


def test_other_scales_of_one_schema_do_not_count(tmp_path: Path) -> None:
    """A federation that trains again on grown data has others each time."""
    settings = ClientSettings("a", DataSpec(table(tmp_path), label="ill"), "cpu", state_dir=tmp_path / "a")
    plain = SCHEMA.replace(', "std": 2.0', "")
    for each in range(MOST_SCHEMAS + 2):
        scaled = plain.replace('"number"', f'"number", "mean": {each}.0, "std": 2.0')
        introduce(Client(settings), Greeting("1", schema=scaled))
    assert len((tmp_path / "a/schemas.txt").read_text().split()) == 1


def test_moments_count_as_changes_and_few_values_have_none(tmp_path: Path) -> None:
    wide = SCHEMA.replace(', "std": 2.0', "")
    few = wide.replace('"number"', f'"number", "missing": {json.dumps([str(age / 3) for age in range(5, 39)])}')

    def told(schema: str, name: str) -> tuple[float, ...]:
        spec, more = DataSpec(table(tmp_path), label="ill"), {"max_changes": 1, "disclose_moments": True}
        worker = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / name, **more))  # type: ignore[arg-type]
        return introduce(worker, Greeting("1", schema=schema)).moments

    assert told(few, "a") == (0.0, 0.0, 0.0)
    assert told(wide, "a") == told(wide, "a") != told(few, "a")
    assert json.loads((tmp_path / "a" / "releases.json").read_text())["changes"] == 1
    with pytest.raises(HyperbloomError, match="its user allows 1"):
        told(wide.replace('"number"', '"number", "missing": ["1"]'), "a")


@pytest.mark.parametrize(
    ("more", "tells"),
    [
        ({}, False),
        ({"disclose_moments": True}, True),
        ({"disclose_moments": True, "moments_noise": 1.0}, False),
        ({"min_noise": 8.0, "disclose_class_shares": True}, False),
    ],
)
def test_a_schema_that_is_proposed_from_a_table_does_not_leave_it(
    tmp_path: Path, more: dict[str, Any], tells: bool
) -> None:
    spec = DataSpec(table(tmp_path), label="ill")
    worker = Client(ClientSettings("a", spec, "cpu", state_dir=tmp_path / "a", **more))
    if tells:
        assert "mean" in (introduce(worker, Greeting("1")).schema or "")
    else:
        with pytest.raises(RefusedError, match=r"^the server has no schema, and one that is proposed from this table"):
            introduce(worker, Greeting("1"))
    assert introduce(worker, Greeting("1", schema=SCHEMA)).schema is not None
