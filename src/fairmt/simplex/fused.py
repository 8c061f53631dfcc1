"""The interior point in one launch, for CUDA devices with Triton.

Each of the 600 operations of ``interior_point`` is a launch of its own: a millisecond even inside a CUDA graph, for
arithmetic of a few microseconds. Here one program does them all, with the matrices in its registers. The mathematics,
the start and the safeguards are those of ``interior_point``, which explains them. Two things differ:

- A task that isn't active, like a row that pads the problem to a power of two, isn't there at all: its rows are 0.
- One program has neither a Cholesky factor nor a sort. The inverse comes from Gauss–Jordan sweeps, which need no
  pivoting as the matrix is positive definite, and the level of the start from all pairs of costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import interior_point

try:
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
except ImportError:  # it comes with torch's CUDA builds, not with all of torch
    triton = None

# The number of warps for each padded number of tasks, as measured on an H200. A matrix of 128 rows fits no registers:
# it takes twice the time of ``interior_point``, so more than 64 tasks are left to that.
WARPS = {16: 2, 32: 4, 64: 8}

_usable = triton is not None


def minimise(gram: Tensor, linear: Tensor, active: Tensor | None = None) -> Tensor:
    """``interior_point.minimise``, in one launch where that can be had.

    The first call for a padded number of tasks compiles, which takes seconds and belongs before the capture of a
    graph. Where that fails, as it does without a C compiler, one warning says so and ``interior_point`` takes over.
    """
    global _usable
    if _usable and gram.is_cuda and len(linear) <= max(WARPS):
        try:
            return launch(gram, linear, active)
        except Exception as error:
            _usable = False
            warnings.warn(f"Triton failed, so the minimum norm takes a slower solver: {error}", stacklevel=2)
    return interior_point.minimise(gram, linear, active)


def launch(gram: Tensor, linear: Tensor, active: Tensor | None = None) -> Tensor:
    """``minimise`` by the kernel, for at most 64 tasks."""
    weights = torch.empty_like(linear, memory_format=torch.contiguous_format)
    block = max(min(WARPS), 1 << (len(linear) - 1).bit_length())
    with torch.cuda.device(gram.get_device()):  # Triton launches on the current device
        _kernel[(1,)](
            gram.contiguous(),
            linear.contiguous(),
            None if active is None else active.contiguous(),
            weights,
            len(linear),
            BLOCK=block,
            STEPS=interior_point.STEPS,
            CAUTION=interior_point.CAUTION,
            CENTRING=interior_point.CENTRING,
            RIDGE=interior_point.RIDGE,
            VANISHING=interior_point.VANISHING,
            num_warps=WARPS[block],
        )
    return weights


def _jit(function: Callable[..., Any]) -> Any:
    """Compiled at its first call for each BLOCK, and not again for another T or for pointers aligned otherwise."""
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=["K", "b", "active", "weights", "T"])


@_jit
def _product(matrix: tl.tensor, vector: tl.tensor) -> tl.tensor:
    """That of a symmetric matrix, summed down its columns, of which a thread holds one or two, so of vectors too."""
    return tl.sum(matrix * vector[:, None], 0)


@_jit
def _inverse(matrix: tl.tensor, T: int, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The inverse of a positive definite matrix by symmetric sweeps, and how many pivots weren't positive.

    Sweeping row k with its pivot p turns m_ij into m_ij - m_ik m_kj / p outside of row and column k, m_kj into
    m_kj / p within, and p into -1 / p; after all sweeps the matrix is the negative inverse. One product does that,
    once row and column k are 0 and m_kk is taken for -1 in it.
    """
    row = tl.arange(0, BLOCK)
    failures = 0
    for k in range(T):
        swept = row == k
        line = tl.sum(tl.where(swept[:, None], matrix, 0.0), 0)
        pivot = tl.sum(tl.where(swept, line, 0.0), 0)
        failures += tl.where(pivot > 0, 0, 1)
        line = tl.where(swept, -1.0, line)
        rest = tl.where(swept[:, None] | swept[None, :], 0.0, matrix)
        matrix = rest - line[:, None] * (line * (1 / pivot))[None, :]
    return -matrix, failures


