"""AHFDA: weights that lean towards the larger violations, smoothed by a quadratic term.

    Φ(Ψ) = max_{w∈Δ} wᵀΨ − μ/2‖w‖²,   w* = Proj_Δ(Ψ/μ),   ∇Φ = Σ w*∇ψ.

An absolute μ means something else for every problem: violations are squared gaps, so 1 gives uniform weights and
1e-6 the maximum. Relative to the sum, μ = λ·ΣΨ, it means the same at any number and size of entries: λ = 1 gives
weights proportional to the violations, larger ones mix them with uniform weights, λ → 0 is the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import check_choice, check_number
from ..simplex import project
from ..state import TINY
from .frank_wolfe import check_mu, check_psi, check_stop, iterate

Solver = Literal["exact", "frank_wolfe"]
SOLVERS = ("exact", "frank_wolfe")


@dataclass(frozen=True)
class Ahfda:
    """The aggregation of a criterion: violations (d,) and which are measured -> weights (d,).

    Args:
        smoothing: λ, relative to the sum of the violations.
        mu: an absolute μ in its place.
        solver: "exact", or the paper's "frank_wolfe".
        tol, max_iter: when Frank–Wolfe stops.
    """

    smoothing: float = 10.0
    mu: float | None = None
    solver: Solver = "exact"
    tol: float = 1e-6
    max_iter: int = 100

    def __post_init__(self) -> None:
        check_number("smoothing", self.smoothing, above=0)
        if self.mu is not None:
            check_number("mu", self.mu, above=0)
        check_choice("solver", self.solver, SOLVERS)

    def __call__(self, psi: Tensor, measured: Tensor) -> Tensor:
        """`psi` is 0 where not measured; so is the weight."""
        if self.mu is None and self.smoothing >= 1 and self.solver == "exact":
            return self._mixture(psi, measured)
        mu = self.strength(psi)
        if self.solver == "frank_wolfe":
            return iterate(psi, measured, mu, self.tol, self.max_iter)[0]
        return project(psi / mu, measured)

    def strength(self, psi: Tensor) -> Tensor:
        """μ for these violations."""
        if self.mu is not None:
            return psi.new_full((), self.mu)
        total = psi.sum()
        return self.smoothing * torch.where(total > 0, total, 1.0)

    def _mixture(self, psi: Tensor, measured: Tensor) -> Tensor:
        """The projection in closed form: for λ ≥ 1, Ψ/μ sums to at most 1, so each entry is pushed up, none to 0."""
        counted = measured.to(psi.dtype)
        # A trace of uniformity, so that it is what is left where all violations are 0.
        sizes = torch.stack((torch.add(psi, counted, alpha=TINY), counted))
        proportional, uniform = (sizes / sizes.sum(1, keepdim=True).clamp(min=TINY)).unbind()
        return torch.lerp(uniform, proportional, 1 / self.smoothing)


def ahfda(
    psi: Tensor, mu: float | Tensor, solver: Solver = "exact", tol: float = 1e-6, max_iter: int = 100_000
) -> tuple[Tensor, Tensor]:
    """Φ = max_{w∈Δ} wᵀΨ − μ/2‖w‖² as printed, differentiable with gradient w, and the weights w.

    >>> import torch
    >>> psi = torch.tensor([0.01, 0.03], requires_grad=True)
    >>> phi, w = ahfda(psi, mu=0.04)
    >>> phi.backward()
    >>> w, psi.grad
    (tensor([0.2500, 0.7500]), tensor([0.2500, 0.7500]))
    """
    check_psi(psi)
    check_mu(mu)
    check_choice("solver", solver, SOLVERS)
    values = psi.detach()
    strength = torch.as_tensor(mu, dtype=psi.dtype, device=psi.device).detach()
    measured = torch.ones_like(values, dtype=torch.bool)
    if solver == "exact":
        w = project((values - values.amax()) / strength)  # the projection does not mind a shift; a tiny μ does
    else:
        check_stop(tol, max_iter)
        w = iterate(values, measured, strength, tol, max_iter)[0]
    return w @ psi - strength / 2 * (w @ w), w
