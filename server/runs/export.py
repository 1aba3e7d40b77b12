"""Personal models from a run folder, as far as the server can generate them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbloom.common.data.schema import read_schema
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.files.export import Card, write_model
from hyperbloom.common.gains import MIXTURES, MODELS
from hyperbloom.common.layout import Layout, Weights
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.models import ModelSpec, blank
from hyperbloom.common.secrecy.noise import promise
from hyperbloom.server.runs.lines import read_gains
from hyperbloom.server.runs.trained import read_trained
from hyperbloom.strategies.algorithm import Algorithm, target_spec
from hyperbloom.strategies.exchange import Client
from hyperbloom.strategies.local import Local
from hyperbloom.strategies.odpfl import ODPFL
from hyperbloom.strategies.pfedhn import PFedHN

_SENT = (
    "its name and secret, the version of its program, the sizes of its data sets, the shape of its inputs; weights of "
    "this model and {change}, in each round in which it took part; metrics and mean losses on "
    "validation and test examples, with the counts behind them if its user discloses these"
)
_TOLD = {
    "schema": "what the columns of its table mean",
    "class_shares": "the shares of its classes",
    "moments": "how many numbers it has to learn and in columns without a scale, their means and deviations",
}
_NUMBERED = "The server does not know the names of the outputs; they are numbered as the client numbers them."
_SUM_ALONE = "The result of each training was masked: the server saw the sum over clients alone."


class Export:
    """A finished run whose strategy can generate its clients' models.

    Raises:
        ConfigError: it is not a run folder, or the server does not have the models.
    """

    def __init__(self, run: Path, own_code: bool = False) -> None:
        self.trained = read_trained(run, lambda strategy: _check(strategy, run), own_code)
        # Rows follow the order of joining, so a client that joined after the selected round has no row in its state.
        rows = self.trained.tensors["embeddings"] if isinstance(self.trained.strategy, PFedHN) else None
        self.known = len(self.trained.roster) if rows is None else len(rows)
        self._gains = read_gains(run, self.trained.selection.round)

    def clients(self, name: str | None) -> list[Client]:
        """Return the client with this name, or all that have a model.

        Raises:
            ConfigError: there is no such client, or it joined after the selected round.
        """
        chosen = [client for client in self.trained.roster if name in (None, client.client_id)]
        if not chosen:
            names = ", ".join(client.client_id for client in self.trained.roster)
            raise ConfigError(f"--client: expected one of {names}; found {name!r}")
        with_model = [client for client in chosen if client.row < self.known]
        if not with_model:
            raise ConfigError(f"--client: {name} joined after the kept round {self.trained.selection.round}")
        return with_model

    def model(self, client: Client) -> tuple[nn.Module, ModelSpec, Card]:
        """Return the model of a client, with its card.

        Raises:
            ConfigError: the network has norms with running statistics, which only the client's examples can give; or
                its weights are not finite.
        """
        weights, name = self._weights(client)
        if not weights.values.isfinite().all():
            raise ConfigError(f"{client.client_id}: the weights of its model are not finite: the run has diverged")
        about, task = client.about, self.trained.strategy.setting.task
        spec = target_spec(self.trained.config, about.size, about.input_shape, about.num_classes, task)
        module = blank(spec)
        if any(isinstance(part, _BatchNorm) and part.track_running_stats for part in module.modules()):
            raise ConfigError(
                f"{spec.name} normalises by running statistics, which each client takes from its own examples and "
                f"nobody sends; {_on_its_machine(self.trained.run, quote(client.client_id))}"
            )
        with torch.no_grad():
            for parameter, value in weights.layout.views(weights.values).items():
                module.get_parameter(parameter).copy_(value)
        return module, spec, self._card(client, name)

    def _weights(self, client: Client) -> tuple[Weights, str]:
        """Return the weights that a client has chosen, and which of `MODELS` they are; its own if only it has them."""
        (own,) = self.trained.strategy.personal([client]) or [Weights(Layout(()), torch.empty(0))]
        common = self.trained.strategy.common(client)
        chosen = self._gains[client.client_id][1].chosen if client.client_id in self._gains else "personal"
        first, second, share = MIXTURES.get(chosen, (chosen, chosen, 0.0))
        if common is None or not {first, second} <= {"personal", "common"}:
            return own, "personal"
        ends = {"personal": own.values, "common": common.values}
        return replace(own, values=torch.lerp(ends[first], ends[second], share)), chosen

    def write(
        self, clients: Sequence[Client], folders: Mapping[str, Path], class_names: tuple[str, ...] = ()
    ) -> Iterator[tuple[Path, Sequence[str]]]:
        """Write the models of clients into folders by their names; yield each folder with its files.

        Classes have their names in the client's schema, else numbers, unless `class_names` has others.

        Raises:
            ConfigError: as `model`; there is another number of classes; or a folder cannot be written.
        """
        (scaling, _), task = self.trained.scaling, self.trained.strategy.setting.task.spec
        for client in clients:
            module, spec, card = self.model(client)
            classes, about = spec.num_classes, client.about
            if class_names and len(class_names) != classes:
                raise ConfigError(f"--class-names: expected {classes} names, found {len(class_names)}")
            if len(set(class_names)) < len(class_names):
                raise ConfigError(f"--class-names: expected each name once, found {','.join(class_names)}")
            schema = read_schema(about.schema, f"the schema of {about.client_id}") if about.schema else None
            known = (schema.classes or schema.label) if schema else ()
            called = class_names or known or tuple(str(label) for label in range(classes))
            if not class_names and not known:
                card = replace(card, remarks=(*card.remarks, _NUMBERED))
            folder = folders[about.client_id]
            yield folder, write_model(folder, module, spec, called, scaling, card, task, schema)

    def _card(self, client: Client, name: str) -> Card:
        value, metric = self.trained.selection.test_accuracy.get(client.client_id), self.trained.strategy.metrics[0]
        answer = self._gains.get(client.client_id)
        if answer and name != "personal":
            value = scale_of(metric).factor * answer[1].test[answer[1].models.index(name)]
        scored = "not known" if value is None else f"{scale_of(metric).show(value)} on the client's own test examples"
        origin = {
            "client": client.client_id,
            "strategy": self.trained.config.strategy,
            "run": self.trained.run.resolve().name,
            "round": f"{self.trained.selection.round} of {self.trained.config.rounds}, selected by validation",
            "examples": f"{client.about.train_examples} for training, on the client",
            f"test {title_of(metric)}": scored,
        }
        extras = {"none": ", with the mean training loss", "client": ", with noise", "server": ""}
        change = "what its local training made of them" + extras[self.trained.config.privacy.where]
        told = [words for key, words in _TOLD.items() if getattr(client.about, key)]
        told += ["test metrics of all models that it compared, and its gain"] if answer else []
        sent = (
            f"Between {client.client_id} and the server: {_SENT.format(change=change)}.",
            *([f"It told besides: {'; '.join(told)}."] if told else []),
            *([_SUM_ALONE] if self.trained.config.secure_aggregation else []),
            "Examples and labels stayed on the client.",
        )
        remarks = [self.trained.scaling[1]]
        if answer:
            remarks += [f"{answer[0]}."]
            if answer[1].chosen != name:
                there = _on_its_machine(self.trained.run, quote(client.client_id))
                remarks += [f"It has chosen {MODELS[answer[1].chosen]}, not this; {there}"]
        return Card(f"Personal model of {client.client_id}", origin, sent, self._guarantee(client), tuple(remarks))

    def _guarantee(self, client: Client) -> tuple[str, ...]:
        privacy, path = self.trained.config.privacy, self.trained.run / "privacy.json"
        if privacy.where == "none":
            return ()
        try:
            spent = json.loads(path.read_text())["clients"].get(client.client_id, {"releases": 0})
            return promise(privacy, int(spent["releases"])) if spent["releases"] else ("It has sent no changes.",)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}: expected what each client has spent ({error!r})") from None


def _check(strategy: Algorithm, run: Path) -> None:
    name, there = strategy.config.strategy, _on_its_machine(run)
    if isinstance(strategy, ODPFL):
        raise ConfigError(f"{name}: a model is made on demand; run: flower-server serve {quote(str(run))}")
    if isinstance(strategy, Local):
        raise ConfigError(f"{name}: each client has its own model; {there}")
    if type(strategy).state is Algorithm.state:
        raise ConfigError(f"{name}: it has no `state`, so there is nothing to export")
    if strategy.own_models != "no":
        raise ConfigError(f"{name}: the clients' networks are their own, and only they can write them; {there}")
    if strategy.private != "none":
        raise ConfigError(f"{name}: each client keeps a part of its model to itself; {there}")
    if strategy.recipe(1).refinement:
        raise ConfigError(f"{name}: each client trains the model that it gets before it uses it; {there}")


def _on_its_machine(run: Path, name: str = "NAME") -> str:
    """Return what a client runs on its machine. Virtual and local clients keep their state in the run folder."""
    states = run / "clients"
    state = f" --state-dir {states}/{name}" if states.is_dir() and any(states.iterdir()) else ""
    return f"on its machine run: flower-client export --client-id {name}{state} --data ... --out DIR"