@_jit
def _start(
    gram: tl.tensor, linear: tl.tensor, curvatures: tl.tensor, there: tl.tensor, CENTRING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The first x and z, both 1 for tasks that aren't there, and ``linear`` less its level."""
    # level_k is right if exactly the tasks that cost no more than task k have weight; the least level is the true one.
    cheaper = there[:, None] & (linear[:, None] <= linear[None, :])
    flatness = tl.where(cheaper, (1 / curvatures)[:, None], 0.0)
    gathered = tl.sum(flatness, 0)
    for _ in tl.static_range(2):
        level = tl.min(tl.where(there, (1 + tl.sum(flatness * linear[:, None], 0)) / gathered, float("inf")), 0)
        linear = tl.where(there, linear - level, 0.0)
    wanted = -linear / curvatures
    optimum = tl.where(wanted > 0, wanted, 0.0)
    total = tl.sum(optimum, 0)
    product = CENTRING * tl.sum(optimum * optimum * curvatures, 0) / (total * total)
    root = tl.sqrt(wanted * wanted + 4 * product / curvatures)
    x = tl.where(wanted > 0, (root + wanted) / 2, 2 * product / (curvatures * (root - wanted)))
    x = tl.where(x > 1, 1.0, x)
    x = tl.where(there, x / tl.sum(tl.where(there, x, 0.0), 0), 1.0)
    slope = linear + _product(gram, x)
    excess = slope - tl.sum(x * slope, 0)
    z = product / x + tl.where(excess < 0, 0.0, excess)
    return x, tl.where(there, z, 1.0), linear


@_jit
def _kernel(
    K: tl.tensor,
    b: tl.tensor,
    active: tl.tensor,  # or None
    weights: tl.tensor,
    T: int,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    CAUTION: tl.constexpr,
    CENTRING: tl.constexpr,
    RIDGE: tl.constexpr,
    VANISHING: tl.constexpr,
) -> None:
    row = tl.arange(0, BLOCK)
    there = row < T
    if active is not None:
        there = there & tl.load(active + row, there, 0).to(tl.int1)
    both = there[:, None] & there[None, :]
    diagonal = row[:, None] == row[None, :]
    count = tl.sum(there.to(tl.float64), 0)

    gram = tl.load(K + (row[:, None] * T + row[None, :]), both, 0.0)
    curvatures = tl.load(K + row * (T + 1), there, 0.0)
    linear = tl.load(b + row, there, 0.0)
    size = tl.max(curvatures, 0) + tl.max(tl.abs(linear), 0)
    size = tl.where(size > 0, size, 1.0)
    gram = gram / size
    linear = linear / size
    curvatures = tl.where(curvatures < 0, 0.0, curvatures) / size + VANISHING

    x, z, linear = _start(gram, linear, curvatures, there, CENTRING)
    for _ in range(STEPS):
        ratio = z / x
        added = tl.where(there, RIDGE * curvatures + ratio, 1.0)
        inverse, failures = _inverse(tl.where(diagonal, gram + added[None, :], gram), T, BLOCK)
        inverse = tl.where(both, inverse, 0.0)
        to_ones = tl.sum(inverse, 0)
        solve = inverse - to_ones[:, None] * (to_ones / tl.sum(to_ones, 0))[None, :]

        slope = linear + _product(gram, x)
        decrease = _product(solve, slope - tl.sum(x * slope, 0))
        share = decrease / x
        reach = tl.max(tl.abs(share - 0.5), 0) + 0.5
        short = 1 - 1 / tl.where(reach < 1, 1.0, reach)
        centring = short * short * short

        taken = z * share
        gap = tl.sum(tl.where(there, x * z, 0.0), 0)
        correction = taken - taken * share - centring * gap / count / x
        decrease_x = decrease + _product(solve, correction)
        decrease_z = tl.where(there, correction + z - ratio * decrease_x, 0.0)
        fastest = tl.maximum(tl.max(decrease_x / x, 0), tl.max(decrease_z / z, 0))
        step = CAUTION / tl.where(fastest < CAUTION, CAUTION, fastest)
        x = tl.where(failures == 0, x - step * decrease_x, x)
        z = tl.where(failures == 0, z - step * decrease_z, z)

    x = tl.where(there, x, 0.0)
    total = tl.sum(x, 0)
    tl.store(weights + row, tl.where(there, x / total, 0.0), row < T)
