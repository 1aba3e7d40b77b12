"""The papers' tables: every file is sound, every column is a run, every number is a percentage and the paper's."""

from contextlib import suppress
from pathlib import Path
from statistics import fmean

import pytest

from figures import paper_tables
from figures.paper_tables import Figure, PaperTable, load_table, table_names
from figures.per_fedavg import PerFedAvgOptions
from figures.pfedme import PFedMeOptions
from hyperbloom.common.config import check
from hyperbloom.common.errors import ConfigError, DataError
from hyperbloom.server.loop.session import check_run

TABLES = {name: load_table(name) for name in table_names()}
NUMBERS = [
    (name, method, column)
    for name, table in TABLES.items()
    for method, row in table.methods.items()
    for column in row.numbers
]


def test_the_papers_tables_are_there() -> None:
    assert list(TABLES) == [
        *(f"fedhenn-table{number}" for number in (1, 2, 3)),
        *(f"hafl-table{number}" for number in (1, 2, 3, 5, 6, 7)),
        "hyperfl",
        *(f"odpfl-table{number}" for number in (1, 2)),
        "pfedhn-c5",
        *(f"pfedhn-table{number}" for number in (1, 2, 3, 4)),
    ]


@pytest.mark.parametrize("name", TABLES)
def test_every_number_is_a_percentage_and_its_run_is_valid(name: str) -> None:
    table = TABLES[name]
    for method, column in ((method, column) for of, method, column in NUMBERS if of == name):
        figures = table.methods[method].figures(column)
        assert figures, (method, column)
        for figure in figures.values():
            assert 0 <= figure.mean <= 100
            assert 0 <= (figure.deviation or 0) < 10
        if not table.columns[column].cannot and table.methods[method].there:
            with suppress(DataError):  # a public set that is not on this machine
                check_run(table.config(method, column), uses_data_section=True)


@pytest.mark.parametrize("name", TABLES)
def test_every_column_has_numbers_and_says_why_if_it_cannot_be_run(name: str) -> None:
    table = TABLES[name]
    assert table.url.startswith("https://arxiv.org/abs/2")
    for method, row in table.methods.items():
        assert row.there or row.why_not, method
        for key in row.numbers:
            assert set(row.figures(key)) <= {"", *table.columns[key].parts}, (method, key)
            assert table.columns[key].first or not row.after_first, (method, key)
        for each in row.why:
            key, _, part = each.partition(", ")
            assert part in row.figures(key) or (not part and key in row.numbers), (method, each)
    for key, column in table.columns.items():
        rows = [method for method in table.methods if key in table.methods[method].numbers]
        assert rows, key
        assert column.title
        for part in column.parts:
            assert any(part in table.methods[method].figures(key) for method in rows), part


@pytest.mark.parametrize(
    ("name", "method", "column", "part", "figure"),
    [
        ("pfedhn-c5", "pFedHN with fixed descriptors", "cifar10-50", "", Figure(83.92, 0.36)),
        ("pfedhn-table1", "pFedHN", "cifar10-50", "", Figure(88.38, 0.29)),
        ("pfedhn-table1", "pFedHN-PC", "omniglot-50", "", Figure(81.89, 0.15)),
        ("pfedhn-table1", "LG-FedAvg", "cifar100-100", "", Figure(49.99, 3.13)),
        ("pfedhn-table2", "pFedHN", "cifar100", "L", Figure(50.66, 2.70)),
        ("pfedhn-table2", "LG-FedAvg S", "cifar10", "", Figure(73.93, 3.65)),
        ("pfedhn-table3", "pFedMe", "mnist-50", "", Figure(99.30, 0.13)),
        ("pfedhn-table4", "pFedHN with spectral normalisation", "cifar10-100", "", Figure(85.30, 1.81)),
        ("odpfl-table1", "ODPFL-HN", "cifar10-pathological", "", Figure(59.5, 3.5)),
        ("odpfl-table1", "PFL-nearest", "cifar100-10", "", Figure(32.1, 0.2)),
        ("odpfl-table2", "ODPFL-HN", "yahoo-answers", "", Figure(35.8, 0.2)),
        ("hafl-table1", "HAFL-GHN", "cifar10-6", "avg", Figure(84.6)),
        ("hafl-table1", "HAFL-distillation", "cifar100-12", "arch-1", Figure(33.2)),
        ("hafl-table2", "HAFL-GHN", "xray1000-25", "avg", Figure(71.5)),
        ("hafl-table3", "HAFL-GHN", "cifar10-25", "layers-13", Figure(74.4)),
        ("hafl-table5", "Local", "alpha-0.1", "client-3-bal", Figure(54.1)),
        ("hafl-table6", "GHN init", "arch-4", "", Figure(85.6)),
        ("hafl-table7", "HAFL-GHN", "arch-1", "arch-1", Figure(77.5)),
        ("fedhenn-table1", "FedHeNN with RBF CKA", "tweets-100", "", Figure(72.8)),
        ("fedhenn-table2", "FedProx", "cifar10-500-2", "", Figure(50.46, 1.4)),
        ("fedhenn-table3", "FedHeNN heterogeneous", "cifar100-100-20", "", Figure(43.36, 0.2)),
    ],
)
def test_numbers_are_the_papers(name: str, method: str, column: str, part: str, figure: Figure) -> None:
    assert TABLES[name].methods[method].figures(column)[part] == figure


def test_a_method_whose_name_has_a_comma_is_refused_as_it_could_not_be_asked_for() -> None:
    values = TABLES["pfedhn-c5"].model_dump(mode="json")
    values["methods"]["pFedHN, fixed"] = values["methods"]["pFedHN"]
    with pytest.raises(ConfigError, match=r"methods.*pFedHN, fixed"):
        check(PaperTable, values, "pfedhn-c5.yaml")


