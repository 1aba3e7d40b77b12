"""pFedHN and pFedHN-PC: one hypernetwork on the server generates a model for every client.

Aviv Shamsian, Aviv Navon, Ethan Fetaya, Gal Chechik: Personalized Federated Learning using Hypernetworks, ICML 2021,
https://arxiv.org/abs/2103.04628.

    theta_i  = h(v_i; phi)                          weights of client i from its embedding v_i
    client:    K steps of SGD from theta_i on its own data give theta_i~
    delta_i  = theta_i~ - theta_i                   all that the client sends back
    server:    (d theta_i / d[phi, v_i])^T (-delta_i)   is the gradient for its persistent optimiser

Departures: a round may have a cohort (`options.update` decides how its replies are applied); the paper has one client
per round. Unless `options.start=hypernetwork`, h writes deviations from one network w. They are zero at first. w moves
by the mean change of a cohort of C out of n clients, in which all count alike. A few say little of the absent ones, so
it is shrunk: to the n-th part of a change in a cohort of one, and not at all where no client is absent.

    theta_i = w + h(v_i; phi)
    server:   w <- w + s with s = (1 - 1 / C + 1 / n) mean_i delta_i
              then phi and v_i learn from theta_i~ - w - h(v_i; phi): from delta_i - s if theta_i is w + h(v_i; phi)

What a client made of theta_i in its last training is its own. Since then only w has moved:

    w + d_i with d_i = theta_i~ - w after that round

A client with n_i examples begins its training between what is written and its own, the nearer to its own the lower the
learning rate is, r times that of the first round. With many examples its head begins nearer to its own, and its body
nearer to the network for all: bodies that drift apart over many rounds overfit.

    m_i = min(1, FEW / n_i)
    theta_i = w + (1 - a_i) h(v_i; phi) + a_i d_i    in the head, a_i = 1 - r m_i
    theta_i = w + m_i (r h(v_i; phi) + (1 - r) d_i)  in the body

It is scored with, and uses, the same with r = 0: its own weights if it has few examples, its own head on a body near to
that for all if it has many. A client that has not trained yet takes w + h(v_i; phi). `options.personal=written` does so
always, with s = 1/n sum_i delta_i: no training of a client's own evens out what one cohort moves w by.

Secure aggregation is impossible, because the server needs each client's own delta.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hyperbloom.common import models
from hyperbloom.common.config import Count, NonNegative, Positive, Rate, Section
from hyperbloom.common.errors import ConfigError, RefusedError
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.seeds import derive
from hyperbloom.common.wire.orders import Introduction
from hyperbloom.strategies.algorithm import Algorithm, Setting
from hyperbloom.strategies.exchange import Client, Exchanges, Update
from hyperbloom.strategies.hypernetworks import ChunkedHypernetwork, EmbeddingTable, Hypernetwork, MLPHypernetwork
from hyperbloom.strategies.hypernetworks.learner import HypernetworkLearner, Reply, UpdateRule, by_size
from hyperbloom.strategies.turn import Turn

OVERLAP = 32
"""Recent replies that asynchronous mode keeps for `overlap`, each as large as the target network."""

FEW = 1000
"""Most training examples with which a client begins at what the hypernetwork writes while the rate is the first."""


class PFedHNOptions(Section):
    """Options of pFedHN; the defaults of rates, momentum, decay and widths are the values of the authors' code."""

    learning_rate: Rate = Field(1e-2, description="learning rate of the hypernetwork")
    embedding_learning_rate: Rate | None = Field(None, description="learning rate of the embeddings; default: the same")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="momentum of the server's SGD")
    weight_decay: NonNegative = Field(1e-3, description="weight decay of the server's SGD")
    clip: Rate | None = Field(
        None,
        description="total norm to which the server's gradient is clipped; default: 50 as in the authors' code, with "
        "start: common the smaller of 10 and 0.1 / learning_rate",
    )
    update: UpdateRule = Field("proximal", description="how a cohort's replies are applied: proximal or mean")
    embedding_dim: Count | None = Field(None, description="dimension k of an embedding; default: 1 + clients // 4")
    embeddings: Literal["dense", "sparse"] = Field(
        "dense", description="dense: momentum and decay move absent clients' rows too, as in the paper's code"
    )
    descriptor: Literal["learned", "class-shares"] = Field(
        "learned", description="class-shares: given by the clients (--disclose-class-shares), not learned"
    )
    hypernetwork: Literal["mlp", "chunked"] = Field("mlp", description="chunked: one head writes a network in chunks")
    chunk: Positive = Field(16_384, description="chunked: weights that the head writes at a time")
    chunk_dim: Count = Field(64, description="chunked: dimension of a chunk's embedding")
    start: Literal["common", "hypernetwork"] = Field(
        "common",
        description="common: deviations from one network for all, which is averaged; hypernetwork: the paper's",
    )
    hidden_dim: Count = Field(100, description="width of the hypernetwork's trunk")
    hidden_layers: Annotated[int, Field(ge=0, le=100)] = Field(3, description="hidden layers of the trunk")
    clip_deltas: Rate | Literal["median"] | None = Field(
        None, description="norm to which each client's change is clipped, or median: the cohort's (docs/failures.md)"
    )
    personal: Literal["trained", "written"] | None = Field(
        None,
        description="the model that a client uses; trained: what it made of the written one in its last training, with "
        "more than 1,000 examples its head on a body near to that for all; "
        "written: as in the paper; default: trained with start: common, unless the run adds noise",
    )
    freeze: bool = Field(False, description="with init_from: learn only the embeddings of novel clients (section 5.3)")


