"""The first half of a step: what a batch says of losses and gaps, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..batch import Batch
from ..blocks import Block, ClassificationBlock, DetectionBlock, RegressionBlock, Terms
from ..constraint import GroupConstraint, Violation
from ..errors import FairMTError
from ..layout import Kind, Layout, join, take
from ..moments import LabelMoments
from ..ranks import Ranks
from ..state import State, precise, reciprocal
from ..tasks import Classification, Detection, Regression


class Measured(NamedTuple):
    """What a batch says, over all ranks where it is a sum, and over this rank's rows where it has rows.

    Attributes:
        moments: (3, C) label moments, this batch included.
        loss: (T,) weighted sums of losses.
        labelled: (T,) weights of the labelled rows.
        rows: (T,) numbers of labelled rows.
        losses: (T,) means, 0 for inactive tasks.
        active: (T,) tasks with a labelled row.
        comparable: (T,) losses over the label scale, so that regressions compare with the rest.
        violation: the fairness term's, if there is one.
        delta: (B, C) gradients of the losses at the logits.
        delta_phi: (B, C) gradient of the violation there.
    """

    moments: Tensor
    loss: Tensor
    labelled: Tensor
    rows: Tensor
    losses: Tensor
    active: Tensor
    comparable: Tensor
    violation: Violation | None
    delta: Tensor
    delta_phi: Tensor | None


class Measure(State):
    """Losses, label moments and group gaps of a batch."""

    owner: Tensor
    average: Tensor

    def __init__(self, layout: Layout, constraint: GroupConstraint | None) -> None:
        super().__init__()
        self.layout = layout
        self.moments = LabelMoments(layout)
        self.blocks = nn.ModuleDict(_blocks(layout))
        self.by_kind: dict[Kind, Block] = dict(self.blocks.items())  # type: ignore[arg-type]
        self.constraint = constraint
        self.one_each = layout.tasks == layout.columns
        owner = nn.functional.one_hot(torch.tensor(layout.column_task), layout.tasks).double()
        self.register_buffer("owner", owner, persistent=False)
        self.register_buffer("average", owner / owner.sum(0), persistent=False)

    def forward(self, batch: Batch, ranks: Ranks | None) -> Measured:
        """Everything about the batch; nothing moves."""
        blocks, constraint, columns = self.by_kind, self.constraint, self.layout.kind_columns
        moments = self._label_moments(batch, ranks)
        rows = (batch.logits, batch.labels, batch.weight, batch.positive, moments)
        terms = {kind: block.terms(*(take(part, columns[kind]) for part in rows)) for kind, block in blocks.items()}
        units = self._units(moments)

        table, sides = None, None
        if constraint is not None:
            sides = constraint.sides.rows(batch)
            table = constraint.sums(batch, terms, sides)
        loss, labelled, counts, table = self._reduce(batch, terms, table, ranks)
        mean = reciprocal(labelled)
        losses = loss * mean
        comparable = losses if units is None else losses / self._per_task(units)
        delta = join([term.delta for term in terms.values()]) * self.per_column(mean).to(batch.logits.dtype)
        violation, delta_phi = None, None
        if constraint is not None and table is not None and sides is not None:
            violation = constraint.assess(table, units)
            delta_phi = constraint.at_logits(violation, batch, sides, terms, blocks)
        return Measured(moments, loss, labelled, counts, losses, labelled > 0, comparable, violation, delta, delta_phi)

    def per_column(self, tasks: Tensor) -> Tensor:
        """(T,) repeated to (C,)."""
        return tasks if self.one_each else self.constant("owner", tasks.dtype) @ tasks

    def _label_moments(self, batch: Batch, ranks: Ranks | None) -> Tensor:
        if not self.moments.needed:
            return self.moments.moments
        sums = self.moments.sums(batch)
        if ranks is not None:
            (sums,) = ranks.sum(sums)
        return self.moments.with_batch(sums)

    def _units(self, moments: Tensor) -> Tensor | None:
        """(C,): by what scores and losses are divided to compare between tasks; None: by nothing."""
        if "regression" not in self.blocks:
            return None
        columns = self.layout.kind_columns["regression"]
        block = self.blocks["regression"]
        assert isinstance(block, RegressionBlock)
        rates = moments.new_ones((columns.start,))
        return torch.cat((rates, block.unit_error(moments[:, columns])))

    def _per_task(self, columns: Tensor) -> Tensor:
        """(C,), the same over each task's columns, to (T,)."""
        return columns if self.one_each else columns @ self.average

    def _reduce(
        self, batch: Batch, terms: Mapping[Kind, Terms], table: Tensor | None, ranks: Ranks | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Loss sums, labelled weights, labelled rows and group sums: over all ranks, in one call."""
        wide = precise(batch.logits.device)
        both = torch.stack(
            [torch.cat([term.loss for term in terms.values()]), torch.cat([term.labelled for term in terms.values()])]
        )
        loss, labelled = both.to(wide).unbind()
        rows = labelled
        if batch.weighted:
            counts = (batch.weight > 0).sum(0).to(wide)
            rows = self._per_task(counts)
        if ranks is None:
            return loss, labelled, rows, table
        problems = loss.new_full((1,), float(batch.problem is not None))
        parts = (loss, labelled, rows, problems, *(() if table is None else (table,)))
        loss, labelled, rows, problems, *rest = ranks.sum(*parts)
        if batch.problem is not None:
            raise batch.problem
        if loss.device.type == "cpu" and bool(problems > 0):
            raise FairMTError(
                "labels, members or sample_weight: another rank met a bad value, expected none; see its error"
            )
        return loss, labelled, rows, rest[0] if rest else None


def _blocks(layout: Layout) -> dict[str, nn.Module]:
    """One block for each kind of task there is, in the layout's order."""
    specs = {kind: [head.task for head in layout.heads_of(kind)] for kind in layout.kind_columns}
    blocks: dict[str, nn.Module] = {}
    for kind, own in specs.items():
        if kind == "detection":
            blocks[kind] = DetectionBlock([spec for spec in own if isinstance(spec, Detection)])
        elif kind == "classification":
            blocks[kind] = ClassificationBlock([spec for spec in own if isinstance(spec, Classification)])
        else:
            blocks[kind] = RegressionBlock([spec for spec in own if isinstance(spec, Regression)])
    return blocks
