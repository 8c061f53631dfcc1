"""What a weighting sees of a step, and what it gives."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..geometry import Geometry, Gram


class Situation(NamedTuple):
    """One step, as a weighting sees it.

    Attributes:
        losses: (T,) over the label scale, so that regressions compare with the rest; 0 for inactive tasks.
        active: (T,) tasks with a labelled row.
        gram: how the gradients meet, where the weighting has a geometry and it could be measured.
        eta: the multiplier, as it weighs against weights that sum to 1.
    """

    losses: Tensor
    active: Tensor
    gram: Gram | None
    eta: Tensor


class Weighting(Protocol):
    """Gives α on the simplex over the active tasks."""

    geometry: Geometry | None

    def due(self, step: int) -> bool:
        """Whether this step needs a Gram matrix."""
        ...

    def weights(self, situation: Situation) -> Tensor:
        """α (T,); nothing moves."""
        ...

    def changes(self, alpha: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Buffers and what they become once the step is known to be sound."""
        ...
