"""What clients learn: `base` says what a task knows, and each file has one task. Everything else asks the task.

A task of one's own is a subclass of `Task` that an installed package offers under the group `hyperbloom.tasks`.
"""

from functools import lru_cache

from hyperbloom.common.errors import ConfigError
from hyperbloom.common.program.plugins import find_plugin, plugins
from hyperbloom.common.tasks.base import Task, TaskSpec
from hyperbloom.common.tasks.classification import Classification
from hyperbloom.common.tasks.measures import GRID, REACH, Metric
from hyperbloom.common.tasks.multilabel import Multilabel
from hyperbloom.common.tasks.regression import Regression
from hyperbloom.common.tasks.segmentation import Segmentation

AUTO = "auto"
"""The task that the labels of the first client suggest."""

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "segmentation": Segmentation,
}

CLASSIFICATION = Classification(TaskSpec())


@lru_cache(64)
def make_task(spec: TaskSpec) -> Task:
    """Return the task of a description; ConfigError if there is no such task, or a plug-in is broken."""
    plugin = find_plugin("tasks", spec.name, TASKS, ConfigError)
    if plugin is None and spec.name not in TASKS:
        names = ", ".join([AUTO, *TASKS, *plugins("tasks")])
        raise ConfigError(f"task: expected one of {names}, found {spec.name!r}")
    kind = plugin.load("a subclass of Task", ConfigError) if plugin else TASKS[spec.name]
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ConfigError(f"task: expected {spec.name} to be a subclass of Task, found {kind!r}")
    if missing := ", ".join(sorted({*kind.__abstractmethods__, *({"metrics"} - {*dir(kind)})})):
        raise ConfigError(f"task: expected {spec.name} to define {missing} as well")
    return kind(spec)
