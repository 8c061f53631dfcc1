"""Numbers: squared, absolute or Huber error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..moments import deviation
from ..state import State
from ..tasks import Regression, RegressionLoss, per_column
from .block import Terms


def error_and_slope(residual: Tensor, loss: RegressionLoss, delta: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """The error of each residual, and its derivative."""
    if loss == "mse":
        return residual * residual, 2 * residual
    if loss == "mae":
        return residual.abs(), residual.sign()
    inside = residual.clamp(-delta, delta) if isinstance(delta, float) else residual.minimum(delta).maximum(-delta)
    return inside * (residual - 0.5 * inside), inside


class RegressionBlock(State):
    """All regression columns of a problem."""

    scale: Tensor
    running: Tensor
    delta: Tensor

    def __init__(self, specs: Sequence[Regression]) -> None:
        super().__init__()
        scale = [v for s in specs for v in per_column(1.0 if s.scale is None else s.scale, s.n)]
        delta = [s.delta for s in specs for _ in range(s.n)]
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64), persistent=False)
        self.register_buffer("delta", torch.tensor(delta, dtype=torch.float64), persistent=False)
        running = [s.scale is None for s in specs for _ in range(s.n)]
        self.register_buffer("running", torch.tensor(running), persistent=False)
        column_losses = [s.loss for s in specs for _ in range(s.n)]
        self.losses: list[RegressionLoss] = sorted(set(column_losses))
        for loss in self.losses:
            mask = torch.tensor([loss == own for own in column_losses])
            self.register_buffer(f"is_{loss}", mask, persistent=False)

    def _errors(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        delta = self.constant("delta", residual.dtype)
        error, slope = error_and_slope(residual, self.losses[0], delta)
        for loss in self.losses[1:]:
            mask = self.get_buffer(f"is_{loss}")
            other_error, other_slope = error_and_slope(residual, loss, delta)
            error, slope = torch.where(mask, other_error, error), torch.where(mask, other_slope, slope)
        return error, slope

    def terms(self, logits: Tensor, labels: Tensor, weight: Tensor, positive: Tensor, moments: Tensor) -> Terms:
        error, slope = self._errors(logits - labels)
        return Terms(
            loss=(weight * error).sum(0),
            labelled=weight.sum(0),
            delta=weight * slope,
            score=error,
            hard=error,
            slope=slope,
        )

    def pull(self, terms: Terms, gradient: Tensor) -> Tensor:
        return gradient * terms.slope

    def unit_error(self, moments: Tensor) -> Tensor:
        """The error of a miss by one standard deviation: variance for squares, deviation for absolute errors."""
        spread = torch.where(self.running, deviation(moments), self.scale)
        error, _ = self._errors(spread.unsqueeze(0))
        return error.squeeze(0)
