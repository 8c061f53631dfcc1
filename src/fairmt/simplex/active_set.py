"""The minimum-norm problem solved exactly on the CPU, by moving tasks in and out of the support.

Given the support, the tasks with a positive weight, the optimum is one linear solve. Block principal pivoting
guesses the support and mends all of its mistakes at once: a few solves, usually one to three. It may cycle on
degenerate problems; then a primal active set, which moves one task at a time and never goes up, takes over.
Both need a Gram that is positive semidefinite to rounding; others are left to the interior point, which bears more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import interior_point

MAX_PIVOTS = 12
# Makes singular Grams solvable; relative to each task's own diagonal, so that the scale of a task doesn't matter.
RIDGE = 1e-13
# Rounding that passes for zero in a slope, relative to the terms it is the sum of.
SLOPE_TOLERANCE = 1e-12
# How far the two parts of the weights may cancel before they are found again from costs nearer 0.
CANCELLATION = 1e3


class _IndefiniteError(ArithmeticError):
    """The Gram has a negative direction larger than the ridge, as rounding to float32 makes it, or isn't finite."""


class _Quadratic:
    """½ xᵀKx + bᵀx over the plane Σx = 1, with K made positive definite by a ridge."""

    def __init__(self, gram: Tensor, linear: Tensor) -> None:
        self.linear = linear
        self.costs: list[float] = linear.tolist()
        norms_squared: list[float] = gram.diagonal().tolist()
        if not math.isfinite(sum(norms_squared) + sum(self.costs)):
            raise _IndefiniteError
        # A task without gradient has no scale of its own: it gets one that is nothing beside all others.
        floor = 1e-50 * (max(norms_squared) + max(self.costs) - min(self.costs)) or 1.0
        self.scales = [math.sqrt(max(value, 0.0) + floor) for value in norms_squared]
        self.gram = gram.clone()
        self.gram.diagonal().mul_(1 + RIDGE).add_(floor)
        # A constant added to b changes nothing on the simplex; counted from the multiplier, b's own size cancels.
        self.shift = min(self.costs)
        self.ones_and_costs = torch.stack((torch.ones_like(linear), linear - self.shift), 1)

    @property
    def size(self) -> int:
        return len(self.costs)

    def minimise_on(self, support: Sequence[int]) -> tuple[list[float], dict[int, float]]:
        """The minimum with all tasks outside ``support`` at 0: its weights, and the tasks that would improve on it.

        Those come with their slope: how fast the objective falls as weight moves to them, in units of their own
        scale. A slope within rounding of 0 doesn't count.
        """
        everywhere = len(support) == self.size
        index = None if everywhere else torch.tensor(support)
        rows = self.gram if index is None else self.gram.index_select(0, index)
        block = rows if index is None else rows.T.index_select(0, index)
        factor, failed = torch.linalg.cholesky_ex(block)
        if failed.item():
            raise _IndefiniteError
        # Stationarity is K x + b - shift = multiplier · 1, so x = multiplier · K⁻¹1 - K⁻¹(b - shift).
        for _ in range(4):
            right = self.ones_and_costs if index is None else self.ones_and_costs.index_select(0, index)
            from_ones, from_costs = torch.cholesky_solve(right, factor).T.tolist()
            multiplier = (1.0 + sum(from_costs)) / sum(from_ones)
            weights = [multiplier * one - cost for one, cost in zip(from_ones, from_costs, strict=True)]
            if sum(map(abs, from_costs)) <= CANCELLATION * sum(map(abs, weights)):
                break
            self.shift += multiplier  # a b far larger than K: solve again without the part that cancels
            self.ones_and_costs[:, 1] = self.linear - self.shift
            multiplier = 0.0
        if everywhere:
            return weights, {}
        point = torch.tensor(weights, dtype=torch.float64)
        slopes: list[float] = torch.addmv(self.ones_and_costs[:, 1], rows.T, point).tolist()
        inside = set(support)
        spread = sum([self.scales[task] * abs(weight) for task, weight in zip(support, weights, strict=True)])
        improving: dict[int, float] = {}
        for task in [task for task, slope in enumerate(slopes) if slope < multiplier and task not in inside]:
            rounding = SLOPE_TOLERANCE * (self.scales[task] * spread + abs(self.costs[task] - self.shift))
            if slopes[task] < multiplier - rounding:
                improving[task] = (slopes[task] - multiplier) / self.scales[task]
        return weights, improving

    def pivot(self, support: list[int]) -> tuple[bool, list[float]]:
        """Block principal pivoting from ``support``: whether it settled, and its last point, on the simplex."""
        for _ in range(MAX_PIVOTS):
            weights, improving = self.minimise_on(support)
            kept = [task for task, weight in zip(support, weights, strict=True) if weight >= 0]
            settled = len(kept) == len(support) and not improving
            if settled:
                break
            tried, support = support, sorted([*kept, *improving])
        else:
            support = tried
        positive = [max(weight, 0.0) for weight in weights]
        total = sum(positive)
        return settled, self._spread(support, [weight / total for weight in positive])

    def descend(self, start: list[float]) -> list[float]:
        """A primal active set from the feasible point ``start``: every step is a descent, so it ends."""
        point = start
        support = [task for task, weight in enumerate(point) if weight > 0]
        for _ in range(10 * self.size + 10):
            weights, improving = self.minimise_on(support)
            target = self._spread(support, weights)
            blocking = [task for task in support if target[task] < 0]
            if blocking:
                # Go towards the target until the first weight reaches 0, and let that task go.
                first = min(blocking, key=lambda task: point[task] / (point[task] - target[task]))
                step = point[first] / (point[first] - target[first])
                point = [(1 - step) * here + step * there for here, there in zip(point, target, strict=True)]
                point[first] = 0.0
                support = [task for task in support if task != first]
                continue
            point = target
            if not improving:
                break
            support = sorted([*support, min(improving, key=improving.__getitem__)])
        return point

    def _spread(self, support: Sequence[int], weights: Sequence[float]) -> list[float]:
        """Weights on the support as weights on all tasks."""
        point = [0.0] * self.size
        for task, weight in zip(support, weights, strict=True):
            point[task] = weight
        return point


def minimise(gram: Tensor, linear: Tensor, support: Sequence[int] | None = None) -> Tensor:
    """The point of the simplex where ½ xᵀ·gram·x + linearᵀx is least; float64 on the CPU.

    ``support`` is a guess of the tasks with a positive weight, such as those of the step before; all by default.
    """
    if len(linear) == 2:
        return _of_two(gram, linear)
    try:
        problem = _Quadratic(gram, linear)
        settled, point = problem.pivot(list(support or range(problem.size)))
        if not settled:
            point = problem.descend(point)
    except _IndefiniteError:
        return interior_point.minimise(gram, linear)
    weights = torch.tensor(point, dtype=torch.float64)
    return weights / weights.sum()


def _of_two(gram: Tensor, linear: Tensor) -> Tensor:
    """Two tasks in closed form; each weight from its own numerator, so that neither is a rounded 1 minus the other."""
    (first, product), (_, second) = gram.tolist()
    first_cost, second_cost = linear.tolist()
    to_first = max(0.0, second - product + (second_cost - first_cost))
    to_second = max(0.0, first - product + (first_cost - second_cost))
    total = to_first + to_second
    weights = (to_first / total, to_second / total) if 0 < total < math.inf else (0.5, 0.5)
    return torch.tensor(weights, dtype=torch.float64)
