"""What the labels seen so far look like: how many, their mean, their spread.

Balanced weights and the scale of a regression come from here. The sums run over all training labels, not over a
window: a label's distribution does not drift as a model's outputs do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch
from .layout import Layout
from .state import State, precise, reciprocal
from .tasks import Regression, Task


class LabelMoments(State):
    """Running moments (3, C) of each column's labels: how many, their mean, and their squared deviations' sum.

    Deviations are summed about the mean so far, not squares about 0: the spread of years or timestamps would drown in
    their size.
    """

    moments: Tensor

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.needed = any(
            head.task.scale is None if isinstance(head.task, Regression) else _balanced(head.task)
            for head in layout.heads
        )
        self.register_buffer("moments", torch.zeros(3, layout.columns, dtype=torch.float64))

    def sums(self, batch: Batch) -> Tensor:
        """The batch's own weights, and deviations from the mean so far, plain and squared; ranks add theirs up."""
        wide = precise(batch.labels.device)
        weight = batch.weight.to(wide)
        deviation = batch.labels.to(wide) - self.moments[1]
        first = weight * deviation
        return torch.stack((weight.sum(0), first.sum(0), (first * deviation).sum(0)))

    def with_batch(self, sums: Tensor) -> Tensor:
        """The moments after a batch; nothing moves."""
        count = self.moments[0] + sums[0]
        shift = sums[1] * reciprocal(count)
        return torch.stack((count, self.moments[1] + shift, self.moments[2] + sums[2] - sums[1] * shift))


def _balanced(task: Task) -> bool:
    weight = getattr(task, "weight", None)
    return isinstance(weight, str) and weight == "balanced"


def negatives_per_positive(moments: Tensor) -> Tensor:
    """(C,): the balanced weight of a detection's positives; 1 until both kinds were seen."""
    _, rate, _ = moments
    return torch.where((rate > 0) & (rate < 1), (1 - rate) / rate, 1.0)


def balanced_classes(moments: Tensor, classes: Tensor) -> Tensor:
    """(C,): the balanced weight of each class, N / (C·N_k); 1 for a class not yet seen."""
    _, share, _ = moments
    return torch.where(share > 0, 1 / (classes * share), 1.0)


def deviation(moments: Tensor) -> Tensor:
    """(C,): the labels' standard deviation; 1 until two different labels were seen."""
    count, mean, squares = moments
    variance = squares / count
    varied = (count > 0) & (variance > 1e-14 * mean * mean)  # the first batch is summed about 0, and rounds
    return torch.where(varied, variance, 1.0).sqrt()
