"""Algorithm 1 of the paper: the aggregation weights without a projection."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FairMTError, check_integer, check_number, describe


def frank_wolfe(psi: Tensor, mu: float | Tensor, tol: float = 1e-6, max_iter: int = 1000) -> tuple[Tensor, float, int]:
    """Weights w that maximise wᵀΨ − μ/2‖w‖² over the simplex, by Frank–Wolfe with exact line search.

    It zigzags: to a small gap it takes thousands of iterations where the projection takes one. As printed, the gap
    is tested after the update with the gradient from before it.

    Args:
        psi: (d,) violations.
        mu: strength of the quadratic term, positive.
        tol: the gap at which to stop.
        max_iter: the most iterations.

    Returns:
        Weights (d,), the last gap, and the number of iterations.

    >>> import torch
    >>> w, gap, iterations = frank_wolfe(torch.tensor([0.1, 0.9]), mu=0.1)
    >>> w, iterations
    (tensor([0., 1.]), 2)
    """
    check_psi(psi)
    check_mu(mu)
    check_stop(tol, max_iter)
    psi = psi.detach()
    w, gap, iterations = iterate(
        psi,
        torch.ones_like(psi, dtype=torch.bool),
        torch.as_tensor(mu, dtype=psi.dtype, device=psi.device).detach(),
        tol,
        max_iter,
    )
    return w, float(gap), int(iterations)


def iterate(psi: Tensor, measured: Tensor, mu: Tensor, tol: float, max_iter: int) -> tuple[Tensor, Tensor, Tensor]:
    """The iterations, over the measured entries, from uniform weights.

    The host looks at the gap on the CPU only; on an accelerator finished iterations stand still instead.
    """
    w = measured.to(psi.dtype) / measured.sum().clamp(min=1)
    numbers = torch.arange(psi.numel(), device=psi.device)
    gap, done = psi.new_zeros(()), torch.zeros((), dtype=torch.bool, device=psi.device)
    count = torch.zeros((), dtype=torch.long, device=psi.device)
    for _ in range(max_iter):
        gradient = mu * w - psi
        vertex = torch.where(measured, gradient, torch.inf).argmin()
        direction = (numbers == vertex).to(psi.dtype) - w
        slope = gradient @ direction
        curvature = mu * (direction @ direction)
        step = (-slope / torch.where(curvature > 0, curvature, 1.0)).clamp(0, 1)
        w = torch.where(done, w, w + step * direction)
        gap = torch.where(done, gap, -slope)
        count = count + ~done
        done = done | (gap <= tol)
        if psi.device.type == "cpu" and bool(done):
            break
    return w, gap, count


def check_psi(psi: object) -> None:
    if not isinstance(psi, Tensor) or psi.ndim != 1 or psi.numel() == 0 or not psi.is_floating_point():
        met = f"shape {tuple(psi.shape)} of {psi.dtype}" if isinstance(psi, Tensor) else describe(psi)
        raise FairMTError(f"psi: met {met}, expected a floating tensor of shape (d,), d ≥ 1")
    if psi.device.type == "cpu" and not bool(psi.isfinite().all()):
        raise FairMTError("psi: met entries that are not finite, expected finite ones; leave out what is not measured")


def check_mu(mu: object) -> None:
    if not isinstance(mu, Tensor):
        check_number("mu", mu, above=0)
    elif mu.device.type == "cpu":
        check_number("mu", mu.item() if mu.numel() == 1 else mu, above=0)


def check_stop(tol: object, max_iter: object) -> None:
    check_number("tol", tol, least=0)
    check_integer("max_iter", max_iter, 1)
