"""The trackers that we bring: MLflow, Weights & Biases, TensorBoard. Their packages are extras."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from hyperbloom.server.runs.lines import Line
from hyperbloom.server.runs.recorded import flat
from hyperbloom.server.watch.tracking import Subject, Tracker, curves


class MLflow(Tracker):
    """Numbers as metrics, keys as parameters, files by reference as tags. A run that is told again replaces itself.

    `where` is the tracking URI, by default as MLflow finds it. With HYPERBLOOM_REGISTER=NAME in the environment, the
    exported models in RUN/models are new versions of the registered models NAME-CLIENT.
    """

    def __init__(self, where: str, subject: Subject) -> None:
        super().__init__(where, subject)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient(where or None)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or subject["group"]
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run = quote(subject["run"])  # a filter has no escapes
        for before in self._client.search_runs([experiment], f"tags.`hyperbloom.run` = '{run}'"):
            self._client.delete_run(before.info.run_id)
        begun, tags = round(1000 * subject["started"]), {"hyperbloom.run": run}
        self._id = self._client.create_run(experiment, begun, tags, subject["name"]).info.run_id
        params = [Param(key, value[:6000]) for key, value in flat(subject["settings"])]  # the longest that it takes
        for first in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(self._id, params=params[first : first + 100])

    def rounds(self, lines: Sequence[Line]) -> None:
        """Log each round's numbers, at the moment when its training was over."""
        for line in lines:
            self._log(curves(line), self.subject["started"] + line["elapsed"], line["round"])

    def end(self, complete: bool, selected: Mapping[str, float], files: Mapping[str, str]) -> None:
        """Log the selected round's figures, say where the files are, and end the MLflow run."""
        self._log(selected, time.time(), 0)
        for key, address in files.items():
            self._client.set_tag(self._id, f"hyperbloom.{key}", address)
        name, folder = os.environ.get("HYPERBLOOM_REGISTER"), self.subject["folder"]
        if name and self.subject["name"] == folder.name:
            for path in sorted((folder / "models").glob("*/model.json")):
                self._register(f"{name}-{path.parent.name}", path.parent.as_uri())
        self._client.set_terminated(self._id, "FINISHED" if complete else "KILLED")

    def _register(self, name: str, source: str) -> None:
        if not self._client.search_registered_models(f"name = '{name}'"):
            self._client.create_registered_model(name)
        self._client.create_model_version(name, source, self._id)

    def _log(self, numbers: Mapping[str, float], seconds: float, step: int) -> None:
        metrics = [self._metric(key, value, round(1000 * seconds), step) for key, value in numbers.items()]
        self._client.log_batch(self._id, metrics)


class WandB(Tracker):
    """Numbers by round, keys of the run as configuration, files by reference in the summary; `where` is the project.

    Its own files are in RUN/wandb, and nothing is sent unless WANDB_MODE says otherwise; `wandb sync` sends them later.
    """

    def __init__(self, where: str, subject: Subject) -> None:
        super().__init__(where, subject)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run = wandb.init(
            project=where or subject["group"],
            name=subject["name"],
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=subject["folder"],
            config=subject["settings"],
            reinit="create_new",  # baselines beside the strategy
            settings=wandb.Settings(
                console="off", disable_git=True, save_code=False, silent=True, symlink=False, x_disable_stats=True
            ),
        )
        for link in filter(Path.is_symlink, (subject["folder"] / "wandb").rglob("*")):  # which `--resume` refuses
            link.unlink()
        self._run.define_metric("*", step_metric="round")

    def rounds(self, lines: Sequence[Line]) -> None:
        """Log each round's numbers."""
        for line in lines:
            self._run.log({"round": line["round"], **curves(line)})

    def end(self, complete: bool, selected: Mapping[str, float], files: Mapping[str, str]) -> None:
        """Put the selected round's figures and the places of files into the summary, and end the run."""
        self._run.summary.update({**selected, **files})
        self._run.finish(exit_code=0 if complete else 1)


class TensorBoard(Tracker):
    """Event files in a folder for each strategy, in RUN/tensorboard or `where`. One told again replaces itself."""

    def __init__(self, where: str, subject: Subject) -> None:
        super().__init__(where, subject)
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(where, subject["group"]) if where else subject["folder"] / "tensorboard"
        folder = folder / subject["name"]
        for before in folder.glob("events.out.tfevents.*"):
            before.unlink()
        self._writer = SummaryWriter(str(folder))

    def rounds(self, lines: Sequence[Line]) -> None:
        """Write the rounds' numbers."""
        for line in lines:
            for name, value in curves(line).items():
                self._writer.add_scalar(name, value, line["round"])
        self._writer.flush()

    def end(self, complete: bool, selected: Mapping[str, float], files: Mapping[str, str]) -> None:
        """Close the file."""
        self._writer.close()