def clip_changes(replies: Sequence[Reply], norm: float | Literal["median"]) -> list[Reply]:
    """Return a cohort's replies, in their order, with changes of at most `norm`; `median`: of the norms of one size.

    So a few clients cannot steer learning by large changes.
    """
    clipped: dict[int, Reply] = {}
    for _, group in by_size(replies):
        deltas = clip_norms(torch.stack([reply.delta for reply in group]), norm)  # (C, P)
        clipped |= {reply.row: replace(reply, delta=row) for reply, row in zip(group, deltas, strict=True)}
    return [clipped[reply.row] for reply in replies]


def shrunk_mean(deltas: Tensor, clients: int) -> Tensor:
    """Estimate the mean change `(P,)` of all `clients` from those of a cohort, `(C, P)`.

    The cohort's mean m has the variance (1 - C / n) V / C, where V is that of a client's change. The estimate is
    m (1 - variance / |m|^2), as James and Stein shrink (1961), with V = |m|^2: clients that differ from m as much as m
    differs from no change.
    """
    return deltas.mean(0) * (1 - 1 / len(deltas) + 1 / clients)


def few_of(client: Client) -> float:
    """Return m_i: 1 for a client with at most `FEW` training examples, and the less the more it has."""
    return min(1.0, FEW / client.about.train_examples)


