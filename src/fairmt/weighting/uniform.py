"""Every active task weighs the same."""

from __future__ import annotations

from torch import Tensor

from ..geometry import Geometry
from ..state import State
from .weighting import Situation


class Uniform(State):
    """α = 1/T over the active tasks."""

    geometry: Geometry | None = None

    def due(self, step: int) -> bool:
        return False

    def weights(self, situation: Situation) -> Tensor:
        return normalised(situation.active.to(situation.losses.dtype))

    def changes(self, alpha: Tensor) -> list[tuple[Tensor, Tensor]]:
        return []


def normalised(weights: Tensor) -> Tensor:
    """Over their sum; zeros where that is 0."""
    total = weights.sum()
    return weights / total.masked_fill(total == 0, 1)
