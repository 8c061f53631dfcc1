"""The minimum-norm problem solved on the device, in a fixed number of steps and without waiting for it.

A primal–dual interior point after Mehrotra. Nothing here branches on a value or reads one back, so a CUDA graph can
hold it. Launches are what it costs, not arithmetic: hence an explicit inverse, which serves every product of a step,
and a start that is already the answer when the gradients are orthogonal.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Enough for a relative KKT residual of 1e-8 on singular, duplicated and badly scaled Grams; most need eight.
STEPS = 11
# How far to go towards the first weight or slack that would vanish.
CAUTION = 0.98
# How far from the boundary to start: smaller saves steps and, much smaller, gets stuck there.
CENTRING = 0.03
# Added to each task's own diagonal to solve for a step: it carries Grams that are singular, or that float32 rounding
# has made slightly indefinite. The right side of the step knows nothing of it, so it costs no accuracy.
RIDGE = 1e-7
# A squared norm, relative to the largest, that passes for 0.
VANISHING = 1e-30


def minimise(gram: Tensor, linear: Tensor, active: Tensor | None = None) -> Tensor:
    """The point of the simplex where ½ xᵀ·gram·x + linearᵀx is least, over the tasks where ``active``; float64.

    The others get exactly 0; all do when none is active.
    """
    if active is not None:
        gram, linear = _without_inactive(gram, linear, active)
    diagonal = gram.diagonal()
    size = diagonal.amax() + linear.abs().amax()
    size = torch.where(size > 0, size, 1.0)
    gram, linear = gram / size, linear / size
    identity = torch.eye(len(linear), dtype=gram.dtype, device=gram.device)
    curvatures = gram.diagonal().clamp_min(0) + VANISHING
    regularised = torch.addcmul(gram, identity, curvatures, value=RIDGE)
    still = torch.zeros_like(linear)

    # The point x and, for each task, the slack z by which its slope exceeds the least one. At the optimum x·z = 0.
    state, linear = _start(gram, linear, curvatures)
    for _ in range(STEPS):
        x, z = state.unbind()
        ratio = z / x
        factor, failed = torch.linalg.cholesky_ex(torch.addcmul(regularised, identity, ratio))
        half = torch.linalg.solve_triangular(factor, identity, upper=False)
        inverse = half.T @ half
        # The inverse within the plane Σdx = 0.
        to_ones = inverse.sum(0)
        solve = torch.addr(inverse, to_ones, to_ones / to_ones.sum(), alpha=-1)

        # Predictor: the Newton step to x·z = 0. It takes the share of x away from x, and 1 - share of z from z.
        slope = torch.addmv(linear, gram, x)
        decrease = torch.mv(solve, slope - torch.dot(x, slope))  # a constant changes nothing, but would cost digits
        share = decrease / x
        # Only 1 / reach of that step can be gone; the less it is, the more centring is needed.
        reach = (torch.linalg.vector_norm(share - 0.5, float("inf")) + 0.5).clamp_min(1)
        centring = (1 - reach.reciprocal()) ** 3

        # Corrector: aim at x·z = centring · mean(x·z), and make up for the product of the predictor's own changes.
        taken = z * share
        product = torch.addcmul(taken, taken, share, value=-1)
        correction = torch.addcdiv(product, centring * torch.dot(x, z), x, value=-1 / len(x))
        decrease_x = torch.addmv(decrease, solve, correction)
        decrease_z = torch.addcmul(correction + z, ratio, decrease_x, value=-1)
        decreases = torch.stack((decrease_x, decrease_z))
        decreases = torch.where(failed == 0, decreases, still)  # a Gram too indefinite to go on with: stay here
        fastest = (decreases / state).amax().clamp_min(CAUTION)
        state = torch.addcmul(state, decreases, fastest.reciprocal(), value=-CAUTION)

    x = state[0]
    if active is not None:
        x = torch.where(active, x, 0.0)
    return x / x.sum().clamp_min(torch.finfo(x.dtype).tiny)


def _without_inactive(gram: Tensor, linear: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The problem with the inactive tasks' rows at 0 and their cost too high for them to get any weight."""
    gram = torch.where(active & active[:, None], gram, 0.0)
    highest = torch.where(active, linear, -torch.inf).amax()
    return gram, torch.where(active, linear, highest + 2 * gram.diagonal().amax())


def _start(gram: Tensor, linear: Tensor, curvatures: Tensor) -> tuple[Tensor, Tensor]:
    """A point on the central path the problem would have with orthogonal gradients, and ``linear`` less its level.

    With a diagonal Gram the optimum is x = (level - linear)₊ / curvatures, with the level that makes it sum to 1.
    That start is right for tasks of any scale, even when their scales differ by many orders. The level is taken off
    ``linear`` because a constant changes nothing on the simplex, and a large one would cost digits.
    """
    costs, order = linear.sort()
    flatness = 1 / curvatures[order]
    # As in a projection: level_k is right if only the k cheapest tasks have weight; the least level is the true one.
    gathered = flatness.cumsum(0)
    for _ in range(2):  # the second pass restores the digits that large costs take from the level
        level = ((1 + (costs * flatness).cumsum(0)) / gathered).amin()
        costs, linear = costs - level, linear - level
    wanted = -linear / curvatures
    optimum = wanted.clamp_min(0)
    product = CENTRING * torch.dot(optimum * optimum, curvatures) / optimum.sum() ** 2
    # x·z = product for all tasks: x is the positive root of curvature · (x² - wanted · x) = product.
    root = torch.sqrt(wanted * wanted + 4 * product / curvatures)
    x = torch.where(wanted > 0, (root + wanted) / 2, 2 * product / (curvatures * (root - wanted)))
    x = x.clamp_max(1.0)
    x = x / x.sum()
    slope = torch.addmv(linear, gram, x)
    z = product / x + (slope - torch.dot(x, slope)).clamp_min(0)  # more where the other tasks keep a task out
    return torch.stack((x, z)), linear
