"""pFedHN with a head per architecture: pFedHN where there is one, a shared trunk where there are several."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.config import RunConfig
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.graphs import Graph
from hyperbloom.common.messages import TrainResult
from hyperbloom.common.models import ModelSpec
from hyperbloom.strategies import make_strategy
from hyperbloom.strategies.personalised import ClientUpdate
from hyperbloom.strategies.roster import Client, Roster
from tests.strategies.conftest import RUN_ID, digits_config, digits_federation, introduction

MLP, PLAIN, DEEP = (own_graph(ModelSpec(name, "S", (1, 8, 8), 10)) for name in ("mlp", "plain-4", "plain-7"))


def config(strategy: str = "pfedhn-heads", **changes: Any) -> RunConfig:
    values: dict[str, Any] = {"strategy": strategy, "options": {"hidden_dim": 8}, "models": ("mlp", "plain-4")}
    return digits_config(**(values | {"rounds": 1, "eval_every": 1} | changes))


def join(strategy: Any, row: int, graph: Graph) -> Client:
    about = introduction(f"c{row}", input_shape=(1, 8, 8), num_classes=10)
    client = Client(about.client_id, row, "", row + 2, replace(about, graph=graph.to_json()))
    strategy.check_newcomer(client.about)
    strategy.joined(client)
    return client


def state(strategy: Any) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in strategy.state().items()}


def answer(client: Client, graph: Graph, seed: int = 0) -> ClientUpdate:
    delta = torch.randn(graph.layout.numel, generator=torch.Generator().manual_seed(seed)) / 10
    return ClientUpdate(client, TrainResult(0.0, 0.0, None), None, delta, graph.layout)


@pytest.mark.parametrize("cohort", [1, 3])
def test_with_one_architecture_it_is_pfedhn(cohort: int, tmp_path: Path) -> None:
    rounds: dict[str, Any] = {"rounds": 4, "eval_every": 4, "cohort": cohort}
    ours = digits_federation(config(models=("mlp",), **rounds), tmp_path / "ours")
    theirs = digits_federation(config("pfedhn", models=(), model="mlp", sizes=("S",), **rounds), tmp_path / "theirs")
    (head,) = ours.strategy.learner.hypernetwork.heads.values()
    head.load_state_dict(theirs.strategy.learner.hypernetwork.heads["S"].state_dict())
    start = theirs.strategy.weights_for(list(theirs.roster))
    ours.run()
    theirs.run()
    pairs = zip(
        ours.strategy.weights_for(list(ours.roster)), theirs.strategy.weights_for(list(theirs.roster)), strict=True
    )
    for (one, other), before in zip(pairs, start, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(other, before)


def test_architectures_share_the_trunk_and_nothing_else() -> None:
    strategy: Any = make_strategy(config(models=()), RUN_ID, Roster(0))
    first, second = join(strategy, 0, MLP), join(strategy, 1, PLAIN)
    before, (old,) = state(strategy), strategy.weights_for([second])
    strategy.update([answer(first, MLP)])
    moved = {name for name, values in strategy.state().items() if name in before and not values.equal(before[name])}
    heads = {name for name in before if ".heads." in name}
    assert moved & heads == {name for name in heads if MLP.digest in name}
    assert any(".trunk." in name for name in moved)
    assert not torch.equal(strategy.weights_for([second])[0], old)
    assert [each.numel() for each in strategy.weights_for([second, first])] == [PLAIN.layout.numel, MLP.layout.numel]


def test_the_head_of_an_architecture_that_joins_late_learns() -> None:
    strategy: Any = make_strategy(config(models=()), RUN_ID, Roster(0))
    strategy.update([answer(join(strategy, 0, MLP), MLP)])
    late, same = join(strategy, 1, DEEP), join(strategy, 2, DEEP)
    before = state(strategy)
    strategy.update([answer(late, DEEP)])
    name = f"hypernetwork.heads.{DEEP.digest}.weight"
    assert not torch.equal(strategy.state()[name], before[name])
    assert strategy.layout_for(same) == DEEP.layout
    assert len(strategy.learner.hypernetwork.heads) == 2


def test_a_head_that_would_be_too_large_is_refused() -> None:
    limit = 9 * (MLP.layout.numel + PLAIN.layout.numel)
    strategy: Any = make_strategy(
        config(models=(), options={"hidden_dim": 8, "max_parameters": limit}), RUN_ID, Roster(0)
    )
    join(strategy, 0, MLP)
    with pytest.raises(RefusedError, match=r"a head for its architecture would make [\d,]+ parameters of at most"):
        join(strategy, 1, DEEP)
    join(strategy, 1, PLAIN)


def test_who_keeps_the_graph_or_another_run_is_refused() -> None:
    strategy: Any = make_strategy(config(models=()), RUN_ID, Roster(0))
    with pytest.raises(RefusedError, match="join with --model and --disclose graph"):
        strategy.check_newcomer(introduction("a", input_shape=(1, 8, 8), num_classes=10))
    with pytest.raises(ConfigError, match="init_from: pfedhn-heads has no way"):
        make_strategy(config(models=(), init_from="elsewhere"), RUN_ID, Roster(0))
