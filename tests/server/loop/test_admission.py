"""Who may join: what a client says of itself is checked, the first one decides, and rows are handed over in order."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hyperbloom.common.config import RunConfig
from hyperbloom.common.data.schema import read_schema
from hyperbloom.common.errors import ConfigError, ModelError, RefusedError
from hyperbloom.common.layout import Weights
from hyperbloom.common.wire.orders import Introduction
from hyperbloom.server.loop import admission
from hyperbloom.server.loop.admission import Admission, Ration, check_introduction
from hyperbloom.server.loop.roster import Roster
from hyperbloom.server.loop.session import check_run
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.algorithm import Algorithm, Setting
from hyperbloom.strategies.exchange import Client, Update
from tests.strategies.conftest import introduction


def config(**changes: Any) -> RunConfig:
    values: dict[str, Any] = {"clients": 3, "sizes": ("S", "M"), "options": {"hidden_dim": 8}}
    return RunConfig(**(values | changes))


SCHEMA = """{"label": ["ill"], "columns": [{"name": "age", "kind": "number"}, {"name": "dose", "kind": "number"}]}"""

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input_shape": (5,)}, r"expected inputs of shape \(4,\) as in this federation, found \(5,\)"),
    ({"num_classes": 4}, "expected 3 classes as in this federation, found 4"),
    ({"size": "L"}, "expected --size to be one of S, M, found L"),
    ({"val_examples": 0}, "found an empty set"),
    ({"train_examples": 0}, "found an empty set"),
    ({"test_examples": -1}, "found an empty set"),
    ({"client_id": "../../home/op/x"}, "--client-id: expected 1 to 64 letters"),
    ({"client_id": ""}, "--client-id: expected 1 to 64 letters"),
    ({"client_id": "x" * 65}, "--client-id: expected 1 to 64 letters"),
    ({"client_id": "a\nb"}, "--client-id: expected 1 to 64 letters"),
    ({"version": "1" * 101}, "expected less to be said of its version and model"),
    ({"types": ("x" * 2**21, "y" * 2**21)}, "expected less to be said of its version and model"),
    ({"graph": "x" * 2**22}, "expected less to be said of its version and model"),
    ({"backbone": "x" * 2**22}, "expected less to be said of its version and model"),
    ({"backbone": "0" * 16}, "expected no --backbone as in this federation"),
    ({"class_shares": (1e30, -1e30, 1.0)}, "expected a share from 0 to 1 for each class"),
    ({"class_shares": (0.5, 0.5)}, "expected a share from 0 to 1 for each class"),
    ({"class_shares": (0.5, 0.5, 0.5)}, "expected a share from 0 to 1 for each class"),
    ({"mean": (0.5,) * 6000, "std": (1.0,) * 6000}, "expected at most 10000 numbers about its data, found 12001"),
    ({"divisor": 0.0}, "expected a divisor, and a mean"),
    ({"divisor": float("nan")}, "expected a divisor, and a mean"),
    ({"mean": (0.5,)}, "expected a divisor, and a mean"),
    ({"mean": (0.5,), "std": (0.0,)}, "expected a divisor, and a mean"),
    ({"mean": (0.5,) * 2, "std": (1.0,) * 2}, "expected a divisor, and a mean"),
    ({"mean": (0.5,) * 4}, "expected a divisor, and a mean"),
    ({"mean": (0.5,) * 4, "std": (1.0, 1.0, 1.0, 0.0)}, "expected a divisor, and a mean"),
    ({"mean": (0.5,) * 4, "std": (1.0, 1.0, 1.0, float("inf"))}, "expected a divisor, and a mean"),
    ({"mean": (0.5, 0.5, 0.5, float("nan")), "std": (1.0,) * 4}, "expected a divisor, and a mean"),
    ({"schema": "[]"}, "its schema: Input should be an object"),
    ({"schema": "x" * 200_000}, "its schema: expected a schema of at most"),
    ({"schema": SCHEMA.replace("age", "x" * 300).replace("number", "date")}, "columns.0.kind: expected"),
    ({"schema": SCHEMA.replace("]}", ', {"name": "bmi", "kind": "number"}]}')}, "expected the 6 inputs of its schema"),
    ({"schema": SCHEMA, "moments": (30.0, 1.0, 1.0)}, "expected count, mean and deviation of each target and open"),
    ({"schema": SCHEMA, "moments": (30.0, 1.0, 1.0) * 3}, "expected count, mean and deviation of each target and open"),
    ({"schema": SCHEMA, "moments": (1e6, 1.0, 1.0) * 2}, "expected count, mean and deviation of each target and open"),
    ({"schema": SCHEMA, "moments": (9.0, 1.0, -1.0) * 2}, "expected count, mean and deviation of each target and open"),
    (
        {"schema": SCHEMA, "moments": (9.0, 1e300, 1.0) * 2},
        "expected count, mean and deviation of each target and open",
    ),
    ({"schema": SCHEMA, "moments": (-9.0, 1.0, 1.0) * 2}, "expected count, mean and deviation of each target and open"),
    (
        {"schema": SCHEMA, "moments": (9.0, 1.0, 1e300) * 2},
        "expected count, mean and deviation of each target and open",
    ),
    (
        {"schema": SCHEMA, "moments": (9.0, -1e300, 1.0) * 2},
        "expected count, mean and deviation of each target and open",
    ),
    ({"moments": (9.0, float("nan"), 1.0)}, "expected count, mean and deviation of each target and open"),
]


@pytest.mark.parametrize(("changes", "text"), WRONG, ids=str)
def test_a_newcomer_that_does_not_fit_is_refused(changes: dict[str, Any], text: str) -> None:
    algorithm = make_algorithm(config())
    setting = check_introduction(introduction("a"), config(), algorithm, None)
    assert check_introduction(introduction("b", size="M"), config(), algorithm, setting) is setting
    with pytest.raises(RefusedError, match=text):
        check_introduction(replace(introduction("c"), **changes), config(), algorithm, setting)


def test_weights_of_classes_need_classes() -> None:
    told = config(class_weights="balanced")
    with pytest.raises(RefusedError, match="class_weights: expected none, because regression has no classes"):
        check_introduction(introduction("a", task="regression"), told, make_algorithm(told), None)
    with pytest.raises(ConfigError, match=r"^class_weights: expected none, because regression has no classes"):
        check_run(config(class_weights="balanced", task="regression"), uses_data_section=False)


def test_what_the_run_says_holds_for_the_first_client_too() -> None:
    told = config(input_shape=(4,), num_classes=3)
    with pytest.raises(RefusedError, match=r"expected inputs of shape \(4,\)"):
        check_introduction(introduction("a", input_shape=(5,)), told, make_algorithm(told), None)
    with pytest.raises(RefusedError, match="expected 3 classes"):
        check_introduction(introduction("a", num_classes=2), told, make_algorithm(told), None)


@pytest.mark.parametrize("shape", [(2**31,), (1, 2**20, 2**40), (-(2**40),)])
def test_a_first_client_with_impossible_inputs_is_refused_before_a_network_is_tried(shape: tuple[int, ...]) -> None:
    algorithm = make_algorithm(config())
    with pytest.raises(RefusedError, match=r"numbers about its data, found .* or huge ones"):
        check_introduction(introduction("a", input_shape=shape), config(), algorithm, None)


def test_a_first_client_that_no_network_fits_is_refused_and_decides_nothing() -> None:
    algorithm = make_algorithm(config(model="lenet"))
    admission, roster = Admission(algorithm.config, algorithm), Roster()
    with pytest.raises(RefusedError, match="lenet: expected images"):
        admission.check(introduction("a"), roster)
    assert not hasattr(algorithm, "setting")
    admission.check(introduction("b", input_shape=(1, 28, 28)), roster)
    assert admission.setting is algorithm.setting
    assert algorithm.setting.layouts["S"].shapes[0] == ("conv1.weight", (8, 1, 5, 5))


class Diary(Algorithm):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(RunConfig(strategy="local", clients=3, sizes=("S", "M")))
        self.calls: list[Any] = []
        self.fails = False

    def serves(self, about: Introduction, others: Any) -> None:
        self.calls.append(("serves", about.client_id, [other.client_id for other in others]))

    def build(self, setting: Setting) -> None:
        super().build(setting)
        self.calls.append("build")
        if self.fails:
            raise RuntimeError("too large for this memory")

    def join(self, client: Client, first: bool) -> None:
        self.calls.append((client.client_id, client.row, first))

    def restore(self, tensors: Any) -> None:
        self.calls.append(("restore", sorted(tensors)))

    def start_from(self, tensors: Any) -> None:
        self.calls.append(("start from", sorted(tensors)))

    def weights(self, clients: Sequence[Client]) -> Sequence[Weights] | None:
        return None

    def learn(self, updates: Sequence[Update]) -> None:
        pass


def roster_of(names: str) -> Roster:
    roster = Roster()
    for node, name in enumerate(names, start=2):
        roster.admit(node, introduction(name))
    return roster


SOME: dict[str, Tensor] = {"x": torch.zeros(1)}


def test_the_first_client_has_networks_built_and_another_runs_state_loaded_once() -> None:
    made = Diary()
    admission = Admission(made.config, made, SOME)
    for name in "ab":
        admission.check(introduction(name), Roster())
    assert made.calls == [("serves", "a", []), "build", ("start from", ["x"]), ("serves", "b", [])]


def test_a_first_client_with_huge_inputs_is_refused_and_the_next_one_may_decide() -> None:
    """A network of 3.7 million parameters is allowed, but the hypernetwork that writes it has 1.4 GiB."""
    run = RunConfig(model="mlp")
    admission = Admission(run, make_algorithm(run))
    with pytest.raises(RefusedError, match="the server's networks are beyond 1024 MiB; set input_shape and num_"):
        admission.check(introduction("a", size="M", input_shape=(1, 192, 192), num_classes=10), Roster())
    admission.check(introduction("b", size="M"), Roster())
    assert admission.setting is not None and admission.setting.spec.input_shape == (4,)


def test_networks_that_cannot_be_built_refuse_the_client_and_the_next_one_may_decide() -> None:
    made = Diary()
    admission, made.fails = Admission(made.config, made), True
    with pytest.raises(RefusedError, match="no target network can be built for its inputs and classes: too large"):
        admission.check(introduction("a"), Roster())
    made.fails = False
    admission.check(introduction("b", num_classes=7), Roster())
    assert admission.setting is not None and admission.setting.spec.num_classes == 7


def test_a_first_client_that_is_refused_leaves_no_schema_behind() -> None:
    made = Diary()
    admission, made.fails = Admission(made.config, made), True
    with pytest.raises(RefusedError, match="no target network can be built"):
        admission.check(replace(introduction("a"), schema=SCHEMA), Roster())
    made.fails = False
    admission.check(introduction("b"), Roster())
    admission.check(introduction("c"), Roster())


def test_clients_whose_classes_have_other_names_are_refused() -> None:
    """Two folders of classes each, numbered by name: the same label would mean another thing."""
    made, roster = Diary(), Roster()
    admission = Admission(made.config, made)

    def come(name: str, node: int, meaning: str | None = None) -> None:
        about = replace(introduction(name), meaning=meaning)
        admission.check(about, roster)
        roster.admit(node, about, by_key=False)

    come("nameless", 1)
    come("a", 2, "benign, malignant")
    come("b", 3, "benign, malignant")
    come("numbered", 4)
    refused = pytest.raises(RefusedError, match="the names of its classes are not those of this federation")
    with refused:
        come("c", 5, "malignant, normal")
    for node in (2, 3):
        roster.leave(node)  # before the run begins, those that have left again decide nothing
    come("c", 5, "malignant, normal")
    with refused:
        come("a", 6, "benign, malignant")
    admission.begin(roster, 0)
    roster.leave(5)
    with refused:  # those that take part in a run do, wherever they are
        come("d", 7, "other, names")


def test_a_first_client_that_another_runs_state_does_not_fit_is_refused_and_the_next_one_may_decide() -> None:
    before = make_algorithm(config())
    Admission(before.config, before).check(introduction("a"), Roster())
    before.join(Client("a", 0, introduction("a")), True)
    admission = Admission(before.config, make_algorithm(config()), before.state())
    with pytest.raises(RefusedError, match="init_from: its hypernetwork is of another shape than this run's"):
        admission.check(introduction("b", input_shape=(5,)), Roster())
    assert admission.setting is None
    admission.check(introduction("c"), Roster())
    assert admission.setting is not None and admission.setting.spec.input_shape == (4,)


def test_clients_are_handed_over_in_order_of_rows_when_a_run_begins_and_later_ones_as_they_come() -> None:
    made, roster = Diary(), roster_of("abc")
    admission = Admission(made.config, made)
    for client in roster:
        admission.join(client, True)
    assert made.calls == []  # their rows may still change
    admission.begin(roster, known=1)
    assert [call for call in made.calls if call[0] != "serves"] == [
        "build",
        ("a", 0, False),
        ("b", 1, True),
        ("c", 2, True),
    ]
    assert [call[1:] for call in made.calls if call[0] == "serves"] == [("a", []), ("b", ["a"]), ("c", ["a", "b"])]
    late, _ = roster.admit(9, introduction("d"))
    admission.join(late, True)
    admission.join(next(iter(roster)), False)
    assert made.calls[-2:] == [("d", 3, True), ("a", 0, False)]


def test_who_is_checked_is_compared_with_the_others_and_not_with_what_it_said_before() -> None:
    made, roster = Diary(), roster_of("abc")
    Admission(made.config, made).check(introduction("b", train_examples=7), roster)
    assert made.calls[0] == ("serves", "b", ["a", "c"])


def test_a_checkpoint_is_given_back_when_all_clients_of_then_have_joined() -> None:
    made, roster = Diary(), roster_of("ab")
    admission = Admission(made.config, made)
    admission.restore(roster, SOME)
    assert [call for call in made.calls if call[0] != "serves"] == [
        "build", ("a", 0, True), ("b", 1, True), ("restore", ["x"]),
    ]  # fmt: skip
    made.calls.clear()
    admission.begin(roster, known=2)
    assert [call for call in made.calls if call[0] != "serves"] == [("a", 0, False), ("b", 1, False)]


def test_a_client_of_another_strategy_that_does_not_fit_stops_the_run_from_beginning() -> None:
    algorithm = make_algorithm(config(strategy="ghn", options={}))
    with pytest.raises(RefusedError, match="join with --model"):
        Admission(algorithm.config, algorithm).begin(roster_of("a"), 0)


@pytest.mark.parametrize("handed_out", [None, SCHEMA])
def test_clients_whose_columns_mean_something_else_are_refused(handed_out: str | None) -> None:
    run, roster = config(), Roster()
    admission = Admission(run, make_algorithm(run), schema=handed_out)
    if handed_out:
        with pytest.raises(RefusedError, match="this federation's are a table with a schema, its are not"):
            admission.check(introduction("a"), roster)
    admission.check(replace(introduction("a"), schema=SCHEMA), roster)
    roster.admit(1, replace(introduction("a"), schema=SCHEMA))
    admission.check(replace(introduction("b"), schema=SCHEMA.replace(" ", "")), roster)  # the same in other words
    with pytest.raises(RefusedError, match=r"mean something else; expected the column .*'dose'.*; join with the same"):
        admission.check(replace(introduction("b"), schema=SCHEMA.replace("dose", "mass")), roster)
    with pytest.raises(RefusedError, match="this federation's are a table with a schema, its are not"):
        admission.check(introduction("b"), roster)


def test_a_table_does_not_join_a_federation_without() -> None:
    run = config()
    admission = Admission(run, make_algorithm(run))
    admission.check(introduction("a"), Roster())
    with pytest.raises(RefusedError, match="its are a table with a schema, this federation's are not"):
        admission.check(replace(introduction("b"), schema=SCHEMA), Roster())


def test_the_moments_of_all_values_follow_from_those_of_each_client_that_tells_them() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [50 + 9 * torch.randn(count, generator=generator, dtype=torch.float64) for count in (4, 30)]
    run, roster = config(task="classification"), Roster()
    doors = Admission(run, make_algorithm(run), schema=SCHEMA)
    for name, part in zip("abc", [*parts, None], strict=True):
        told = () if part is None else (len(part), float(part.mean()), float(part.std(correction=0)), 0.0, 0.0, 0.0)
        about = replace(introduction(name), schema=SCHEMA, moments=told, train_examples=40)
        doors.check(about, roster)
        roster.admit(ord(name), about)
    scales = read_schema(doors.scale_columns(roster) or "", "it").scales
    every = torch.cat(parts)
    assert scales["age"] == pytest.approx((float(every.mean()), float(every.std(correction=0))))
    assert scales["dose"] == (0.0, 1.0)  # nobody has a value
    assert doors.scale_columns(roster) is None  # it is done once


def test_one_client_cannot_spoil_the_scale_of_all_by_the_moments_that_it_tells() -> None:
    """Of three or more; where most clients have one value, another's may be true at any distance."""
    ages = [(30.0, 50.0, 9.0), (30.0, 60.0, 7.0), (30.0, 52.0, 8.0)]
    wanted = config(task="classification")

    def scales(*clients: tuple[float, ...]) -> tuple[float, float]:
        roster, doors = Roster(), Admission(wanted, make_algorithm(wanted), schema=SCHEMA)
        for node, told in enumerate(clients):
            about = replace(
                introduction(f"c{node}"), schema=SCHEMA, moments=(*told, 0.0, 0.0, 0.0), train_examples=10**13
            )
            doors.check(about, roster)
            roster.admit(node + 2, about)
        mean, std = read_schema(doors.scale_columns(roster) or "", "it").scales["age"]
        assert mean is not None and std is not None
        return mean, std

    # The lower medians of mean, deviation and distance: 52, 8 and 2 beside the first lie, 50, 7 and 2 by the other.
    for lie, counted in (((30.0, 1e20, 1e20), 52 + 10 * (8 + 2)), ((30.0, -1e20, 0.0), 50 - 10 * (7 + 2))):
        assert scales(*ages, lie)[0] == pytest.approx((162 + counted) / 4), lie
    mean, _ = scales(*ages, (1e12, 70.0, 8.0))  # it counts for 100 of the others, as in averages
    assert mean == pytest.approx((162 + 100 * 70) / 103)
    assert scales(ages[0], (30.0, 5000.0, 900.0))[0] == 2525
    assert scales(*[(30.0, 0.0, 0.0)] * 3, (30.0, 400.0, 10.0))[0] == 100


