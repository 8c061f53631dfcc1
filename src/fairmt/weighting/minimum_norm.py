"""Task weights of the minimum-norm direction, with the fairness gradient inside.

α = argmin over the simplex of ½‖Σ α_t g_t + η g_Φ‖² = ½ αᵀKα + bᵀα + const
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .. import simplex
from ..errors import check_choice, check_integer
from ..geometry import Geometry, Gram
from ..state import State
from .uniform import normalised
from .weighting import Situation

GradientNorm = Literal["loss+", "none", "l2", "loss"]
NORMS = ("loss+", "none", "l2", "loss")

VANISHED = 1e-6
"""Share of its largest possible value below which a mean gradient is noise."""


FLOOR = 1e-150
"""The least size of a gradient that is divided by; its square is still above 0."""


class MinimumNorm(State):
    """α of the minimum-norm problem; remembers the last α for steps that do not solve it anew.

    Args:
        tasks: number of tasks.
        geometry: how gradients are measured.
        gradient_norm: what each g_t is divided by before solving: its loss times its length ("loss+"), nothing
            ("none"), its length ("l2") or its loss ("loss"). The α found are applied to the plain losses.
        every: solve on every so many-th step only.
        with_fairness: whether b is η⟨g_t, g_Φ⟩, or 0 (as MGDA is).
    """

    alpha: Tensor

    def __init__(
        self,
        tasks: int,
        geometry: Geometry,
        *,
        gradient_norm: GradientNorm = "loss+",
        every: int = 1,
        with_fairness: bool = True,
    ) -> None:
        super().__init__()
        check_choice("gradient_norm", gradient_norm, NORMS)
        self.geometry: Geometry | None = geometry
        self.gradient_norm = gradient_norm
        self.every = check_integer("alpha_every", every, 1)
        self.with_fairness = with_fairness
        self.register_buffer("alpha", torch.full((tasks,), 1 / tasks, dtype=torch.float64))

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def weights(self, situation: Situation) -> Tensor:
        gram = situation.gram
        if gram is None:
            return self._kept(situation.active)
        K, b = self._problem(situation, gram)
        alpha = simplex.solve(K, b, situation.active, support=self.alpha > 0)
        if gram.share is None:
            return alpha
        vanished = torch.where(situation.active, gram.share, 0).amax() < VANISHED
        return torch.where(vanished, self._kept(situation.active), alpha)

    def changes(self, alpha: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(self.alpha, alpha)]

    def _kept(self, active: Tensor) -> Tensor:
        """The last α over the tasks active now; uniform where it had none of them."""
        kept = self.alpha * active
        return normalised(torch.where(kept.sum() > 0, kept, active.to(kept.dtype)))

    def _problem(self, situation: Situation, gram: Gram) -> tuple[Tensor, Tensor]:
        K, b = gram.K, situation.eta * gram.cross if self.with_fairness else torch.zeros_like(gram.cross)
        if self.gradient_norm == "none":
            return K, b
        size = situation.losses if self.gradient_norm != "l2" else torch.ones_like(b)
        if self.gradient_norm != "loss":
            size = size * K.diagonal().clamp(min=0).sqrt()
        size = size.clamp(min=FLOOR)  # nothing to divide where there is no loss or no gradient
        mean = size.sum() / situation.active.sum().clamp(min=1)
        return K / (size.unsqueeze(1) * size), b / (size * mean)
