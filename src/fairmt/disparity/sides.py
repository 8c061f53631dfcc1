"""What a violation is made of: its sides.

A side is one thing compared between groups: a mean score over some rows (positives, negatives, all labelled), and
the direction in which it is worse. A disparity is a few sides and their shares. A new disparity is a new line in
`DISPARITIES`; nothing downstream knows their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ..batch import Batch
from ..blocks import Terms
from ..errors import FairMTError, check_choice, check_number, describe
from ..layout import KINDS, Kind, Layout, join, take
from ..state import State

Rows: TypeAlias = Literal["positive", "negative", "labelled"]


@dataclass(frozen=True)
class Side:
    """A mean score over `rows`, worse when it is lower (`worse=-1`) or higher (`+1`)."""

    name: str
    rows: Rows
    worse: Literal[-1, 1]
    share: float


Disparity: TypeAlias = tuple[Side, ...]


def equalized_odds(beta: float) -> Disparity:
    """True positive rates that lag, and β times false positive rates that exceed."""
    tpr = Side("TPR", "positive", -1, 1 / (1 + beta))
    return (tpr, Side("FPR", "negative", +1, beta / (1 + beta))) if beta > 0 else (tpr,)


def error_parity(beta: float) -> Disparity:
    """Errors that exceed; β has no say."""
    return (Side("error", "labelled", +1, 1.0),)


DISPARITIES = {"aeod": equalized_odds, "caeod": equalized_odds, "aep": error_parity}
DEFAULTS: dict[str, str | None] = {"detection": "aeod", "classification": "caeod", "regression": "aep"}


def choose(disparities: Mapping[str, str | None] | None, beta: float) -> dict[Kind, Disparity]:
    """The disparity of each kind of task: the defaults, with a user's choices (None switches a kind off) over them."""
    check_number("beta", beta, least=0)
    if disparities is not None and not isinstance(disparities, Mapping):
        raise FairMTError(
            f"disparities: met {describe(disparities)}, expected a mapping from kind of task to name or None"
        )
    chosen: dict[str, str | None] = dict(DEFAULTS)
    for kind, name in (disparities or {}).items():
        check_choice("disparities", kind, KINDS)
        check_choice(f"disparities[{kind!r}]", name, (DEFAULTS[kind], None))
        chosen[kind] = name
    return {kind: () if (name := chosen[kind]) is None else DISPARITIES[name](beta) for kind in KINDS}


class SidePlan(State):
    """All sides of a problem, S in number, kind by kind and side by side.

    Attributes:
        worse: (S,) the sign under which higher is worse.
        share: (S,) weight of a side's squared gap in its entry.
    """

    worse: Tensor
    share: Tensor

    def __init__(self, layout: Layout, disparities: Mapping[Kind, Disparity]) -> None:
        super().__init__()
        self.columns = layout.kind_columns
        self.parts = [(kind, side) for kind in self.columns for side in disparities[kind]]
        numbers = range(layout.columns)
        column = [c for kind, _ in self.parts for c in numbers[self.columns[kind]]]
        side_of = [side for kind, side in self.parts for _ in numbers[self.columns[kind]]]
        self.names = [side.name for side in side_of]
        self.size = len(column)
        for name, values in (("worse", [s.worse for s in side_of]), ("share", [s.share for s in side_of])):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float64), persistent=False)
        self.column = column
        self.widths = [len(numbers[self.columns[kind]]) for kind, _ in self.parts]

    def rows(self, batch: Batch) -> Tensor:
        """(B, S): the weight with which each row counts on each side."""
        parts = []
        for kind, side in self.parts:
            columns = self.columns[kind]
            weight, positive = take(batch.weight, columns), take(batch.positive, columns)
            if side.rows == "labelled":
                parts.append(weight)
            else:
                parts.append(positive if side.rows == "positive" else weight - positive)
        return join(parts)

    def scores(self, terms: Mapping[Kind, Terms]) -> tuple[Tensor, Tensor]:
        """(B, S): the soft and the hard score each side averages."""
        soft = join([terms[kind].score for kind, _ in self.parts])
        return soft, join([terms[kind].hard for kind, _ in self.parts])

    def fold(self, sides: Tensor) -> dict[Kind, Tensor]:
        """(…, S) values of the sides, summed over the sides of each column, for each kind that has any."""
        folded: dict[Kind, Tensor] = {}
        for (kind, _), part in zip(self.parts, torch.split(sides, self.widths, dim=-1), strict=True):
            folded[kind] = folded[kind] + part if kind in folded else part
        return folded

    def to_columns(self, sides: Tensor) -> Tensor:
        """(…, S) values of the sides, summed over the sides of each column: (…, C)."""
        folded = self.fold(sides)
        parts = [
            folded[kind] if kind in folded else sides.new_zeros((*sides.shape[:-1], columns.stop - columns.start))
            for kind, columns in self.columns.items()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def to_sides(self, columns: Tensor) -> Tensor:
        """(…, C) values of the columns, at each of their sides: (…, S)."""
        return torch.cat([columns[..., self.columns[kind]] for kind, _ in self.parts], dim=-1)
