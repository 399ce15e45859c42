"""The built-in tasks: data sets with a model and settings."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradwire.tools.experiments.errors import check_known
from gradwire.tools.experiments.tasks.base import Source, Task
from gradwire.tools.experiments.tasks.cifar10 import Cifar10
from gradwire.tools.experiments.tasks.digits import Digits
from gradwire.tools.experiments.tasks.graph import GraphTask
from gradwire.tools.experiments.tasks.logreg import Logreg
from gradwire.tools.experiments.tasks.mnist import Mnist
from gradwire.tools.experiments.tasks.text import Text

__all__ = ["ALL", "Source", "Task", "build"]

ALL: tuple[type[Task], ...] = (Digits, Text, Mnist, Cifar10, Logreg, GraphTask)


def build(name: str, **settings: Any) -> Task:
    """Make a task from its name; settings that are None keep the task's default.

    Raises:
        UsageError: the name or a setting is unknown; the message holds the nearest one.
    """
    known = {task.name: task for task in ALL}
    check_known("task", name, known)
    chosen = known[name]
    fields = [field.name for field in dataclasses.fields(chosen)]
    asked = {key: value for key, value in settings.items() if value is not None}
    for key in asked:
        check_known("setting", key, fields, f" of the task {name}")
    return chosen(**asked)