def test_rounding_in_the_moments_of_equal_values_is_no_scale() -> None:
    """Divided by it, the value of any later client would be huge."""
    value, rounding = -0.13172, 2.7755575615628914e-17
    run, roster = config(task="classification"), Roster()
    doors = Admission(run, make_algorithm(run), schema=SCHEMA)
    for name in "ab":
        told = (20.0, value, rounding, 20.0, 0.0, 0.0)
        about = replace(introduction(name), schema=SCHEMA, moments=told, train_examples=40)
        doors.check(about, roster)
        roster.admit(ord(name), about)
    scales = read_schema(doors.scale_columns(roster) or "", "it").scales
    assert scales["age"] == (pytest.approx(value), 1.0)


# ---------------------------------------------------------------------- the limit on networks


def test_parameters_are_counted_together_and_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_BYTES", 4 * (3 * 20 + 20))
    with Ration(RunConfig()):
        nn.Linear(3, 20)
    with pytest.raises(ModelError, match="are beyond"), Ration(RunConfig()):
        nn.Linear(3, 20)
        nn.Linear(1, 1)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="are beyond 1024 MiB"), Ration(RunConfig(num_classes=10)):
        nn.Linear(2**20, 2**20)  # four TiB, which no machine gives


def test_what_the_run_declares_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_BYTES", 1)
    with Ration(RunConfig(input_shape=(3,), num_classes=20)):
        nn.Linear(3, 20)


