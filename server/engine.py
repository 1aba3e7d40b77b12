"""The inline engine: virtual clients on the run's benchmark data. The one place where server meets client."""

from pathlib import Path

from hyperbloom.client.app import app, train_all
from hyperbloom.client.settings import ClientSettings
from hyperbloom.client.worker import worker_for
from hyperbloom.common.config import RunConfig
from hyperbloom.common.data import DataSpec
from hyperbloom.server.inline import InlineGrid

__all__ = ["client_settings", "inline_grid"]


def client_settings(config: RunConfig, index: int, folder: Path) -> ClientSettings:
    """Return the settings of virtual client `index`, the same as `--local-clients` gives to a process."""
    data = config.data
    spec = DataSpec(
        data=data.name,
        root=Path(data.root) if data.root else None,
        split=data.split,
        classes_per_client=data.classes_per_client,
        alpha=data.alpha,
        partition=index,
        partitions=config.clients,
        max_train=data.max_train,
        seed=config.seed,
    )
    return ClientSettings(
        client_id=f"client-{index}",
        data=spec,
        size=config.sizes[index % len(config.sizes)],
        state_dir=folder / "clients" / f"client-{index}",
        disclose_class_shares=config.options.get("descriptor") == "class-shares",
    )


def inline_grid(config: RunConfig, folder: Path, vectorise: bool | None = None) -> InlineGrid:
    """Return a grid of `config.clients` virtual clients whose state lies under `folder`.

    Args:
        config: the run.
        folder: the run's.
        vectorise: train the clients of a cohort at once; by default on a CUDA device, which one small network after
            the other leaves idle. On a CPU it helps an MLP and slows a LeNet down (`benchmarks/vectorised.py`).

    Raises:
        DataError: the data set is not there, or cannot be split like this.
    """
    settings = [client_settings(config, index, folder) for index in range(config.clients)]
    configs = [each.to_node_config() for each in settings]
    # Data that are not there are told now, not by ten refusals.
    devices = {worker_for(ClientSettings.from_node_config(each)).device.type for each in configs}
    if vectorise is None:
        vectorise = "cuda" in devices
    return InlineGrid(app, configs, train_all if vectorise else None)
