"""The run's description: what is read, what wins, what is refused and in which words."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hyperbloom.common.config import (
    LocalConfig,
    RunConfig,
    Section,
    check,
    dump_run_config,
    load_run_config,
    make_run_config,
    parse_assignment,
)
from hyperbloom.common.errors import ConfigError
from hyperbloom.server.runs.folder import RunFolder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return where a test writes its run.yaml."""
    return tmp_path / "run.yaml"


def load(file: Path, text: str, **overrides: Any) -> RunConfig:
    """Write `text` and read it back, with overrides whose dots are written as two underscores."""
    file.write_text(text, encoding="utf-8")
    return load_run_config(file, {key.replace("__", "."): value for key, value in overrides.items()})


def refusal(file: Path, text: str) -> str:
    """Return what a file with `text` is refused with, its own path shortened."""
    with pytest.raises(ConfigError) as caught:
        load(file, text)
    return str(caught.value).replace(str(file), "FILE")


# ---------------------------------------------------------------------- what is read


def test_no_file_and_no_flags_give_the_values_of_the_authors_code() -> None:
    config = load_run_config(None, {})
    assert config == RunConfig()
    assert (config.strategy, config.rounds, config.clients, config.cohort) == ("pfedhn", 100, 6, 1)
    assert config.local == LocalConfig(
        steps=50, batch_size=64, learning_rate=1e-2, momentum=0.9, weight_decay=5e-5, clip=50.0
    )
    rates = [config.local.rate(number, 100) for number in range(1, 101)]
    assert sum(rates) / 100 == pytest.approx(5.05e-3)  # the authors' rate, 0.005, and half a step of the sum


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}", "null"])
def test_an_empty_file_is_all_defaults(file: Path, text: str) -> None:
    assert load(file, text) == RunConfig()


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 1e-3), ("5E-2", 5e-2), ("1e2", 100.0), ("+.5", 0.5), ("2.", 2.0), ("1.5e+1", 15.0), ("3", 3.0)],
)
def test_numbers_are_read_as_yaml_1_2_reads_them(file: Path, written: str, value: float) -> None:
    found = load(file, f"local: {{learning_rate: {written}}}").local.learning_rate
    assert (found, type(found)) == (value, float)


def test_whole_numbers_stay_whole(file: Path) -> None:
    config = load(file, "seed: 7\nrounds: +12\noptions: {hidden_dim: 64}")
    assert (config.seed, config.rounds, config.options) == (7, 12, {"hidden_dim": 64})
    assert type(config.options["hidden_dim"]) is int


@pytest.mark.parametrize(("written", "value"), [("010", 10), ("08", 8)])
def test_a_leading_zero_does_not_change_a_number(file: Path, written: str, value: int) -> None:
    assert load(file, f"seed: {written}").seed == value


def test_a_time_is_no_number(file: Path) -> None:
    assert refusal(file, "seed: 1:30") == "seed: expected a valid integer, found '1:30' in FILE"


def test_lists_become_tuples(file: Path) -> None:
    config = load(file, "sizes: [S, L]\ninput_shape: [1, 28, 28]\nbaselines: [local]")
    assert config.sizes == ("S", "L")
    assert config.input_shape == (1, 28, 28)
    assert config.baselines == ("local",)


def test_nothing_can_be_changed_afterwards() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().rounds = 3  # type: ignore[misc]


# ---------------------------------------------------------------------- what wins


def test_flags_win_over_the_file_and_the_file_over_the_defaults(file: Path) -> None:
    config = load(file, "rounds: 30\nseed: 4\nlocal: {steps: 7, batch_size: 8}", rounds=40, local__steps=9)
    assert (config.rounds, config.seed, config.clients) == (40, 4, 6)
    assert (config.local.steps, config.local.batch_size, config.local.momentum) == (9, 8, 0.9)


def test_a_key_that_is_no_key_of_the_run_is_an_option_of_the_strategy(file: Path) -> None:
    config = load(file, "options: {hidden_dim: 5, momentum: 0.1}", hidden_dim=6, options__clip=1.5)
    assert config.options == {"hidden_dim": 6, "momentum": 0.1, "clip": 1.5}


