"""The common shape of the three kinds."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Terms(NamedTuple):
    """What one kind gives for a batch; columns are the kind's, in order.

    Attributes:
        loss: (T,) weighted sum over the labelled rows of each task's loss.
        labelled: (T,) weight of the labelled rows, so that the task's loss is loss / labelled.
        delta: (B, C) gradient of each task's `loss` at its logits.
        score: (B, C) what the fairness rates average: soft probabilities, or errors.
        hard: (B, C) the same for thresholded predictions.
        slope: (B, C) how `score` answers to the logits; its meaning is the block's own.
    """

    loss: Tensor
    labelled: Tensor
    delta: Tensor
    score: Tensor
    hard: Tensor
    slope: Tensor


class Block(Protocol):
    """A kind of task."""

    def terms(self, logits: Tensor, labels: Tensor, weight: Tensor, positive: Tensor, moments: Tensor) -> Terms:
        """Losses, their gradients and scores of a batch (see `Batch`); `moments` are the label moments (3, C)."""
        ...

    def pull(self, terms: Terms, gradient: Tensor) -> Tensor:
        """A gradient at the scores, taken back to the logits."""
        ...
