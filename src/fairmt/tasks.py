"""What is predicted: detections, classifications and regressions.

A task specification is a small frozen value. It holds no tensors and no network: the network's heads are
matched to it by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .errors import FairMTError, check_choice, check_integer, check_number, describe, short

Balance: TypeAlias = Literal["balanced"]
PerColumn: TypeAlias = float | Sequence[float]
RegressionLoss: TypeAlias = Literal["mse", "mae", "huber"]


class Task:
    """What is predicted: a `Detection`, a `Classification` or a `Regression`."""

    @property
    def width(self) -> int:
        """Number of logits (or predictions) a head for this task gives."""
        raise NotImplementedError


@dataclass(frozen=True)
class Detection(Task):
    """`n` yes/no questions answered by one head; labels are 0, 1 or missing.

    Args:
        n: number of columns of the head. With one, the task bears the head's name; with more, each column is a
            task named `head/name` (or `head/0`, `head/1`, … without `names`).
        names: names of the columns.
        weight: how much a positive row counts in the loss: `None` (1), a number (or one a column), or
            `"balanced"`, the negatives per positive among the labels seen so far.
        threshold: the probability from which a prediction is positive.
        temperature: sharpness of the soft rates that drive the fairness gradient; lower is nearer to a step.

    >>> Detection(2, names=["smiling", "glasses"], weight="balanced").names
    ('smiling', 'glasses')
    """

    n: int = 1
    names: Sequence[str] | None = None
    weight: Balance | PerColumn | None = None
    threshold: float = 0.5
    temperature: float = 0.5

    def __post_init__(self) -> None:
        _check_columns(self, self.n, self.names)
        if self.weight is not None and not (isinstance(self.weight, str) and self.weight == "balanced"):
            object.__setattr__(self, "weight", _per_column("Detection.weight", self.weight, self.n))
        if not 0 < check_number("Detection.threshold", self.threshold) < 1:
            raise FairMTError(f"Detection.threshold: met {self.threshold!r}, expected a number between 0 and 1")
        check_number("Detection.temperature", self.temperature, above=0)

    @property
    def width(self) -> int:
        return self.n


@dataclass(frozen=True)
class Classification(Task):
    """One question with `num_classes` exclusive answers; labels are 0 … C − 1 or missing.

    Args:
        num_classes: number of classes, at least 2.
        weight: `None`, or `"balanced"`: a row of class k counts N / (C·N_k) in the loss, by the labels seen so far.
        temperature: of the softmax behind the soft rates.
    """

    num_classes: int
    weight: Balance | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_integer("Classification.num_classes", self.num_classes, 2)
        check_choice("Classification.weight", self.weight, (None, "balanced"))
        check_number("Classification.temperature", self.temperature, above=0)

    @property
    def width(self) -> int:
        return self.num_classes


@dataclass(frozen=True)
class Regression(Task):
    """`n` numbers predicted by one head; labels are finite numbers or missing.

    Args:
        n: number of columns of the head, each a task (see `Detection`).
        names: names of the columns.
        loss: `"mse"` (squared), `"mae"` (absolute) or `"huber"` error.
        scale: the labels' standard deviation (or one a column), by which errors are made comparable between
            tasks; `None` takes it from the labels seen so far. The loss itself is never scaled.
        delta: where the Huber error turns from square to linear, in label units.
    """

    n: int = 1
    names: Sequence[str] | None = None
    loss: RegressionLoss = "mse"
    scale: PerColumn | None = None
    delta: float = 1.0

    def __post_init__(self) -> None:
        _check_columns(self, self.n, self.names)
        check_choice("Regression.loss", self.loss, ("mse", "mae", "huber"))
        if self.scale is not None:
            object.__setattr__(self, "scale", _per_column("Regression.scale", self.scale, self.n))
        check_number("Regression.delta", self.delta, above=0)

    @property
    def width(self) -> int:
        return self.n


def per_column(value: PerColumn, n: int) -> list[float]:
    """One number a column, from one for all or one each."""
    return [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * n


def check_tasks(tasks: object) -> dict[str, Task]:
    """The tasks as a plain dict, or an error that says what is wrong with them."""
    if not isinstance(tasks, Mapping) or not tasks:
        raise FairMTError(
            f"tasks: met {describe(tasks)}, "
            "expected a mapping from task name to Detection, Classification or Regression"
        )
    for name, task in tasks.items():
        if not isinstance(name, str) or not name:
            raise FairMTError(f"tasks: met the name {short(name)}, expected a non-empty string")
        if not isinstance(task, Detection | Classification | Regression):
            raise FairMTError(
                f"tasks[{name!r}]: met {describe(task)}, expected a Detection, Classification or Regression"
            )
    return dict(tasks)


def _check_columns(task: Detection | Regression, n: object, names: object) -> None:
    kind = type(task).__name__
    check_integer(f"{kind}.n", n, 1)
    if names is None:
        return
    strings = [name for name in names if isinstance(name, str)] if isinstance(names, Iterable) else []
    if isinstance(names, str) or len(strings) != n or len(set(strings)) != n:
        raise FairMTError(f"{kind}.names: met {short(names)}, expected {n} different names, one a column")
    object.__setattr__(task, "names", tuple(strings))


def _per_column(what: str, value: object, n: int) -> float | tuple[float, ...]:
    """A positive number, or one a column (kept as a tuple, so that a specification can be compared and hashed)."""
    if not isinstance(value, Iterable) or isinstance(value, str):
        return check_number(what, value, above=0)
    values = tuple(check_number(what, v, above=0) for v in value)
    if len(values) != n:
        raise FairMTError(f"{what}: met {short(value)}, expected a positive number, or {n} of them, one a column")
    return values