def test_an_override_of_a_whole_section_replaces_it(file: Path) -> None:
    config = load(file, "data: {name: mnist, alpha: 0.1}", data={"name": "cifar10"})
    assert (config.data.name, config.data.alpha) == ("cifar10", 0.5)


def test_an_override_does_not_change_what_it_was_given(file: Path) -> None:
    section = {"steps": 3}
    load_run_config(None, {"local": section, "local.batch_size": 5, "rounds": 20})
    # the caller's own dictionary may be reused for the next run
    assert section == {"steps": 3}


@pytest.mark.parametrize(("given_text", "key", "value"), [("a=1", "a", 1), ("a.b=[1, x]", "a.b", [1, "x"])])
def test_an_assignment_is_a_key_and_a_value_in_yaml(given_text: str, key: str, value: Any) -> None:
    assert parse_assignment(given_text) == (key, value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("lr=1e-3", 1e-3), ("lr= true", True), ("lr=", None), ("lr='5'", "5"), ("lr=a=b", "a=b")],
)
def test_the_value_of_an_assignment_has_the_type_that_yaml_gives_it(text: str, value: Any) -> None:
    assert parse_assignment(text) == ("lr", value)
    assert type(parse_assignment(text)[1]) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds", "--set: expected KEY=VALUE such as local.steps=20, found 'rounds'"),
        ("=3", "--set: expected KEY=VALUE such as local.steps=20, found '=3'"),
        ("", "--set: expected KEY=VALUE such as local.steps=20, found ''"),
        ("rounds=[1", "rounds: expected a value in YAML, found '[1'"),
        ("rounds={a: 1, a: 2}", "rounds: expected a value in YAML, found '{a: 1, a: 2}'"),
    ],
)
def test_an_assignment_that_is_none_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assignment(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", ["!!int abc", "!!bool x", "!!map 3", "!!timestamp x", "[" * 500])
def test_an_assignment_whose_value_cannot_be_made_is_refused(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_assignment(f"rounds={value}")
    assert str(caught.value) == f"rounds: expected a value in YAML, found {value!r}"


# ---------------------------------------------------------------------- what is refused

NESTED = "mapping values are not allowed here"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown keys, with the nearest one or all of them
        ("strategie: pfedhn", "strategie: unknown key in FILE. Did you mean strategy?"),
        ("local: {stepz: 3}", "local.stepz: unknown key in FILE. Did you mean steps?"),
        (
            "data: {qqq: 3}",
            (
                "data.qqq: unknown key in FILE. "
                "Known keys: alpha, classes_per_client, first, group, label, max_train, name, owner, parts, root, "
                "schema_file, split."
            ),
        ),
        # wrong types
        ("{1: 2}", "1: keys should be strings, found 1 in FILE"),
        ("rounds: many", "rounds: expected a valid integer, found 'many' in FILE"),
        ("rounds: '3'", "rounds: expected a valid integer, found '3' in FILE"),
        ("rounds: 1e2", "rounds: expected a valid integer, found 100.0 in FILE"),
        ("rounds: true", "rounds: expected a valid integer, found True in FILE"),
        ("strategy: 1e3", "strategy: expected a valid string, found 1000.0 in FILE"),
        ("sizes: M", "sizes: expected a valid tuple, found 'M' in FILE"),
        ("sizes: [M, X]", "sizes.1: expected 'S', 'M' or 'L', found 'X' in FILE"),
        ("options: [1]", "options: expected a valid dictionary, found (1,) in FILE"),
        ("local: null", "local: expected a valid dictionary or instance of LocalConfig, found None in FILE"),
        ("local: {steps: [1, 2]}", "local.steps: expected a valid integer, found (1, 2) in FILE"),
        # out of range
        ("rounds: 0", "rounds: expected greater than 0, found 0 in FILE"),
        ("seed: -1", "seed: expected greater than or equal to 0, found -1 in FILE"),
        ("local: {momentum: 1.0}", "local.momentum: expected less than 1, found 1.0 in FILE"),
        ("local: {clip: .inf}", "local.clip: expected a finite number, found inf in FILE"),
        ("local: {learning_rate: .nan}", "local.learning_rate: expected a finite number, found nan in FILE"),
        ("input_shape: [3, 0, 32]", "input_shape.1: expected greater than 0, found 0 in FILE"),
        ("data: {alpha: 0}", "data.alpha: expected greater than 0, found 0 in FILE"),
        ("join_timeout_s: 0.0", "join_timeout_s: expected greater than 0, found 0.0 in FILE"),
        # combinations
        ("data: {parts: 5}", "data.parts: expected at least data.first + clients = 6, found 5"),
        ("data: {first: 1}", "data.parts: expected at least data.first + clients = 7, found 6"),
        ("cohort: 7", "cohort: expected at most clients = 6, found 7"),
        ("rounds: 5\neval_every: 10", "eval_every: expected at most rounds = 5, found 10"),
        *(
            (
                f"target_moments: {each}",
                f"target_moments: expected means, then as many deviations above 0, found {each}",
            )
            for each in ("[3.0, 3.0, 1.0]", "[3.0, 0.0]", "[3.0, -1.0]")
        ),
        ("sizes: []", "sizes: expected one or more of S, M, L without repetition, found []"),
        ("sizes: [S, S]", "sizes: expected one or more of S, M, L without repetition, found ['S', 'S']"),
        # not a run at all
        ("rounds: 3\nrounds: 4", "--config: FILE is not YAML: key 'rounds' stands twice"),
        ("local: {steps: 1, steps: 2}", "--config: FILE is not YAML: key 'steps' stands twice"),
        ("- rounds", "--config: expected keys and values in FILE, found list"),
        ("pfedhn", "--config: expected keys and values in FILE, found str"),
        ("a: 3: 4", f'--config: FILE is not YAML: {NESTED} in "<unicode string>", line 1, column 5: a: 3: 4 ^'),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(file: Path, text: str, message: str) -> None:
    assert refusal(file, text) == message


def test_only_the_first_wrong_key_is_named(file: Path) -> None:
    assert refusal(file, "rounds: x\nclients: y") == "rounds: expected a valid integer, found 'x' in FILE"


def test_overrides_are_refused_as_of_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"^rounds: expected greater than 0, found -2 in the command line$"):
        load_run_config(None, {"rounds": -2})


def test_an_override_cannot_reach_into_a_value(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^local: expected a section with keys of its own, found 3$"):
        load(file, "local: 3", local__steps=4)
    with pytest.raises(ConfigError, match=r"^a: expected a section with keys of its own, found 1$"):
        load(file, "options: {a: 1}", a__b=4)


@pytest.mark.parametrize(("name", "reason"), [("absent.yaml", "No such file or directory"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(tmp_path / name, {})
    assert str(caught.value) == f"--config: cannot read {tmp_path / name}: {reason}"


def test_a_file_that_is_no_text_is_refused(file: Path) -> None:
    file.write_bytes(b"rounds: \xff\xfe")
    with pytest.raises(ConfigError, match=r"is not YAML: 'utf-8' codec can't decode byte 0xff in position 8"):
        load_run_config(file, {})


def test_check_names_where_the_values_came_from() -> None:
    class Options(Section):
        width: int = 3

    assert check(Options, {"width": 4}, "options of it") == Options(width=4)
    with pytest.raises(ConfigError, match=r"^qqqq: unknown key in options of it\. Known keys: width\.$"):
        check(Options, {"qqqq": 4}, "options of it")
    with pytest.raises(ConfigError, match=r"^round: unknown key in options of it\. Did you mean rounds\?$"):
        check(Options, {"round": 4}, "options of it")  # a key of the run


@pytest.mark.parametrize(
    "text",
    [
        "{[]: 1, []: 2}",
        "rounds: 2001-99-99",
        "rounds: 0b_",
        "rounds: !!int abc",
        "rounds: !!bool x",
        "rounds: !!timestamp x",
        "local: !!map 3",
        "!!timestamp x",
        "[" * 500,
        "rounds: " + "9" * 5000,
    ],
)
def test_yaml_that_breaks_its_own_types_is_refused(file: Path, text: str) -> None:
    assert "\n" not in refusal(file, text)


def test_a_section_that_contains_itself_is_refused(file: Path) -> None:
    assert "\n" not in refusal(file, "options: &a {x: *a}")


def test_a_key_with_a_line_break_is_refused_in_one_line(file: Path) -> None:
    assert "\n" not in refusal(file, '"a\\nb": 1')


def test_a_seed_that_no_message_can_carry_is_refused(file: Path) -> None:
    assert refusal(file, f"seed: {2**63}") == f"seed: expected less than {2**63}, found {2**63} in FILE"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("backbone: ''", "backbone: string should have at least 1 character"),
        ("data: {name: ''}", "data.name: string should have at least 1 character"),
        ("clients: 1" + "0" * 30, "clients: expected less than or equal to 1000000"),
        ("examples_cap: 1e308", "examples_cap: expected less than or equal to 1000000000"),
        ("local: {learning_rate: 1e308}", "local.learning_rate: expected less than or equal to 1"),
        ("num_classes: 1" + "0" * 400, "num_classes: expected less than or equal to 1000000000"),
    ],
)
def test_what_no_run_can_use_is_refused_before_it_begins(file: Path, text: str, said: str) -> None:
    assert refusal(file, text).startswith(said)
    assert len(refusal(file, text)) < 300


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(st.characters(exclude_categories=["C", "Z"]), max_size=8),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3), max_leaves=6
)
FIELDS = st.sampled_from([*RunConfig.model_fields, *LocalConfig.model_fields, "name", "split", "nonsense"])
RUNS = st.dictionaries(FIELDS, VALUES | st.dictionaries(FIELDS, VALUES, max_size=3), max_size=4)


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text() | st.text("{}[]:,-&*!|>'\"#% \nab1.e") | RUNS.map(lambda run: yaml.safe_dump(run)))
@example("rounds: 7\neval_every: 7")
@example("\x00")
def test_junk_gives_a_run_or_one_line(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except UnicodeEncodeError:
        return  # a lone surrogate is in no file
    try:
        assert isinstance(load_run_config(file, {}), RunConfig)
    except ConfigError as error:
        assert str(error)
        assert "\n" not in str(error)


# ---------------------------------------------------------------------- the learning rate over the rounds


def test_the_cosine_schedule_is_that_of_torch() -> None:
    local = LocalConfig(learning_rate=0.3, schedule="cosine")
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    for number in range(1, 8):
        assert local.rate(number, 7) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_without_a_schedule_the_rate_is_what_was_set_in_every_round() -> None:
    local = LocalConfig(learning_rate=0.3, schedule="constant")
    assert {local.rate(number, 7) for number in range(1, 8)} == {0.3}


def test_a_schedule_needs_rounds() -> None:
    with pytest.raises(ConfigError, match=r"^local.schedule: expected constant with asynchronous"):
        load_run_config(None, {"local.schedule": "cosine", "asynchronous": True})
    assert load_run_config(None, {"asynchronous": True}).local.schedule == "constant"


@pytest.mark.parametrize(
    ("overrides", "least", "found"),
    [({"novel": 90}, 1, 0), ({"novel": 50, "strategy": "fedavg", "clients": 4, "secure_aggregation": True}, 3, 2)],
)
def test_some_clients_must_be_left_to_train(overrides: dict[str, Any], least: int, found: int) -> None:
    with pytest.raises(
        ConfigError, match=f"^clients, novel: expected at least {least} clients that train, found {found}$"
    ):
        load_run_config(None, {"clients": 2, "cohort": 2} | overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"asynchronous": True}, "asynchronous: expected false with secure_aggregation"),
        ({"compression": "int8"}, "compression: expected none with secure_aggregation"),
        ({"privacy.where": "server"}, "privacy.where: expected client or none with secure_aggregation"),
        (
            {"privacy.where": "client", "privacy.clip": 2.0},
            r"privacy.largest_change: expected at least clip \+ 6 \* noise \* clip = 14, or noise .* found 8",
        ),
    ],
)
def test_what_does_not_go_with_secure_aggregation_is_refused(overrides: dict[str, Any], message: str) -> None:
    sound = {"secure_aggregation": True, "clients": 600, "cohort": 3}
    assert load_run_config(None, sound).secure_aggregation
    assert load_run_config(
        None, sound | {"privacy.where": "client", "privacy.largest_change": 14.0, "privacy.clip": 2.0}
    )
    with pytest.raises(ConfigError, match=f"^{message}"):
        load_run_config(None, sound | overrides)


