"""What happened in a step, by name. Tensors until someone asks: asking is what waits for a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..constraint import Infeasible, Violation
from ..geometry import Gram
from ..layout import Layout


@dataclass(frozen=True)
class Kkt:
    """How far a step is from a solution of the constrained problem.

    Attributes:
        violation: wᵀΨ − ε, at most 0 where the constraint holds; NaN where nothing is measured.
        slackness: η·(wᵀΨ − ε), 0 at a solution.
        stationarity: ‖Σαg + ηg_Φ‖ relative to Σα‖g‖ + η‖g_Φ‖: 0 where the gradients balance. (Where they all vanish by
            themselves it says nothing.) NaN if no gradients were compared.
        above: the entries above the tolerance, worst first, by the gaps that drive the multiplier (`dual_on`).
    """

    violation: float
    slackness: float
    stationarity: float
    above: tuple[Infeasible, ...]


@dataclass(frozen=True)
class Step:
    """One call of a criterion, detached. Dictionaries hold what there is: active tasks, measured entries."""

    layout: Layout
    eta: Tensor
    task_losses: Tensor = field(repr=False)
    task_active: Tensor = field(repr=False)
    task_alpha: Tensor = field(repr=False)
    encoder_alpha: Tensor = field(repr=False)
    found: Violation | None = field(default=None, repr=False)
    violation: Tensor | None = None
    gram: Gram | None = field(default=None, repr=False)

    @cached_property
    def active(self) -> tuple[str, ...]:
        """The tasks with a label in this batch."""
        flags = self.task_active.tolist()
        return tuple(self.layout.task_names[i] for i in self.layout.display_order if flags[i])

    @cached_property
    def losses(self) -> dict[str, Tensor]:
        """The mean loss of each active task, unscaled."""
        return {name: self.task_losses[self.layout.task_names.index(name)] for name in self.active}

    @cached_property
    def alpha(self) -> dict[str, Tensor]:
        """The weights of the tasks, on the simplex over the active ones; 0 for the others."""
        values = self.task_alpha.unbind()
        return {self.layout.task_names[i]: values[i] for i in self.layout.display_order}

    @cached_property
    def psi(self) -> dict[str, Tensor]:
        """The measured entries' squared gaps of soft rates."""
        return {} if self.found is None else self._entries(self.found.psi)

    @cached_property
    def psi_hard(self) -> dict[str, Tensor]:
        """The same of thresholded predictions."""
        return {} if self.found is None else self._entries(self.found.psi_hard)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """w, on the simplex over the measured entries."""
        return {} if self.found is None else self._entries(self.found.weights)

    @property
    def phi(self) -> Tensor:
        """The aggregated violation of soft rates."""
        return torch.zeros_like(self.eta) if self.found is None else self.found.phis[0]

    def _entries(self, values: Tensor) -> dict[str, Tensor]:
        assert self.found is not None
        measured = self.found.measured.tolist()
        named = zip(self.layout.entry_names, measured, values.unbind(), strict=True)
        return {name: value for name, is_measured, value in named if is_measured}

    def stationarity(self) -> float:
        """‖Σαg + ηg_Φ‖ over Σα‖g‖ + η‖g_Φ‖. On several ranks, ask on each."""
        if self.gram is None:
            return float("nan")
        K, cross, square = self.gram.K, self.gram.cross, self.gram.phi_square().clamp(min=0)
        alpha, eta = self.encoder_alpha, self.eta
        left = alpha @ K @ alpha + 2 * eta * (alpha @ cross) + eta * eta * square
        whole = alpha @ K.diagonal().clamp(min=0).sqrt() + eta * square.sqrt()
        return float(left.clamp(min=0).sqrt() / whole) if whole > 0 else 0.0
