"""Orders as a server might send them to the clients of `conftest`, and clients that answer them."""

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor

from hyperbloom.client.app import HANDLERS
from hyperbloom.client.work.client import Client
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.models import ModelSpec, body_layout, build, full_layout
from hyperbloom.common.wire.masks import Masking
from hyperbloom.common.wire.orders import SGD, EvaluateOrder, Order, Refinement, Scope, Target, TrainOrder

SPEC = ModelSpec("mlp", "M", (1, 8, 8), 10)
FULL, BODY = full_layout(SPEC), body_layout(SPEC)
LAYOUTS = {"none": FULL, "head": BODY}
PARTS = {"scope": Scope, "target": Target, "sgd": SGD, "refinement": Refinement, "masking": Masking}
COMMON: dict[str, Any] = {"run_id": "run-1", "round": 1, "model": "mlp", "num_classes": 10, "seed": 5}
STEPS: dict[str, Any] = {
    "steps": 4,
    "batch_size": 8,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "clip": 50.0,
}

OrderT = TypeVar("OrderT")


def answer(client: Client, order: Order) -> Any:
    """Return what a client answers, as its app does without the wire between, or raise why there is none."""
    return HANDLERS[type(order)](client, order)


class Worker(Client):
    """A client that answers orders."""

    answer = answer


def arrange(kind: type[OrderT], **values: Any) -> OrderT:
    """Return an order from values in any order, each put into the part that it belongs to."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for part, made in PARTS.items():
        inside = {field.name: values.pop(field.name) for field in dataclasses.fields(made) if field.name in values}
        if part in names and inside and part not in values:
            values[part] = made(**inside)  # type: ignore[operator]
    return kind(**values)


def change(order: OrderT, **values: Any) -> OrderT:
    """Return an order with some values replaced, in whichever part they are."""
    for part, made in PARTS.items():
        inside = {field.name: values.pop(field.name) for field in dataclasses.fields(made) if field.name in values}
        if inside:
            values[part] = dataclasses.replace(getattr(order, part), **inside)
    return dataclasses.replace(order, **values)  # type: ignore[type-var]


def initial(layout: Layout = FULL, seed: int = 0) -> Weights:
    """Return weights as a server might send them."""
    torch.manual_seed(seed)
    return Weights(layout, layout.flatten(dict(build(SPEC).named_parameters())))


def train_order(private: str = "none", reply: str = "delta", **changes: Any) -> TrainOrder:
    """Return an order that a worker of `conftest` accepts."""
    weights = None if private == "all" else initial(LAYOUTS.get(private, FULL))
    return arrange(TrainOrder, **{**COMMON, **STEPS, "weights": weights, "private": private, "reply": reply, **changes})


def evaluate_order(private: str = "none", **changes: Any) -> EvaluateOrder:
    """Return the order to evaluate what `train_order` trains."""
    weights = None if private == "all" else initial(LAYOUTS.get(private, FULL))
    return arrange(EvaluateOrder, **{**COMMON, "weights": weights, "private": private, **changes})


def values_of(weights: Weights | None) -> Tensor:
    """Return the vector of weights that must be there."""
    assert weights is not None
    return weights.values