# ---------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"local.learning_rate": 1e-5, "local.weight_decay": 0.0, "seed": 2**63 - 1},
        {"sizes": ["S", "L"], "input_shape": [3, 32, 32], "num_classes": 10, "baselines": ["local", "fedavg"]},
        {"data.root": "/data/with spaces: and # signs", "data.alpha": 1e-7, "data.max_train": 3},
        {"hidden_dim": 7, "update": "mean", "nested": {"a": [1, 2.5, "x", None, True]}, "init_from": "runs/1"},
        {"data.name": "yes", "model": "null", "data.split": "1"},
        {"join_timeout_s": 1, "round_timeout_s": 1e30},
    ],
)
def test_the_configuration_of_a_run_folder_gives_the_same_run_again(tmp_path: Path, overrides: dict[str, Any]) -> None:
    config = load_run_config(None, overrides)
    RunFolder(tmp_path, config, "run")
    assert load_run_config(tmp_path / "config.yaml", {}) == config


@pytest.mark.parametrize("word", ["1e3", "12e-4"])
def test_a_word_that_looks_like_a_number_survives_the_run_folder(tmp_path: Path, word: str) -> None:
    config = load_run_config(None, {"data.root": word})
    RunFolder(tmp_path, config, "run")
    assert load_run_config(tmp_path / "config.yaml", {}) == config


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rate=st.floats(min_value=0, max_value=1e30, exclude_min=True),
    momentum=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**63 - 1),
    name=st.text(st.characters(exclude_categories=["C"]), min_size=1)
    | st.text("-+.0189exo:_TFnul~", min_size=1, max_size=5),
)
def test_all_numbers_and_words_survive_the_run_folder(
    tmp_path: Path, rate: float, momentum: float, seed: int, name: str
) -> None:
    config = load_run_config(
        None, {"local.learning_rate": rate, "local.momentum": momentum, "seed": seed, "data.name": name}
    )
    RunFolder(tmp_path, config, "run")
    assert load_run_config(tmp_path / "config.yaml", {}) == config


