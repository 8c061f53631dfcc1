"""Where everything stands: the columns, tasks and entries of a problem, numbered once.

All heads are laid side by side in one matrix of logits, detections first, then classifications, then regressions,
so that each kind is one contiguous block and is computed at once. Names are resolved here and nowhere later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .errors import FairMTError
from .groups import Groups
from .tasks import Classification, Detection, Regression, Task

Kind: TypeAlias = Literal["detection", "classification", "regression"]
KINDS: tuple[Kind, ...] = ("detection", "classification", "regression")
_KIND_OF: dict[type, Kind] = {
    Detection: "detection",
    Classification: "classification",
    Regression: "regression",
}


@dataclass(frozen=True)
class Head:
    """One head: where its columns and its tasks stand, counted over all heads."""

    name: str
    task: Task
    kind: Kind
    columns: slice
    tasks: slice

    @cached_property
    def width(self) -> int:
        return self.task.width

    @property
    def task_names(self) -> tuple[str, ...]:
        if self.tasks.stop - self.tasks.start == 1:
            return (self.name,)
        names = getattr(self.task, "names", None) or range(self.width)
        return tuple(f"{self.name}/{name}" for name in names)

    @property
    def column_names(self) -> tuple[str, ...]:
        if self.kind == "classification":
            return tuple(f"{self.name}={k}" for k in range(self.width))
        return self.task_names


@dataclass(frozen=True)
class Layout:
    """The numbering of one problem's columns (logits), tasks and entries (violations).

    An entry is one attribute and one column, named `attribute/column`; entries are numbered attribute by attribute.
    """

    heads: tuple[Head, ...]
    groups: Groups
    given_order: tuple[str, ...]

    @classmethod
    def of(cls, tasks: Mapping[str, Task], groups: Groups) -> Layout:
        heads: list[Head] = []
        column = task_number = 0
        for kind in KINDS:
            for name, task in tasks.items():
                if _KIND_OF[type(task)] != kind:
                    continue
                width = task.width
                count = 1 if kind == "classification" else width
                columns, numbers = slice(column, column + width), slice(task_number, task_number + count)
                heads.append(Head(name, task, kind, columns, numbers))
                column, task_number = columns.stop, numbers.stop
        layout = cls(tuple(heads), groups, tuple(tasks))
        for what, names in (("task", layout.task_names), ("entry", layout.entry_names)):
            if len(set(names)) < len(names):
                twice = next(name for i, name in enumerate(names) if name in names[:i])
                raise FairMTError(f"tasks: two of them give the {what} name {twice!r}, expected different ones")
        return layout

    @cached_property
    def columns(self) -> int:
        return sum(head.width for head in self.heads)

    @cached_property
    def tasks(self) -> int:
        return len(self.task_names)

    @cached_property
    def task_names(self) -> tuple[str, ...]:
        return tuple(name for head in self.heads for name in head.task_names)

    @cached_property
    def column_names(self) -> tuple[str, ...]:
        return tuple(name for head in self.heads for name in head.column_names)

    @cached_property
    def entry_names(self) -> tuple[str, ...]:
        return tuple(f"{attribute}/{column}" for attribute in self.groups.names for column in self.column_names)

    @cached_property
    def column_task(self) -> tuple[int, ...]:
        """The task each column belongs to: its own, save that the classes of a classification share one."""
        numbers: list[int] = []
        for head in self.heads:
            own = range(head.tasks.start, head.tasks.stop)
            numbers += own if len(own) == head.width else [own.start] * head.width
        return tuple(numbers)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of columns of each task."""
        return tuple(self.column_task.count(number) for number in range(self.tasks))

    @cached_property
    def display_order(self) -> tuple[int, ...]:
        """Task numbers in the order in which the user named the heads."""
        by_name = {head.name: head for head in self.heads}
        return tuple(
            number for name in self.given_order for number in range(by_name[name].tasks.start, by_name[name].tasks.stop)
        )

    def heads_of(self, kind: Kind) -> tuple[Head, ...]:
        return tuple(head for head in self.heads if head.kind == kind)

    @cached_property
    def kind_columns(self) -> dict[Kind, slice]:
        """The columns of each kind there is, in order."""
        found: dict[Kind, slice] = {}
        for kind in KINDS:
            heads = self.heads_of(kind)
            if heads:
                found[kind] = slice(heads[0].columns.start, heads[-1].columns.stop)
        return found


def take(matrix: Tensor, columns: slice) -> Tensor:
    """Some columns of a matrix; the matrix itself where they are all of them."""
    return matrix if columns.stop - columns.start == matrix.shape[1] else matrix[:, columns]


def join(parts: list[Tensor]) -> Tensor:
    """Matrices side by side."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