def clip_norms(deltas: Tensor, norm: float | Literal["median"]) -> Tensor:
    """Return `(C, P)` with each row scaled down to at most `norm`; `median`: the median of the rows' norms."""
    norms = torch.linalg.vector_norm(deltas, dim=1, keepdim=True)  # (C, 1)
    # The median is the lower one of an even number: half of the clients must not be able to raise it.
    limit = norms.median() if norm == "median" else torch.tensor(norm).to(norms)
    return deltas * (limit / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_max(1.0)


class PFedHN(Algorithm):
    """Personal weights for every client from one hypernetwork (algorithm 1)."""

    options: PFedHNOptions
    learner: HypernetworkLearner
    asynchronous = True
    noise_at: ClassVar[tuple[str, ...]] = ("client",)

    def check(self) -> None:
        """Refuse options that contradict each other, such as a frozen hypernetwork without a run to take it from."""
        options = self.options
        if options.freeze and not self.config.init_from:
            raise ConfigError("options.freeze: expected init_from to name the run whose hypernetwork to keep")
        if options.freeze and options.descriptor == "class-shares":
            raise ConfigError("options.freeze: expected descriptor: learned, or nothing is learned; found class-shares")
        if self.config.asynchronous and options.clip_deltas == "median":
            raise ConfigError("options.clip_deltas: a cohort is needed to compare with; asynchronous has none")
        self.keeps_sent = self.uses_trained
        self._known_rows = 0  # number of rows that came with a frozen hypernetwork; they stay fixed
        self._rate = 1.0  # r: the learning rate of this round's local training by that of the first round

    @property
    def uses_trained(self) -> bool:
        """Return whether a client's model is the one that it trained last. Noise would cover it in full."""
        chosen, is_plain = self.options.personal, self.config.privacy.where == "none"
        return chosen == "trained" or (chosen is None and self.options.start == "common" and is_plain)

    def build(self, setting: Setting) -> None:
        """Make hypernetwork, embedding table and optimiser from the run's seed."""
        super().build(setting)
        specs = [replace(setting.spec, size=size) for size in setting.layouts]
        self._heads = {spec.size: {name for name, _ in models.head_layout(spec).shapes} for spec in specs}
        fixed = self.options.descriptor == "class-shares"
        self.make(setting.spec.num_classes if fixed else self.options.embedding_dim or 1 + self.config.clients // 4)

    def make(self, dim: int) -> None:
        """Make all networks for descriptors of dimension `dim`."""
        options, layouts = self.options, dict(self.setting.layouts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.config.seed, "hypernetwork"))
            network = self.hypernetwork(layouts, dim)
            if options.start == "common" or not self.setting.spec.is_new:  # or where a pretrained network is
                network.start_at({size: self.setting.first_values(size, self.config.seed) for size in layouts})
        self.learner = HypernetworkLearner(
            network.to(self.device),
            EmbeddingTable(dim, self.config.seed, trainable=options.descriptor == "learned").to(self.device),
            learning_rate=options.learning_rate,
            embedding_learning_rate=options.embedding_learning_rate,
            momentum=options.momentum,
            weight_decay=options.weight_decay,
            clip=options.clip or (min(10.0, 0.1 / options.learning_rate) if options.start == "common" else 50.0),
            sparse=options.embeddings == "sparse",
            freeze=options.freeze,
        )
        self._applied: deque[Reply] = deque(maxlen=0 if self.uses_trained else OVERLAP)  # else what h lacks is of now
        self._trained: dict[int, Tensor] = {}  # by row: d_i `(P,)`

    def hypernetwork(self, layouts: Mapping[str, Layout], dim: int) -> Hypernetwork:
        """Return a new hypernetwork for descriptors of dimension `dim`."""
        options = self.options
        common = layouts, dim, options.hidden_dim, options.hidden_layers
        if options.hypernetwork == "mlp":
            return MLPHypernetwork(*common)
        return ChunkedHypernetwork(*common, options.chunk, options.chunk_dim)

    def serves(self, about: Introduction, others: Iterable[Introduction]) -> None:
        """Refuse a client without class shares if they are the descriptors."""
        if self.options.descriptor == "class-shares" and len(about.class_shares) != about.num_classes:
            raise RefusedError("this run describes clients by their class shares; join with --disclose-class-shares")

    def join(self, client: Client, first: bool) -> None:
        """Add an embedding row for a new client."""
        super().join(client, first)
        shares, given = torch.tensor(client.about.class_shares), self.options.descriptor == "class-shares"
        # With one class as long as a learned one at its start: a hypernetwork learns slowly from shorter ones.
        descriptor = shares * len(shares) ** 0.5 if given else None
        if client.row >= len(self.learner.table.weight):  # also of one that joined after the state that we go back to
            self.learner.grow(client.client_id, descriptor)
        elif descriptor is not None:
            self.learner.table.weight.data[client.row] = descriptor

    def trains(self, client: Client) -> bool:
        """Return True, but with a frozen hypernetwork only for clients that it never trained on."""
        return client.row >= self._known_rows

    def round(self, turn: Turn) -> Exchanges[None]:
        """Let the cohort train. At a low rate, training would not get back from what is written to a client's own."""
        self._rate = turn.sgd.learning_rate / self.config.local.learning_rate
        yield from super().round(turn)

    def weights(self, clients: Sequence[Client]) -> list[Weights]:
        """Return theta_i, with one forward pass for all clients of a head."""
        return self._between(clients, self._rate)

    def personal(self, clients: Sequence[Client]) -> list[Weights]:
        """Return theta_i with r = 0; what is written, where a client has not trained with a network of this size."""
        return self._between(clients, 0.0)

    def _between(self, clients: Sequence[Client], rate: float) -> list[Weights]:
        own, starts = self._own(clients), self._starts(clients)
        done = [row if (1 - rate) * few_of(client) == 1 else None for client, row in zip(clients, own, strict=True)]
        asked = [client for client, row in zip(clients, done, strict=True) if row is None]
        written = iter(self.by_head(asked, self.learner.generate))
        return [
            Weights(self.layout(client), final)
            if final is not None
            else self._mix(client, next(written), row, starts[self.head_of(client)], rate)
            for client, row, final in zip(clients, own, done, strict=True)
        ]

    def _mix(self, client: Client, written: Weights, own: Tensor | None, start: Tensor, rate: float) -> Weights:
        """Return weights between what is written and a client's own `(P,)`, the body near to w with many examples."""
        if own is None:
            return written
        few, values = few_of(client), torch.lerp(written.values, own, 1 - rate)
        if self.options.start == "common":
            values = torch.lerp(start, values, few)
        for name, part, _ in written.layout.slices():
            if name in self._heads[client.about.size]:
                values[part] = torch.lerp(written.values[part], own[part], 1 - rate * few)
        return replace(written, values=values)

    def _own(self, clients: Sequence[Client]) -> list[Tensor | None]:
        """Return w + d_i `(P,)` of each client that has trained with a network of its present size, else None."""
        starts, known = self._starts(clients), [self._trained.get(client.row, torch.empty(0)) for client in clients]
        return [
            starts[self.head_of(c)] + row if len(row) == self.layout(c).numel else None
            for c, row in zip(clients, known, strict=True)
        ]

    def _starts(self, clients: Sequence[Client]) -> dict[str, Tensor]:
        """Return w `(P,)` of each head of some clients. It is copied from the device, so not once for each client."""
        return {head: self.learner.hypernetwork.start(head) for head in {self.head_of(client) for client in clients}}

    def by_head(self, clients: Sequence[Client], write: Callable[[list[int], str], Tensor]) -> list[Weights]:
        """Return each client's weights; `write` is called once per head with all its rows, and returns `(n, P)`."""
        weights: dict[int, Weights] = {}
        for head, group in groupby(sorted(clients, key=self.head_of), key=self.head_of):
            some = list(group)
            values = write([client.row for client in some], head)
            weights |= {c.row: Weights(self.layout(c), row) for c, row in zip(some, values, strict=True)}
        return [weights[client.row] for client in clients]

    def learn(self, updates: Sequence[Update]) -> None:
        """Move w by the mean change, and step with phi and v_i towards what clients made of their weights, w + d_i."""
        options, replies = self.options, []
        for update in updates:
            assert update.returned is not None
            replies.append(Reply(update.client.row, self.head_of(update.client), update.returned))
        if options.clip_deltas is not None:
            replies = clip_changes(replies, options.clip_deltas)
        if options.start == "common" and not options.freeze:
            replies = self._average(replies)
        if self.uses_trained:
            replies = self._keep(updates)
        if self.config.asynchronous:
            for update, reply in zip(updates, replies, strict=True):
                applied = list(self._applied)  # those while this client trained are corrected for
                self.learner.update_asynchronously(reply, applied[max(0, len(applied) - update.staleness) :])
                self._applied.append(reply)
        else:
            self.learner.update(replies, options.update)

    def _keep(self, updates: Sequence[Update]) -> list[Reply]:
        """Keep d_i, after w has moved; return what h lacks, clipped as changes are: a client chooses it by d_i."""
        clients, lacks = [update.client for update in updates], []
        starts, written = self._starts(clients), self.by_head(clients, self.learner.generate)
        for update, now in zip(updates, written, strict=True):
            assert update.sent is not None and update.returned is not None
            head, trained = self.head_of(update.client), update.sent + update.returned
            self._trained[update.client.row] = trained - starts[head]
            lacks.append(Reply(update.client.row, head, trained - now.values))
        return lacks if self.options.clip_deltas is None else clip_changes(lacks, self.options.clip_deltas)

    def _average(self, replies: Sequence[Reply]) -> list[Reply]:
        """Move the network for all by the cohort's mean change, shrunk; return what is left, if that is learned."""
        left: list[Reply] = []
        for head, group in by_size(replies):
            of_head = {*self._rows_of(head), *(reply.row for reply in group)}  # one may have come back in another size
            deltas, n = torch.stack([reply.delta for reply in group]), len(of_head)
            step = shrunk_mean(deltas, n) if self.uses_trained else deltas.sum(0) / n
            self.learner.hypernetwork.move_start(head, step)
            if not self.uses_trained:  # else what h lacks is learned
                left += [replace(reply, delta=reply.delta - step) for reply in group]
        return sorted(left, key=lambda reply: reply.row)

    def _rows_of(self, head: str) -> list[int]:
        """Return the rows of the clients that train and have this head."""
        known = len(self.learner.table.weight)
        trained = (c for row, c in sorted(self.clients.items()) if row < known and not self.config.is_novel(row))
        return [client.row for client in trained if self.head_of(client) == head]

    def common(self, client: Client) -> Weights | None:
        """Return the mean of the weights of all clients that train and have this client's head."""
        head = self.head_of(client)
        rows = self._rows_of(head) if self.private == "none" else []
        return Weights(self.layout(client), self.learner.average(rows, head)) if rows else None

    def head_of(self, client: Client) -> str:
        """Return the name of the head that generates a client's weights: the size of its network."""
        return client.about.size

    def state(self) -> dict[str, Tensor]:
        """Return hypernetwork, embeddings, the optimiser's momentum, and d_i of each client."""
        return self.learner.state() | {f"trained.{row}": values for row, values in sorted(self._trained.items())}

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the state and the number of rows that came with a frozen hypernetwork."""
        return self.state() | {"known_rows": torch.tensor(self._known_rows)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore everything, momentum included."""
        self._known_rows = int(tensors["known_rows"])
        if tensors["embeddings"].shape[1] != self.learner.table.dim:  # as in the run that this one started from
            self.make(tensors["embeddings"].shape[1])
        self.learner.load(tensors)
        self._load_trained(tensors)

    def _load_trained(self, tensors: Mapping[str, Tensor]) -> None:
        prefix = "trained."
        own = {int(name.removeprefix(prefix)): value for name, value in tensors.items() if name.startswith(prefix)}
        self._trained = own if self.uses_trained else {}

    def check_start(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors without embeddings of the right dimension."""
        if "embeddings" not in tensors:
            raise ConfigError(f"init_from: expected a run of pfedhn or pfedhn-pc, found tensors {sorted(tensors)[:3]}")
        found, wanted = tensors["embeddings"].shape[1], self.options.embedding_dim
        if wanted is not None and wanted != found:
            raise ConfigError(f"options.embedding_dim: expected {found} of init_from, found {wanted}")

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from another run's hypernetwork and embeddings, with a fresh optimiser."""
        self.check_start(tensors)
        found = tensors["embeddings"].shape[1]
        if self.options.descriptor == "learned":
            self.make(found)
        elif self.learner.table.dim != found:
            shares = f"the shares of {self.learner.table.dim} classes"
            raise ConfigError(f"options.descriptor: expected {found} numbers each, as in init_from, found {shares}")
        try:
            self.learner.load(tensors, with_momentum=False)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise ConfigError(f"init_from: its hypernetwork is of another shape than this run's: {reason}") from None
        self._load_trained(tensors)
        if self.options.freeze:
            self._known_rows = len(self.learner.table.weight)


class PFedHNPCOptions(PFedHNOptions):
    """Options of pFedHN-PC. The authors' code uses a larger learning rate here."""

    learning_rate: Rate = Field(5e-2, description="learning rate of the hypernetwork")


class PFedHNPC(PFedHN):
    """pFedHN with a personal classifier: h writes the feature extractor, the last layer never leaves the client."""

    options: PFedHNPCOptions
    private = "head"