def test_a_short_run_is_evaluated_at_each_quarter_by_default(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rounds: 9\n")
    assert load_run_config(path, {}).eval_every == 2
    for rounds, every in ((1, 1), (3, 1), (4, 1), (20, 5), (39, 9), (40, 10), (200, 10)):
        assert load_run_config(path, {"rounds": rounds}).eval_every == every
        assert "eval_every" not in load_run_config(path, {"rounds": rounds}).model_fields_set, "nobody has set it"
    assert load_run_config(path, {"eval_every": 9}).eval_every == 9
    path.write_text(dump_run_config(load_run_config(path, {})))
    assert load_run_config(path, {}).eval_every == 2


def test_aliases_that_stand_for_too_much_are_refused(file: Path) -> None:
    """Eighty lines that stand for 2**80 values would keep every reader busy for good."""
    lines = [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 2)}]" for n in range(1, 80)]
    text = "options:\n  a0: &a0 [x, x]\n" + "\n".join(lines)
    assert "with its aliases it has over 100000 values" in refusal(file, text)


def test_an_alias_stands_for_its_value(file: Path) -> None:
    assert load(file, "options: {a: &a [1, 2], b: *a}").options == {"a": (1, 2), "b": (1, 2)}


@pytest.mark.parametrize(
    "text", ["strategy: ../pfedhn", "baselines: [local, ../../x]", "baselines: [/etc]", "baselines: ['.']"]
)
def test_a_strategy_is_no_path(file: Path, text: str) -> None:
    assert refusal(file, text).startswith("strategy, baselines: expected a name or package.module:Class")


@pytest.mark.parametrize("turned", [False, True])
def test_a_section_and_keys_of_it_in_either_order(turned: bool) -> None:
    given = [("local.steps", 5), ("local", {"learning_rate": 0.1}), ("beta", 0.3), ("options", {"rate": 0.5})]
    made = make_run_config({}, dict(reversed(given) if turned else given), "a test")
    assert (made.local.steps, made.local.learning_rate, made.options) == (5, 0.1, {"beta": 0.3, "rate": 0.5})
