"""pFedHN with a head per architecture: pFedHN where there is one, a shared trunk where there are several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.graphs import Graph
from hyperbloom.common.models import ModelSpec
from hyperbloom.common.wire.orders import Introduction
from hyperbloom.strategies import make_algorithm
from hyperbloom.strategies.exchange import Client, Update
from tests.strategies.conftest import digits_config, digits_federation, introduction, joined, update_of

MLP, PLAIN, DEEP = (own_graph(ModelSpec(name, "S", (1, 8, 8), 10)) for name in ("mlp", "plain-4", "plain-7"))


def config(strategy: str = "pfedhn-heads", **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "strategy": strategy,
        "options": {"hidden_dim": 8, "start": "hypernetwork"},
        "models": ("mlp", "plain-4"),
    }
    return digits_config(**(values | {"rounds": 1, "eval_every": 1} | changes))


def about(name: str, graph: Graph) -> Introduction:
    return introduction(name, input_shape=(1, 8, 8), num_classes=10, graph=graph.to_json())


def together(*graphs: Graph) -> Any:
    """Return the algorithm with a client for each of these models."""
    return joined(config(models=()), *(about(f"c{row}", graph) for row, graph in enumerate(graphs)))


def join(algorithm: Any, name: str, graph: Graph) -> Client:
    """Let a client join during the run."""
    client = Client(name, len(algorithm.clients), about(name, graph))
    algorithm.serves(client.about, [each.about for each in algorithm.clients.values()])
    algorithm.join(client, True)
    return client


def state(algorithm: Any) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in algorithm.state().items()}


def answer(client: Client, graph: Graph) -> Update:
    return update_of(client, torch.randn(graph.layout.numel, generator=torch.Generator().manual_seed(0)) / 10)


@pytest.mark.parametrize("cohort", [1, 3])
def test_with_one_architecture_it_is_pfedhn(cohort: int, tmp_path: Path) -> None:
    rounds: dict[str, Any] = {"rounds": 4, "eval_every": 4, "cohort": cohort}
    ours = digits_federation(config(models=("mlp",), **rounds), tmp_path / "ours")
    theirs = digits_federation(config("pfedhn", models=(), model="mlp", sizes=("S",), **rounds), tmp_path / "theirs")
    (head,) = ours.algorithm.learner.hypernetwork.heads.values()
    head.load_state_dict(theirs.algorithm.learner.hypernetwork.heads["S"].state_dict())
    start = theirs.algorithm.weights(list(theirs.roster))
    ours.run()
    theirs.run()
    found, expected = (run.algorithm.weights(list(run.roster)) for run in (ours, theirs))
    for one, other, before in zip(found, expected, start, strict=True):
        assert torch.equal(one.values, other.values)
        assert not torch.equal(other.values, before.values)


def test_architectures_share_the_trunk_and_nothing_else() -> None:
    made = together(MLP, PLAIN)
    first, second = made.clients.values()
    before, (old,) = state(made), made.weights([second])
    made.learn([answer(first, MLP)])
    moved = {name for name, values in made.state().items() if name in before and not values.equal(before[name])}
    heads = {name for name in before if ".heads." in name}
    assert moved & heads == {name for name in heads if MLP.digest in name}
    assert any(".trunk." in name for name in moved)
    assert not torch.equal(made.weights([second])[0].values, old.values)
    assert [each.layout for each in made.weights([second, first])] == [PLAIN.layout, MLP.layout]


def test_the_head_of_an_architecture_that_joins_late_learns() -> None:
    made = together(MLP)
    made.learn([answer(made.clients[0], MLP)])
    late, same = join(made, "late", DEEP), join(made, "same", DEEP)
    before = state(made)
    made.learn([answer(late, DEEP)])
    name = f"hypernetwork.heads.{DEEP.digest}.weight"
    assert not torch.equal(made.state()[name], before[name])
    assert made.layout(same) == DEEP.layout
    assert len(made.learner.hypernetwork.heads) == 2


def test_a_head_that_would_be_too_large_is_refused() -> None:
    limit = 9 * (MLP.layout.numel + PLAIN.layout.numel)
    made = joined(config(models=(), options={"hidden_dim": 8, "max_parameters": limit}), about("c0", MLP))
    with pytest.raises(RefusedError, match=r"a head for its architecture would make [\d,]+ parameters of at most"):
        join(made, "c1", DEEP)
    join(made, "c1", PLAIN)


def test_who_keeps_the_graph_or_another_run_is_refused() -> None:
    with pytest.raises(RefusedError, match="join with --model and --disclose graph"):
        make_algorithm(config(models=())).serves(introduction("a", input_shape=(1, 8, 8), num_classes=10), [])
    with pytest.raises(ConfigError, match="init_from: pfedhn-heads has no way"):
        make_algorithm(config(models=(), init_from="elsewhere"))
