"""Fairness as one number: gaps of remembered rates, aggregated, with the gradient at the scores.

This is the fairness socket's part for group gaps: sides -> group sums -> one-sided gaps Ψ -> weights w -> wᵀΨ. The
gradient is written out rather than left to autograd: it lives on a handful of (group, side) cells and reaches the
rows through one matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .aggregation import Ahfda
from .batch import Batch
from .blocks import Block, Terms
from .disparity import Disparity, GroupMemory, SidePlan, comparable, spread
from .disparity.memory import Sums
from .errors import FairMTError
from .layout import Kind, Layout, join
from .state import State, reciprocal

Aggregation: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Violation(NamedTuple):
    """The entries (A·C,) after a batch, and what they sum up to.

    Attributes:
        psi: squared gaps of soft rates; 0 where not measured.
        psi_hard: the same of thresholded predictions.
        measured: which entries have a side with two measured groups.
        weights: w, 0 where not measured.
        phis: (2,) wᵀΨ of the soft and of the hard violations (minus μ/2‖w‖² in the printed form).
        cells: (A·G, S) gradient of phi at this batch's sum of scores of each group and side.
        gaps, worst, best: (2, A, S) the gaps of the sides' soft and hard rates, over the unit of errors, and between
            which groups they lie.
        table: what the memory holds after this batch.
    """

    psi: Tensor
    psi_hard: Tensor
    measured: Tensor
    weights: Tensor
    phis: Tensor
    cells: Tensor
    gaps: Tensor
    worst: Tensor
    best: Tensor
    table: Tensor


@dataclass(frozen=True)
class Infeasible:
    """An entry above the tolerance: its gap (the root of its psi), and between which groups it is widest."""

    entry: str
    gap: float
    side: str
    worst_group: int
    best_group: int


class GroupConstraint(State):
    """The aggregated violation of all attributes and tasks.

    Args:
        layout: the problem's numbering.
        disparities: the sides compared for each kind of task.
        memory: how many batches the group sums remember.
        aggregation: violations and mask -> weights.
        asymmetric: whether the best group is left alone.
        printed: subtract μ/2‖w‖² from Φ, as the paper's formula does.
    """

    pull: Tensor

    def __init__(
        self,
        layout: Layout,
        disparities: Mapping[Kind, Disparity],
        *,
        memory: float,
        aggregation: Aggregation,
        asymmetric: bool = True,
        printed: bool = False,
    ) -> None:
        super().__init__()
        if not layout.groups.attributes:
            raise FairMTError("groups: met none, expected at least one attribute: fairness is between its groups")
        self.sides = SidePlan(layout, disparities)
        if self.sides.size == 0:
            raise FairMTError("disparities: met None for every kind of task there is, expected at least one disparity")
        self.layout = layout
        shape = (len(layout.groups.attributes), layout.groups.width, self.sides.size)
        self.memory = GroupMemory(shape, memory)
        self.aggregation = aggregation
        self.asymmetric = asymmetric
        self.printed = printed
        if printed and not isinstance(aggregation, Ahfda):
            raise FairMTError("printed: the printed Φ has a term of AHFDA's μ, expected aggregation='ahfda'")
        self.has_errors = bool(layout.heads_of("regression")) and bool(disparities["regression"])
        self.register_buffer("pull", 2 * self.sides.share * self.sides.worse, persistent=False)

    def sums(self, batch: Batch, terms: Mapping[Kind, Terms], rows: Tensor) -> Tensor:
        """The batch's own group sums; `rows` are the sides' row weights."""
        counted = (rows > 0).to(rows.dtype) if batch.weighted else None
        return self.memory.of(batch.members, *self.sides.scores(terms), rows, counted)

    def assess(self, batch_table: Tensor, units: Tensor | None) -> Violation:
        """Gaps, weights and their gradient, given all ranks' sums of this batch.

        `units` (C,) are what errors are divided by to be comparable between tasks.
        """
        table = self.memory.with_batch(batch_table)
        sums = Sums.of(table)
        missing = sums.missing
        gaps, worst, best = spread(sums.rates, missing, self.sides.worse)
        per_unit = None
        if self.has_errors and units is not None:
            per_unit = 1 / self.sides.to_sides(units)
            gaps = gaps * per_unit
        psi = self.sides.to_columns(gaps * gaps * self.sides.share).flatten(1)
        measured = self.sides.to_columns(comparable(missing)).flatten()
        soft, hard = psi.unbind()
        weights = self.aggregation(soft, measured)
        phis = psi @ weights
        if self.printed:
            assert isinstance(self.aggregation, Ahfda)
            phis = phis - self.aggregation.strength(soft) / 2 * (weights @ weights)
        pull = self.sides.to_sides(weights.view(-1, self.layout.columns)) * gaps[0] * self.pull
        cells = self._cells(pull if per_unit is None else pull * per_unit, worst[0], best[0], batch_table[2])
        return Violation(soft, hard, measured, weights, phis, cells, gaps, worst, best, table)

    def _cells(self, pull: Tensor, worst: Tensor, best: Tensor, weight: Tensor) -> Tensor:
        """∂Φ/∂(sum of scores): `pull` at the worst group, against it at the best if that takes a gradient too.

        A remembered rate's value moves with the batch's own mean, so the sum is divided by the batch's weight; a
        group that is not in the batch has no row to take a gradient.
        """
        per_weight = reciprocal(weight)
        cells, pull, worst = torch.zeros_like(weight), pull.unsqueeze(1), worst.unsqueeze(1)
        cells.scatter_(1, worst, pull * per_weight.gather(1, worst))
        if not self.asymmetric:
            best = best.unsqueeze(1)
            cells.scatter_add_(1, best, -pull * per_weight.gather(1, best))
        return cells.flatten(0, 1)

    def at_logits(
        self,
        violation: Violation,
        batch: Batch,
        rows: Tensor,
        terms: Mapping[Kind, Terms],
        blocks: Mapping[Kind, Block],
    ) -> Tensor:
        """∂Φ/∂logits (B, C)."""
        by_row = (batch.members @ violation.cells.to(rows.dtype)) * rows
        folded = self.sides.fold(by_row)
        return join(
            [
                blocks[kind].pull(own, folded[kind]) if kind in folded else torch.zeros_like(own.delta)
                for kind, own in terms.items()
            ]
        )

    def above(self, violation: Violation, tolerance: float, *, hard: bool) -> list[Infeasible]:
        """The entries whose gap (of thresholded or of soft predictions) exceeds the tolerance, worst first."""
        gaps = (violation.psi_hard if hard else violation.psi).sqrt().tolist()
        measured = violation.measured.tolist()
        side_column = self.sides.column
        side_psi = (violation.gaps[int(hard)].square() * self.sides.share).tolist()
        worst, best = violation.worst[int(hard)].tolist(), violation.best[int(hard)].tolist()
        found = []
        for number, name in enumerate(self.layout.entry_names):
            if not measured[number] or gaps[number] <= tolerance:
                continue
            attribute, column = divmod(number, self.layout.columns)
            own = [side for side, of in enumerate(side_column) if of == column]
            side = max(own, key=side_psi[attribute].__getitem__)
            groups = worst[attribute][side], best[attribute][side]
            found.append(Infeasible(name, gaps[number], self.sides.names[side], *groups))
        return sorted(found, key=lambda entry: -entry.gap)