def test_moments_of_another_number_of_targets_stop_the_run_from_beginning() -> None:
    run = config(strategy="fedavg", sizes=("S",), options={}, target_moments=(300.0, 50.0))
    admitting, roster = Admission(run, make_algorithm(run)), Roster()
    about = introduction("a", task="regression", num_classes=2, input_shape=(4,))
    admitting.check(about, roster)
    roster.admit(2, about)
    with pytest.raises(ConfigError, match=r"^target_moments: expected 2 means, then deviations, found \(300.0, 50"):
        admitting.begin(roster, 0)


@pytest.mark.parametrize(
    ("declared", "kept", "used", "count"),
    [
        ((), (), (6.0, 3.0), 10.0),
        ((), (), (), 0.0),
        ((300.0, 50.0), (), (300.0, 50.0), 10.0),
        ((300.0, 50.0), (7.0, 2.0), (7.0, 2.0), 10.0),
    ],
)
def test_targets_are_standardised_as_before_else_as_declared_else_as_clients_tell(
    declared: tuple[float, ...], kept: tuple[float, ...], used: tuple[float, ...], count: float
) -> None:
    """What a run goes on with was kept in its checkpoint: others would make other numbers of its networks' outputs.

    Clients with few examples tell zeros, from which no scale follows.
    """
    run = config(strategy="fedavg", sizes=("S",), options={}, target_moments=declared)
    algorithm, roster = make_algorithm(run), Roster()
    admitting = Admission(run, algorithm)
    for node, moments in enumerate(((count, 0.3 * count, 0.0), (count, 0.9 * count, 0.0)), start=2):
        about = introduction(f"c{node}", task="regression", num_classes=1, input_shape=(4,), moments=moments)
        admitting.check(about, roster)
        roster.admit(node, about)
    roster.moments = kept
    admitting.begin(roster, 0)
    assert roster.moments == used
    assert (*algorithm.setting.task.spec.mean, *algorithm.setting.task.spec.std) == used


def test_clients_that_never_train_have_no_part_in_the_scale_of_targets() -> None:
    """They stand for clients without labels."""
    run = config(strategy="fedavg", sizes=("S",), options={}, clients=4, novel=50)
    algorithm, roster = make_algorithm(run), Roster()
    admitting = Admission(run, algorithm)
    for node, mean in enumerate((0.0, 0.0, 8.0, 8.0), start=2):
        about = introduction(f"c{node}", task="regression", num_classes=1, input_shape=(4,), moments=(10.0, mean, 1.0))
        admitting.check(about, roster)
        roster.admit(node, about)
    admitting.begin(roster, 0)
    assert roster.moments == (0.0, 1.0)
