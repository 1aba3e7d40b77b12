"""A client's settings, also as the flat node config of a stock SuperNode."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.data import DataSpec
from hyperbloom.common.errors import ConfigError, DataError

FULL = ClientSettings(
    client_id="ward-7",
    data=DataSpec(
        data="mnist",
        root=Path("/data/mnist"),
        download=True,
        split="dirichlet",
        classes_per_client=3,
        alpha=0.1,
        partition=2,
        partitions=6,
        max_train=50,
        seed=9,
        label="died",
        owner="hospital",
        group="patient",
        schema=Path("/data/schema.json"),
        backbone="our.nets:pretrained",
    ),
    device="cpu",
    size="S",
    low_memory=True,
    state_dir=Path("/var/lib/ward-7"),
    disclose_class_shares=True,
    disclose_moments=True,
    moments_noise=0.5,
    disclose_counts=True,
    disclose_gain=True,
    model="mypackage.nets:make",
    disclose="graph",
    min_noise=0.5,
    min_masked=5,
    key=Path("/keys/ward-7.pem"),
    peers=Path("/keys/peers"),
    server="gpu-box:9092",
    root_certificates=Path("/keys/ca.pem"),
    max_changes=50,
    max_scores=5,
)


def test_the_node_config_is_flat_and_has_flowers_types_only() -> None:
    assert FULL.to_node_config() == {
        "client-id": "ward-7",
        "data": "mnist",
        "root": "/data/mnist",
        "download": True,
        "split": "dirichlet",
        "classes-per-client": 3,
        "alpha": 0.1,
        "partition": 2,
        "partitions": 6,
        "max-train": 50,
        "seed": 9,
        "label": "died",
        "owner": "hospital",
        "group": "patient",
        "schema": "/data/schema.json",
        "device": "cpu",
        "size": "S",
        "low-memory": True,
        "backbone": "our.nets:pretrained",
        "state-dir": "/var/lib/ward-7",
        "disclose-class-shares": True,
        "disclose-moments": True,
        "moments-noise": 0.5,
        "disclose-counts": True,
        "disclose-gain": True,
        "model": "mypackage.nets:make",
        "disclose": "graph",
        "min-noise": 0.5,
        "min-masked": 5,
        "key": "/keys/ward-7.pem",
        "peers": "/keys/peers",
        "server": "gpu-box:9092",
        "root-certificates": "/keys/ca.pem",
        "max-changes": 50,
        "max-scores": 5,
    }
    assert {type(value) for value in FULL.to_node_config().values()} <= {str, int, float, bool}


def test_what_is_none_is_left_out() -> None:
    config = ClientSettings("a").to_node_config()
    assert {"root", "partition", "max-train", "state-dir"}.isdisjoint(config)
    assert ClientSettings.from_node_config(config) == ClientSettings("a")


def test_the_first_partition_is_not_taken_for_none() -> None:
    settings = ClientSettings("a", DataSpec(partition=0, partitions=2))
    assert settings.to_node_config()["partition"] == 0
    assert ClientSettings.from_node_config(settings.to_node_config()) == settings


PATHS = st.none() | st.from_regex(r"[a-z0-9/. -]{1,12}", fullmatch=True).map(Path)
SPECS = st.integers(1, 9).flatmap(
    lambda partitions: st.builds(
        DataSpec,
        data=st.text(min_size=1, max_size=8),
        root=PATHS,
        download=st.booleans(),
        split=st.text(max_size=8),
        classes_per_client=st.integers(1, 99),
        alpha=st.floats(1e-9, 1e9),
        partition=st.none() | st.integers(0, partitions - 1),
        partitions=st.just(partitions),
        max_train=st.none() | st.integers(1, 10**9),
        seed=st.integers(0, 2**63 - 1),
    )
)
SETTINGS = st.builds(
    ClientSettings,
    client_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    data=SPECS,
    device=st.sampled_from(["auto", "cpu", "cuda:1"]),
    size=st.sampled_from("SML"),
    state_dir=PATHS,
    disclose_class_shares=st.booleans(),
    disclose_moments=st.booleans(),
    moments_noise=st.none() | st.floats(0.01, 100.0),
    disclose_counts=st.booleans(),
    disclose_gain=st.booleans(),
)


@effort(deadline=None, derandomize=True, max_examples=40)
@given(settings=SETTINGS)
def test_a_node_config_gives_the_same_settings_again(settings: ClientSettings) -> None:
    again = ClientSettings.from_node_config(settings.to_node_config())
    assert again == settings
    assert hash(again) == hash(settings)


def test_every_setting_is_in_the_round_trip_above() -> None:
    pairs: list[tuple[Any, Any]] = [(FULL, ClientSettings("a")), (FULL.data, DataSpec())]
    for full, default in pairs:
        for field in dataclasses.fields(full):
            assert getattr(full, field.name) != getattr(default, field.name), field.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitons": 3}, "node config: unknown key 'partitons'"),
        ({"max-size": 3}, "node config: unknown key 'max-size'"),
        ({"disclose": "it"}, "node config: disclose: expected 'types' or 'graph', found 'it'"),
        (
            {"disclose-class-shares": "false"},
            "node config: disclose-class-shares: expected a valid boolean, found 'false'",
        ),
    ],
)
def test_an_unknown_key_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientSettings.from_node_config({**FULL.to_node_config(), **changes})
    assert str(caught.value) == message


def test_a_node_config_must_name_the_client() -> None:
    with pytest.raises(ConfigError, match=r'^node config: expected client-id="NAME" among the keys$'):
        ClientSettings.from_node_config({"data": "digits"})


def test_numbers_out_of_range_are_refused_by_the_data_spec() -> None:
    with pytest.raises(DataError, match=r"^partition: expected 0 to 5 \(partitions - 1\), found 6$"):
        ClientSettings.from_node_config({**FULL.to_node_config(), "partition": 6})


@pytest.mark.parametrize(
    "changes",
    [
        {"client-id": 7},
        {"partitions": "6"},
        {"alpha": "much"},
        {"max-train": "50"},
        {"max-train": 60.0},
        {"data": 5},
        {"size": "XL"},
        {"min-noise": True},
        {"low-memory": "no"},
    ],
)
def test_a_value_of_another_type_is_refused(changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(ConfigError, match=f"^node config: {key}: expected .*found {changes[key]!r}"):
        ClientSettings.from_node_config({**FULL.to_node_config(), **changes})


@pytest.mark.parametrize("client_id", ["a", "7", "Ward_7.left-B", "a" * 64])
def test_names_that_are_folders_everywhere(client_id: str) -> None:
    assert ClientSettings(client_id).folder.name == client_id


@pytest.mark.parametrize("client_id", ["", "a" * 65, ".", "..", "../x", "a/b", "a b", "-a", "_a", "ä", "a\n", "a\0"])
def test_other_names_are_refused(client_id: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientSettings(client_id)
    assert str(caught.value) == (
        "--client-id: expected 1 to 64 letters, digits, dots, hyphens and underscores, starting with a letter "
        f"or digit; found {client_id!r}"
    )


def test_the_state_folder_is_the_given_one_or_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ClientSettings("a").folder == tmp_path / "hyperbloom" / "a"
    assert FULL.folder == Path("/var/lib/ward-7")
