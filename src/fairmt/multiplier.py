"""The strength of the fairness term: a dual multiplier, or a fixed factor.

The multiplier rises while the constraint is violated and falls when it holds. A relative step (violation over
tolerance) lets one step size serve every scale. Where the constraint can't be met it would rise for ever; a ceiling
bounds it, and a utility budget, if one is given, stops it before the tasks pay more than was allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import check_number
from .state import State


class FixedStrength(State):
    """η stays what it is, whatever the violation: there is no bound on it (ε = 0)."""

    epsilon = 0.0
    eta: Tensor

    def __init__(self, eta: float) -> None:
        super().__init__()
        self.register_buffer("eta", torch.tensor(eta, dtype=torch.float64))

    def next(self, violation: Tensor, spent: Tensor | None) -> Tensor:
        return self.eta


class DualAscent(State):
    """η ← clip(η + ρ·s, 0, η_max), where s is the violation h relative to ε, at most 20.

    With a utility budget of which a share u is spent, s is at most 20·(1 − u): the multiplier slows as the budget
    runs out, stands where it is used up, and relaxes beyond.

    Args:
        epsilon: ε, the bound on the aggregated violation.
        step: ρ.
        ceiling: η_max.
        relative: step by h/ε; otherwise by h itself, unclipped, as the paper prints it.
    """

    LARGEST = 20.0

    eta: Tensor

    def __init__(self, epsilon: float, *, step: float, ceiling: float, relative: bool = True) -> None:
        super().__init__()
        self.epsilon = check_number("tolerance", epsilon, above=0)
        self.step = check_number("eta_step", step, above=0)
        self.ceiling = check_number("eta_max", ceiling, above=0, finite=False)
        self.relative = relative
        self.register_buffer("eta", torch.zeros((), dtype=torch.float64))

    def next(self, violation: Tensor, spent: Tensor | None) -> Tensor:
        """The multiplier after a step that met violation h = Φ − ε; nothing moves."""
        signal = (violation / self.epsilon).clamp(max=self.LARGEST) if self.relative else violation
        if spent is not None:
            signal = torch.minimum(signal, self.LARGEST * (1 - spent))
        return (self.eta + self.step * signal).clamp(0, self.ceiling)


class UtilityBudget(State):
    """How much of the allowed relative loss of utility the worst task has spent.

    Args:
        allowed: how much higher, relatively, a task's running loss may be than its reference.
        memory: batches over which losses run.
        reference: the losses of a plain run, by task number; without, a task's own best running loss.
    """

    sums: Tensor
    best: Tensor

    def __init__(self, allowed: float, memory: float, tasks: int, reference: Sequence[float] | None = None) -> None:
        super().__init__()
        self.allowed = check_number("max_utility_loss", allowed, above=0)
        self.decay = 1 - 1 / memory
        self.fixed = reference is not None
        best = torch.full((tasks,), torch.inf) if reference is None else torch.tensor(reference)
        self.register_buffer("sums", torch.zeros(2, tasks, dtype=torch.float64))
        self.register_buffer("best", best.double())

    def next(self, loss: Tensor, labelled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums and best losses after a batch, and the share of the budget spent; nothing moves."""
        sums = self.decay * self.sums + torch.stack((loss, labelled))
        running = torch.where(sums[1] > 0, sums[0] / sums[1], torch.inf)
        best = self.best if self.fixed else torch.minimum(self.best, running)
        known = torch.isfinite(running) & torch.isfinite(best) & (best > 0)
        excess = torch.where(known, running / best - 1, -torch.inf)
        return sums, best, excess.amax() / self.allowed
