"""The weights on the simplex that make a quadratic least: the minimum-norm problem of multi-task gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FairMTError
from . import active_set


def min_norm(K: Tensor, b: Tensor) -> Tensor:
    """The α on the simplex that minimises ½ αᵀKα + bᵀα, in the dtype and on the device of ``K``, detached.

    ``K`` is the Gram of the tasks' gradients and ``b`` their products with one more gradient (0 for the plain
    minimum norm). Duplicates, zero rows, singular Grams and tasks of very different scale are all right. With ``K``
    and ``b`` both 0 the weights are uniform.

    >>> min_norm(torch.tensor([[4.0, 0.0], [0.0, 1.0]]), torch.zeros(2))
    tensor([0.2000, 0.8000])
    """
    _check(K, b)
    return solve(K.detach().double(), b.detach().double()).to(K.dtype)


def solve(K: Tensor, b: Tensor, active: Tensor | None = None, support: Tensor | None = None) -> Tensor:
    """``min_norm`` in float64, unchecked, over the tasks where ``active``; the others get 0, all do if none is.

    ``support`` guesses which tasks have a positive weight (those of the step before), to save time on the CPU.
    Elsewhere it isn't used: there every problem takes the same steps, and none waits for the device.
    """
    if K.device.type != "cpu":
        from . import fused  # here, as it imports Triton, which is slow and of no use on the CPU

        return fused.minimise(K, b, active)
    guess = None if support is None else support.nonzero().flatten().tolist()
    if active is None or bool(active.all()):
        return active_set.minimise(K, b, guess)
    alpha = torch.zeros_like(b)
    index = active.nonzero().flatten()
    if len(index):
        if guess is not None:
            position = {task: place for place, task in enumerate(index.tolist())}
            guess = [position[task] for task in guess if task in position]
        alpha[index] = active_set.minimise(K[index][:, index], b[index], guess)
    return alpha


def _check(K: Tensor, b: Tensor) -> None:
    if K.ndim != 2 or K.shape[0] != K.shape[1] or not len(K):
        raise FairMTError(f"K: met shape {tuple(K.shape)}, expected a square matrix with one row a task")
    if b.shape != K.shape[:1]:
        raise FairMTError(f"b: met shape {tuple(b.shape)}, expected {tuple(K.shape[:1])}, one value for each row of K")
    for name, tensor in (("K", K), ("b", b)):
        if not tensor.is_floating_point():
            raise FairMTError(f"{name}: met {tensor.dtype}, expected a floating-point dtype")
        # A look at the values would wait for an accelerator.
        if tensor.device.type == "cpu" and not tensor.isfinite().all():
            raise FairMTError(f"{name}: met values that are not finite, expected finite ones")
    if b.device != K.device:
        raise FairMTError(f"b: met device {b.device}, expected {K.device}, that of K")
