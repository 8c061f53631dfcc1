"""Group sums with exponential memory, since a batch holds few members of small groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import check_number
from ..state import State, precise


class Sums(NamedTuple):
    """Sums by group, each (A, G, S): of soft scores and of hard ones (2, A, G, S), of row weights, and of rows.

    The weights are the denominators. Rows are counted apart, because sample weights may be of any size.
    """

    scores: Tensor
    weight: Tensor
    rows: Tensor

    @classmethod
    def of(cls, table: Tensor) -> Sums:
        """From a table (4, A, G, S)."""
        return cls(table[:2], table[2], table[3])

    @property
    def rates(self) -> Tensor:
        """(2, A, G, S): soft and hard rates; NaN where nothing was counted."""
        return self.scores / self.weight

    @property
    def missing(self) -> Tensor:
        """(A, G, S): a group counts as measured from one remembered row on."""
        return self.rows < 1


class GroupMemory(State):
    """S ← (1 − 1/m) S + s_batch, from S = 0; one table of fixed size, so a checkpoint holds it.

    Args:
        shape: number of attributes, of groups (of the largest attribute) and of sides.
        memory: m, in batches; 1 remembers nothing but the batch itself.
    """

    table: Tensor

    def __init__(self, shape: tuple[int, int, int], memory: float) -> None:
        super().__init__()
        self.decay = 1 - 1 / check_number("memory", memory, least=1)
        self.register_buffer("table", torch.zeros(4, *shape, dtype=torch.float64))

    def of(self, members: Tensor, soft: Tensor, hard: Tensor, weight: Tensor, rows: Tensor | None) -> Tensor:
        """The batch's own table; `rows` (None: the weights) are 1 where a row counts."""
        columns = [soft * weight, hard * weight, weight, *(() if rows is None else (rows,))]
        sums = (members.T @ torch.cat(columns, dim=1)).to(precise(members.device))
        _, attributes, groups, sides = self.table.shape
        table = sums.view(attributes, groups, len(columns), sides).permute(2, 0, 1, 3)
        return table if rows is not None else torch.cat((table, table[2:]))

    def with_batch(self, table: Tensor) -> Tensor:
        """What the memory would hold after this batch; nothing moves."""
        return torch.add(table, self.table, alpha=self.decay)
