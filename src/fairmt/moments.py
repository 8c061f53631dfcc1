"""What the labels seen so far look like: how many, their mean, their spread.

Balanced weights and the scale of a regression come from here. The sums run over all training labels, not over a
window: a label's distribution does not drift as a model's outputs do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch
from .layout import Layout
from .state import State, precise
from .tasks import Regression


class LabelMoments(State):
    """Running sums (3, C) of 1, y and y² over the labelled rows of each column."""

    sums: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.needed = any(
            head.task.scale is None
            if isinstance(head.task, Regression)
            else getattr(head.task, "weight", None) == "balanced"
            for head in layout.heads
        )
        self.register_buffer("sums", torch.zeros(3, layout.columns, dtype=torch.float64))

    def of(self, batch: Batch) -> Tensor:
        """The batch's own sums; in double precision, since a variance is a small difference of large sums."""
        wide = precise(batch.labels.device)
        labels, first = batch.labels.to(wide), batch.positive.to(wide)
        return torch.stack((batch.weight.to(wide).sum(0), first.sum(0), (first * labels).sum(0)))


def negatives_per_positive(sums: Tensor) -> Tensor:
    """(C,): the balanced weight of a detection's positives; 1 until both kinds were seen."""
    count, positive, _ = sums
    ratio = (count - positive) / positive
    return torch.where((positive > 0) & (count > positive), ratio, 1.0)


def balanced_classes(sums: Tensor, classes: Tensor) -> Tensor:
    """(C,): the balanced weight of each class, N / (C·N_k); 1 for a class not yet seen."""
    count, members, _ = sums
    return torch.where(members > 0, count / (classes * members), 1.0)


def deviation(sums: Tensor) -> Tensor:
    """(C,): the labels' standard deviation; 1 until two different labels were seen."""
    count, first, second = sums
    mean = first / count
    variance = second / count - mean * mean
    varied = (count > 0) & (variance > 1e-12 * second / count)
    return torch.where(varied, variance, 1.0).sqrt()
