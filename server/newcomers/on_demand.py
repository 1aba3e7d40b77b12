"""Models on demand: encoder down, descriptor up, weights down, for as many newcomers as come at once.

It works over any Flower grid, as `federation` does, but without a roster: a newcomer has no name, and is forgotten
once it has its model.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import RecordDict
from safetensors.torch import load_file
from torch import Tensor

from hyperbloom.common.encoders import descriptor_layout
from hyperbloom.common.errors import ConfigError, WireError, describe
from hyperbloom.common.layout import Weights
from hyperbloom.common.newcomers import best_of, expect, says
from hyperbloom.common.wire.newcomers import Delivery, Description, Offer
from hyperbloom.common.wire.orders import Failed, Notice, Order
from hyperbloom.common.wire.pack import FAILED, shown, unpack_answer
from hyperbloom.server.loop.exchange import slices
from hyperbloom.server.loop.post import Failure, Grid, Pause, Post
from hyperbloom.server.loop.session import baseline_config
from hyperbloom.server.runs.checkpoint import DAMAGED
from hyperbloom.server.runs.lines import phase_folder
from hyperbloom.server.runs.recorded import read_summary
from hyperbloom.server.runs.trained import Trained, restored
from hyperbloom.strategies.algorithm import Algorithm
from hyperbloom.strategies.odpfl import ODPFL

VISIT_EVERY_S = 0.1
TTL_S = 600.0
USUAL = 0.95
"""Share of the training clients whose distance to their nearest neighbour counts as usual."""
FLOOR = 0.01
"""Floor of the variance in each dimension, as a share of the mean variance over all dimensions."""
FEWEST = 3
"""Fewest clients for an estimate of usual distances."""
SAMPLE = 1000
"""Most clients whose nearest distances are computed; all of ten thousand would take 800 MB."""


def check_on_demand(strategy: Algorithm) -> None:
    """Raise a ConfigError for a strategy that needs more than a descriptor from a newcomer."""
    if not isinstance(strategy, ODPFL):
        raise ConfigError(
            f"{strategy.config.strategy}: expected a run of odpfl, whose models need no training; from others: "
            "flower-server export"
        )


class ModelMaker:
    """Encoder and hypernetwork of a trained run of odpfl."""

    def __init__(self, trained: Trained) -> None:
        strategy = trained.strategy
        assert isinstance(strategy, ODPFL) and strategy.setting is not None
        self._strategy = strategy
        self.layouts = dict(strategy.setting.layouts)
        scaling, known_by = trained.scaling
        members = {c.about.size: c for c in trained.roster if not trained.config.is_novel(c.row)}
        unknown = expect((), (), len(strategy.descriptors_of_trained()), strategy.metrics[0])
        own = trained.selection.newcomers or unknown  # earlier versions did not ask
        told = read_summary(trained.run)
        rivals = [told[name].newcomers for name in trained.config.baselines if name in told]
        expected = best_of([own, *rivals], strategy.metrics[0]) or own
        source = _baseline(trained, expected.of) if expected.of else strategy
        found = {size: source.common(client) for size, client in members.items()}
        self._common = {size: weights.values for size, weights in found.items() if weights is not None}
        self._share = expected.share
        self.offer = Offer(
            run=trained.run.resolve().name,
            round=told[expected.of].round if expected.of else trained.selection.round,
            clients=sum(not trained.config.is_novel(client.row) for client in trained.roster),
            expected=says(expected, strategy.metrics[0]),
            model=strategy.setting.spec.name,
            sizes=tuple(trained.config.sizes),
            input_shape=strategy.setting.spec.input_shape,
            num_classes=strategy.setting.spec.num_classes,
            scaling=scaling,
            encoder=strategy.encoder.spec.name,
            dim=strategy.encoder.spec.dim,
            encoder_version=strategy.encoder.version,
            weights=strategy.encoder.weights,
            scaling_known_by=known_by,
            task=strategy.setting.task.spec,
            metric=strategy.metrics[0],
            adapt=trained.config.adapt,
            backbones=strategy.setting.backbones,
            shares=tuple(self._share if size in self._common else 1.0 for size in trained.config.sizes),
            meaning=next((c.about.meaning for c in trained.roster if c.about.meaning), None),
            schema=next((client.about.schema for client in trained.roster), None),
        )
        self._familiar = _Familiar(strategy.descriptors_of_trained())

    def check(self, description: Description) -> None:
        """Raise a WireError for a description from which no model can be made."""
        if description.size not in self.layouts:
            raise WireError(f"expected --size to be one of {', '.join(self.layouts)}, found {description.size!r}")
        if description.encoder_version != self.offer.encoder_version:
            raise WireError(f"expected a descriptor of encoder {self.offer.encoder_version}; join again")
        description.weights.check(descriptor_layout(self.offer.dim), self.offer.weights.values.dtype)
        description.weights.check_norm()

    def unlike(self, descriptors: Sequence[Tensor]) -> list[bool]:
        """Return for each descriptor `(k,)` whether it is unlike all training clients, so that its weights are a guess.

        The answer is a yes or no without distances. Joining often enough reveals these, too (docs/on-demand.md).
        """
        return (~self._familiar(torch.stack(list(descriptors)))).tolist()

    @torch.no_grad()
    def write(self, descriptors: Sequence[Tensor], size: str) -> Tensor:
        """Return weights `(n, P)` for n descriptors `(k,)`, in one pass, mixed with those of the model for all."""
        written = self._strategy.learner.write(torch.stack(list(descriptors)), size)
        common = self._common.get(size)
        return written if common is None else common.lerp(written, self._share)


def _baseline(trained: Trained, name: str) -> Algorithm:
    """Return a baseline of a run as it was in the round that validation selected; ConfigError if that is damaged."""
    path = phase_folder(trained.run, trained.config, name) / "hypernetwork.safetensors"
    try:
        return restored(baseline_config(trained.config, name), load_file(path), trained.roster)
    except DAMAGED as error:
        raise ConfigError(f"{path}: expected the model for all of {name}: {describe(error)}") from None


class _Familiar:
    """Tells which descriptors `(n, k)` are as near to a training client as the share `USUAL` of these to each other.

    So one in twenty newcomers that are like the clients counts as unlike. Distances are Mahalanobis distances: blurred
    or rotated images move a descriptor a little, in directions in which clients hardly differ.
    """

    def __init__(self, known: Tensor) -> None:
        known, count = known.double(), len(known)
        self._axes = torch.eye(known.shape[1], dtype=known.dtype)
        self._known, self._usual = known, torch.tensor(torch.inf)  # infinite with too few clients
        if count < FEWEST:
            return
        apart = known - known.mean(0)
        floor = FLOOR * apart.square().mean() + torch.finfo(known.dtype).tiny
        scatter = apart.T @ apart / (count - 1)
        self._axes = torch.linalg.cholesky(torch.linalg.inv(scatter + floor * self._axes))
        self._known, apart = known @ self._axes, apart @ self._axes
        # A client's own distance uses the scatter of the others, as a newcomer's does: with few clients in many
        # dimensions, each influences the scatter. The Sherman-Morrison formula removes its share.
        some, share = apart[:SAMPLE], count / (count - 1) ** 2
        along = (some * some).sum(1, keepdim=True) - some @ apart.T
        own = share / (1 - share * (some * some).sum(1, keepdim=True)).clamp_min(torch.finfo(known.dtype).eps)
        squares = torch.cdist(some, apart).square() + own * along.square()
        nearest = squares.fill_diagonal_(torch.inf).amin(1).mul((count - 2) / (count - 1)).sqrt()
        self._usual = nearest.quantile(USUAL, interpolation="higher")

    def __call__(self, descriptors: Tensor) -> Tensor:
        if self._usual.isinf():
            return torch.ones(len(descriptors), dtype=torch.bool)
        return torch.cdist(descriptors.double() @ self._axes, self._known).amin(1) <= self._usual


@dataclass
class OnDemandService:
    """Serves newcomers, and counts them; `on_event` receives a line for each one that could not be served."""

    grid: Grid
    maker: ModelMaker
    on_event: Callable[[str], None] = lambda text: None
    served: int = 0
    _met: set[int] = field(default_factory=set)
    _visited: float = -VISIT_EVERY_S

    def __post_init__(self) -> None:
        self.post = Post(self.grid)

    def serve(self) -> None:
        """Serve until interrupted."""
        pause = Pause(self.post.wait)
        while True:
            served, came = self.served, self.poll()
            if self.served > served:
                self.on_event(f"models delivered: {self.served}")
            pause.take(bool(came))

    def poll(self) -> int:
        """Process what has come and send what is due; return the number of messages that came."""
        self._visit()
        arrivals = self.post.poll()
        described: list[tuple[int, Description]] = []
        for arrival in arrivals:
            node, asked = arrival.letter.node, arrival.letter.kind
            if asked is Offer and (description := self._accept(node, arrival.content)):
                described.append((node, description))
            elif asked is Delivery and not isinstance(arrival.content, Failure):
                kept = FAILED not in arrival.content
                self.served += kept
                what = "the model is delivered" if kept else "it could not use the model; its own log says why"
                self._send([(node, Notice("finished" if kept else "refused", what))])
        self._deliver(described)
        return len(arrivals)

    def _visit(self) -> None:
        """Send the offer to new nodes, and again to those that were silent for too long; forget those that left."""
        now = time.monotonic()
        if now - self._visited < VISIT_EVERY_S:
            return
        self._visited = now
        present = {node.node_id for node in self.grid.get_nodes()}
        silent = {letter.node for letter in self.post.open(Offer) if now - letter.sent >= TTL_S}
        newcomers = sorted(present - (self._met - silent))
        self._met = present
        self.post.keep(lambda letter: letter.node in present and now - letter.sent < TTL_S)
        self._send([(node, self.maker.offer) for node in newcomers])

    def _accept(self, node: int, content: RecordDict | Failure) -> Description | None:
        try:
            if isinstance(content, Failure):
                raise WireError(f"it took no offer ({content.text}); is it `flower-client join`?")
            description = unpack_answer(Description, content)
            if isinstance(description, Failed):
                raise WireError(description.text)
            self.maker.check(description)
            return description
        except WireError as error:
            why = shown(str(error))  # it may quote the description
            self.on_event(f"refused node {node}: {why}")
            self._send([(node, Notice("refused", why))])
            return None

    def _deliver(self, described: Sequence[tuple[int, Description]]) -> None:
        """Generate and send the weights of all waiting newcomers, as many at once as memory allows."""
        for size in sorted({description.size for _, description in described}):
            waiting = [(node, description) for node, description in described if description.size == size]
            layout = self.maker.layouts[size]
            for some in slices(waiting, layout.numel):
                descriptors = [description.weights.values for _, description in some]
                rows, unlike = self.maker.write(descriptors, size), self.maker.unlike(descriptors)
                nodes = [node for node, _ in some]
                deliveries = [Delivery(Weights(layout, row), far) for row, far in zip(rows, unlike, strict=True)]
                self._send(list(zip(nodes, deliveries, strict=True)))

    def _send(self, messages: Sequence[tuple[int, Order]]) -> None:
        self.post.send([(node, message, None) for node, message in messages], ttl=TTL_S)
