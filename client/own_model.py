"""A client's own model, from its state folder into a model folder."""

from pathlib import Path

from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.state import ClientState
from hyperbloom.client.training import FlatPart, evaluate, settle_norms
from hyperbloom.common.data import data_source
from hyperbloom.common.errors import ConfigError
from hyperbloom.common.export import Card, write_model
from hyperbloom.common.layout import Layout
from hyperbloom.common.models import ModelSpec, build_own

__all__ = ["write_own_model"]


def write_own_model(settings: ClientSettings, run: str | None, folder: Path) -> list[str]:
    """Write the model that a client trained for itself in a run of strategy local; returns the names of the files.

    Args:
        settings: name, state folder, data, model and size, as the client joined.
        run: part of the run's id, None if the state folder knows of one run only.
        folder: where to.

    Raises:
        ConfigError: no such run, or several.
        HyperbloomError: the file is damaged or belongs to another architecture.
    """
    run_id = _run_id(settings.folder, run)
    source = data_source(settings.data)
    data = source.client(settings.data.partition)
    assert settings.model is not None
    spec = ModelSpec.choose(settings.model, settings.size, data.input_shape, data.num_classes)
    module = build_own(spec)
    part = FlatPart(module, Layout.of(module))
    if not ClientState(settings.folder).load_personal(run_id, part):
        raise ConfigError(f"--run: {run_id} has left nothing in {settings.folder}")
    settle_norms(module, data.train)
    score = evaluate(module, data.test)
    origin = {
        "client": settings.client_id,
        "strategy": "local: trained on this machine alone",
        "run": run_id,
        "round": "the last in which this client trained",
        "examples": f"{len(data.train)} for training",
        "test accuracy": f"{100 * score.accuracy:.1f} % on {score.total} examples of its own",
    }
    sent = (
        "Of this model: counts of right answers.",
        "Beside it: the client's name and secret, the sizes of its data sets, the shape of its inputs.",
    )
    card = Card(f"Own model of {settings.client_id}", origin, sent)
    return write_model(folder, module, spec, data.class_names, source.scaling, card)


def _run_id(state: Path, wanted: str | None) -> str:
    """Return the id of the run whose personal part is the whole model: that of a part is refused by its layout."""
    names = sorted(path.stem for path in (state / "personal").glob("*.safetensors"))
    found = [name for name in names if wanted is None or wanted in name]
    if len(found) == 1:
        return found[0]
    if not found:
        which = "any run" if wanted is None else f"a run {wanted!r}"
        raise ConfigError(f"expected the personal model of {which} in {state / 'personal'}, found none")
    raise ConfigError(f"--run: expected one of {', '.join(found)}")
