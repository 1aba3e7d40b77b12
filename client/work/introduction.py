"""A client's introduction, which includes as much of its own model as the server asks for and the user allows.

A user may disclose moments: of regression targets, and of a table's numbers without a scale. With noise Z the mean of
n values with deviation s is told with an error of Z s / sqrt(n), Z standard errors, the logarithm of the deviation
with one of Z / sqrt(2 n), and n itself with one of Z sqrt(n). Noise is drawn once for the same moments and kept: the
mean of many draws would tell them. New ones count as a change (`Releases`).
"""

import hashlib
import json
import logging
import math

from torch import Tensor

from hyperbloom import __version__
from hyperbloom.client.settings import Disclosure
from hyperbloom.client.work.client import Client
from hyperbloom.client.work.own_network import own_graph
from hyperbloom.common.errors import HyperbloomError, RefusedError, WireError
from hyperbloom.common.files.storage import write_json
from hyperbloom.common.models import ModelSpec
from hyperbloom.common.reasons import Reason
from hyperbloom.common.secrecy.keys import server_of
from hyperbloom.common.secrecy.noise import noise
from hyperbloom.common.tasks import Task
from hyperbloom.common.wire.orders import ASKS, Greeting, Introduction, Notice

log = logging.getLogger("hyperbloom.client")

FEWEST_VALUES = 10
"""Fewest values of which moments are told: those of one value are the value."""


def introduce(client: Client, greeting: Greeting) -> Introduction:
    """Return this client's identity, the sizes of its data, and what its model is.

    Raises:
        RefusedError: the server chooses the model of all clients, and this one has its own, or the table does not fit
            the server's schema, or nobody has one but this client, whose user does not disclose what it would say.
        HyperbloomError: the own model failed.
    """
    if greeting.version != __version__:
        log.warning("the server has version %.30r, this client %r; give both the same", greeting.version, __version__)
    client.adopt(greeting.schema)
    settings, schema = client.settings, client.schema
    proposed = schema is not None and settings.data.is_table and settings.source.schema is None
    discloses = settings.disclose_moments and settings.moments_noise is None
    if proposed and not discloses and schema and not schema.text_column:  # that of texts has no numbers and few words
        raise RefusedError(
            "the server has no schema, and one that is proposed from this table would tell its means and words; write "
            "one with `flower-client schema`, read it, and join with --schema, or with --disclose-moments to tell it",
            reason=Reason.UNFIT,
        )
    with client.hide_own_model():
        types, graph = describe_model(client.own, client.settings.disclose, greeting.asks)
    reference, task = greeting.reference, client.task_for(greeting.task)
    return Introduction(
        client_id=client.settings.client_id,
        token=client.state.token(server_of(client.settings.root_certificates), client.settings.server or ""),
        version=__version__,
        size=client.settings.size,
        input_shape=client.input_shape,
        num_classes=client.num_classes,
        train_examples=len(client.train_data),
        val_examples=len(client.val_data),
        test_examples=len(client.test_data),
        class_shares=tuple(client.class_shares.double().tolist()) if client.settings.disclose_class_shares else (),
        types=types,
        graph=graph,
        has_reference=None if reference is None else client.state.reference.is_of({"digest": reference}),
        divisor=client.scaling.divisor,
        mean=client.scaling.mean,
        std=client.scaling.std,
        task=task.spec.name,
        moments=_moments(client, task) if client.settings.disclose_moments else (),
        schema=client.schema.text if client.schema else None,
        backbone=client.backbone,
        meaning=client.meaning,
    )


def _moments(client: Client, task: Task) -> tuple[float, ...]:
    """Return `Introduction.moments`, with the noise that the user wants."""
    data, places = client.train_data, client.schema.open.values() if client.schema else ()
    targets = data.labels.view(len(data), -1).T if task.standardises else ()
    columns = (data.inputs[data.inputs[:, place + 1] == 0, place] for place in places)  # where nothing is missing
    return tuple(each for values in (*targets, *columns) for each in _moments_of(values.double(), client))


def _moments_of(values: Tensor, client: Client) -> list[float]:
    """Return how many values there are, their mean, and their deviation; 0 for all of few values."""
    count, factor, path = len(values), client.settings.moments_noise or 0.0, client.settings.folder / "moments.json"
    if count < FEWEST_VALUES:
        return [0.0, 0.0, 0.0]
    exact = [float(count), float(values.mean()), float(values.std(correction=0))]
    try:
        kept = json.loads(path.read_text()) if path.exists() else {}
        key = hashlib.sha256(json.dumps([factor, *exact]).encode()).hexdigest()
        if key not in kept:
            client.releases.spend("changes")
            _, mean, std = exact
            one, other, third = (factor / math.sqrt(count) * noise(3)).tolist()
            told = min(max(1.0, count * (1 + third)), float(len(client.train_data)))
            kept[key] = [told, mean + one * std, std * math.exp(other / math.sqrt(2))]
            write_json(path, kept, mode=0o600)
        return [float(each) for each in kept[key]]
    except (OSError, ValueError, TypeError) as error:  # without the path, which the server would read
        why = f"cannot be used ({getattr(error, 'strerror', None) or 'it is damaged'}); restore it from a backup"
        raise HyperbloomError(f"{path.name} in the client's state folder {why}") from None


def describe_model(
    spec: ModelSpec | None, disclosure: Disclosure, asks: str | None
) -> tuple[tuple[str, ...] | None, str | None]:
    """Return the layer types and the graph of a client's own model that a strategy `asks` for and the user allows.

    Raises:
        RefusedError: the server chooses the model of all clients, and this one has its own.
        WireError: the server asks for something unknown.
    """
    if asks is not None and asks not in ASKS:
        raise WireError(f"greeting: expected asks to be one of {ASKS}, found {asks!r}")
    if spec is None:
        return None, None
    if asks is None:
        raise RefusedError("the server of this run chooses the model; join without --model", reason=Reason.UNFIT)
    if asks == "own":
        return (), None  # only that there is one
    graph = own_graph(spec)
    if asks == "graph":
        return None, graph.to_json() if disclosure == "graph" else None
    return tuple(map(str, graph.types)), None


def take_notice(client: Client, notice: Notice) -> Notice:
    """Delete the earlier versions for a complete run. The client's runtime acts on the rest of the notice."""
    if notice.complete is not None:
        client.state.forget_earlier(notice.complete)
    return notice