def test_a_reason_is_of_a_part_or_of_a_whole_column() -> None:
    row = TABLES["pfedhn-table2"].methods["pFedHN"].model_copy(update={"why": {"cifar10, L": "a", "cifar100": "b"}})
    assert [row.reason("cifar10", part) for part in "SL"] == ["", "a"]
    assert [row.reason("cifar100", part) for part in "SL"] == ["b", "b"]


def test_averages_are_those_of_their_parts() -> None:
    compared = 0
    for name, method, column in NUMBERS:
        figures = TABLES[name].methods[method].figures(column)
        parts = [figure.mean for part, figure in figures.items() if part != "avg"]
        if "avg" in figures and parts:
            # The papers' averages are of numbers with more digits than they print.
            assert figures["avg"].mean == pytest.approx(fmean(parts), abs=0.11), (name, method, column)
            compared += 1
    assert compared == 5 * 6 + 4 * 3


@pytest.mark.parametrize("column", TABLES["pfedhn-table1"].columns)
def test_pfedhns_budget_is_5000_client_steps_and_2000_sgd_steps_alone(column: str) -> None:
    table = TABLES["pfedhn-table1"]
    for method in table.methods:
        if method != "Local" and table.methods[method].there:
            config = table.config(method, column)
            assert config.rounds * config.cohort == 5000
            assert config.local.steps == (60 if method == "pFedMe" else 50)
    local = table.config("Local", column)
    assert local.cohort == local.clients
    assert local.rounds * local.local.steps == 2000


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_said_of_the_defaults_is_so(number: int) -> None:
    said = " ".join(TABLES[f"pfedhn-table{number}"].differs)
    assert f"for pFedMe lamda {PFedMeOptions().lamda:g} (" in said
    assert f"for Per-FedAvg alpha {PerFedAvgOptions().alpha:g} (" in said


@pytest.mark.parametrize("number", [1, 2, 3])
def test_fedhenn_runs_with_the_settings_of_the_authors_code(number: int) -> None:
    table = TABLES[f"fedhenn-table{number}"]
    said = " ".join(table.differs)
    assert "batch 10, rate 0.01, momentum 0.5" in said and "eta = 0.01 sqrt(round), 1,000 rows" in said
    for method, row in table.methods.items():
        config = table.config(method, "cifar10-100-2")
        local = config.local
        assert (local.batch_size, local.learning_rate, local.momentum, local.weight_decay) == (10, 0.01, 0.5, 1e-4)
        assert local.steps * local.batch_size == 20 * 400  # 20 epochs
        if "rad" in config.options and not row.control:
            assert [config.options[key] for key in ("eta", "growth", "rows")] == [0.01, "sqrt", 1000]


def test_fedhenns_controls_differ_from_it_in_eta_alone() -> None:
    table = TABLES["fedhenn-table3"]
    assert [name for name, row in table.methods.items() if row.control and not row.numbers] == [
        "homogeneous control (eta 0)",
        "heterogeneous control (local)",
    ]
    for column in table.columns:
        own, control = (table.config(name, column) for name in ("FedHeNN homogeneous", "homogeneous control (eta 0)"))
        assert control.options == {"rad": own.options["rad"], "eta": 0}
        assert control.model_copy(update={"options": own.options}) == own
        own, control = (
            table.config(name, column) for name in ("FedHeNN heterogeneous", "heterogeneous control (local)")
        )
        assert control.model_copy(update={"options": own.options, "strategy": own.strategy}) == own


def test_half_of_lg_fedavgs_steps_are_fedavgs_and_its_note_is_everywhere_the_same() -> None:
    rows = [row for name in ("pfedhn-table1", "pfedhn-table2") for row in TABLES[name].methods.values()]
    own = [row for row in rows if row.strategy == "lg-fedavg"]
    assert len(own) == 4 and len({row.note for row in own}) == 1
    assert "the first half of all steps is FedAvg's" in own[0].note
    assert not any("fedavg_rounds" in row.run.get("options", {}) for row in own)
    assert all(row.run["rounds"] * row.run["cohort"] == 5000 for row in own)


def test_rounds_are_capped_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TABLES["pfedhn-table1"]
    runs = [table.config(method, "cifar10-50", {}, 60) for method in ("pFedHN", "Local")]
    assert [(config.rounds, config.eval_every) for config in runs] == [(60, 60), (40, 5)]


def test_overrides_win_and_everyone_follows_the_clients() -> None:
    config = TABLES["pfedhn-table1"].config("Local", "cifar10-50", {"clients": 7, "local.steps": 3, "data.root": "x"})
    assert (config.clients, config.cohort, config.local.steps, config.data.root) == (7, 7, 3, "x")
    assert (config.data.name, config.data.classes_per_client) == ("cifar10", 2)


# ---------------------------------------------------------------------- files that are wrong


SOUND = """
paper: A, B
url: https://arxiv.org/abs/2
table: table 9
title: t
columns: {c: {title: a column, parts: {p: [0, 2]}}}
methods: {M: {strategy: local, numbers: {c: 50}}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("c: 50", "c: 101", "methods.M.numbers.c.*expected less than or equal to 100"),
        ("title: t", "titel: t", "titel: unknown key|title: field required"),
    ],
)
def test_a_wrong_file_is_named(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper_tables, "_folder", lambda: tmp_path)
    (tmp_path / "mine.yaml").write_text(SOUND)
    assert isinstance(load_table("mine"), PaperTable)
    (tmp_path / "mine.yaml").write_text(SOUND.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_table("mine")


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected one of fedhenn-table1, .*; found 'no'"):
        load_table("no")
