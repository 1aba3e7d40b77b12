"""Export of a client's own model from its state folder."""

from pathlib import Path

from hyperbloom.client.keep.state import ClientState
from hyperbloom.client.settings import ClientSettings
from hyperbloom.common.data import data_source, source_under
from hyperbloom.common.errors import ConfigError, ModelError
from hyperbloom.common.files.export import Card, write_model
from hyperbloom.common.metrics import scale_of, title_of
from hyperbloom.common.models import BACKBONE, ModelSpec, backbone_digest, build_own, own_tensors
from hyperbloom.common.tasks import TaskSpec

_KEPT = {
    "head": ("The prediction head never left it, nor, in runs of hyperfl, did the embedding.",),
    "body": ("All but the prediction head never left it.",),
    "all": ("The model never left it; in runs of fedhenn, what it makes of public inputs did.",),
    "copy": ("The model never left it; another one, beside which it was trained, did.",),
}


def write_own_model(settings: ClientSettings, run: str | None, folder: Path) -> list[str]:
    """Write the model of a `run` (its id or a part) with which a client was last scored; return the files' names.

    Raises:
        ConfigError: there is no such run, or several; or the data do not fit the model.
        ModelError: the architecture has changed since the run.
        HyperbloomError: the file is damaged.
    """
    state = ClientState(settings.folder)
    run_id = _run_id(state, run)
    tensors, scored = state.load_scored(run_id)
    table = scored.table if settings.data.is_table else None
    source = source_under(settings.data, table) if table else data_source(settings.source)
    data = source.client(settings.data.partition)
    if (data.input_shape, data.num_classes) != (scored.input_shape, scored.num_classes):
        raise ConfigError(
            f"--data: expected inputs of shape {scored.input_shape} in {scored.num_classes} classes, as the model has, "
            f"found {data.input_shape} in {data.num_classes}"
        )
    backbone = settings.data.backbone if scored.model == BACKBONE else None
    if scored.model == BACKBONE and backbone is None:
        raise ConfigError("--backbone: expected the pretrained network of the run, found none")
    spec = ModelSpec(scored.model, scored.size, scored.input_shape, scored.num_classes, scored.adapt, backbone)
    module = build_own(spec)
    if backbone and scored.backbone not in (None, found := backbone_digest(spec)):  # None: of an earlier version
        raise ModelError(f"--backbone: expected {scored.backbone}, with which {run_id} trained, found {found}")
    try:
        if module.load_state_dict(tensors, strict=False).unexpected_keys or set(own_tensors(module)) - set(tensors):
            raise RuntimeError
    except RuntimeError:
        raise ModelError(f"{spec.name}: is no longer the network that {run_id} trained") from None
    half = len(scored.moments) // 2
    task = TaskSpec(scored.task, scored.moments[:half], scored.moments[half:])
    origin = {
        "client": settings.client_id,
        "run": run_id,
        "round": f"{scored.round}; the model with which this client was scored last",
        **({"over training alone": scored.gain} if scored.gain else {}),
        **{
            f"test {title_of(name)}": f"{scale_of(name).show(scale_of(name).factor * value)} on {scored.total} examples"
            for name, value in scored.metrics.items()
        },
    }
    sent = (
        *_KEPT.get(scored.private, ()),
        "What local training made of the weights that the server sent, if it sent any, and the mean training loss.",
        "With noise on clients the loss is left out; with secure aggregation the server sees sums over clients alone.",
        "Metrics and mean losses on validation and test examples, and the counts behind them if that was wished.",
        "Beside it: name and secret, the version of its program, the sizes of its data sets, the shape of its inputs.",
        "What the strategy asks for beside them: descriptors, moments, representations (docs/privacy.md).",
    )
    privacy = ("What the noise of the run is worth, if it had any, is in privacy.json on the server.",)
    card = Card(f"Own model of {settings.client_id}", origin, sent, privacy)
    return write_model(folder, module, spec, data.class_names, source.scaling, card, task, data.schema)


def _run_id(state: ClientState, wanted: str | None) -> str:
    names = state.scored_runs()
    found = [name for name in names if name == wanted] or [name for name in names if wanted is None or wanted in name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--run: expected one of {', '.join(found)}")
    which = "any run" if wanted is None else f"a run {wanted!r}"
    raise ConfigError(
        f"expected the model of {which} in {state.folder}, found {', '.join(names) or 'none'}; those of pfedhn, fedavg "
        "and fedprox are on the server: flower-server export"
    )
