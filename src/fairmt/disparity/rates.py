"""Means by group: a sum of scores over a sum of weights, each one matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FairMTError, check_integer, describe


def one_hot(members: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """(B, G) membership; a row of zeros where unknown."""
    numbers = torch.arange(num_groups, device=members.device)
    return (members.unsqueeze(1) == numbers).to(dtype)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, 0 where the latter is 0, with a gradient that is finite everywhere."""
    return numerator / torch.where(denominator > 0, denominator, 1.0)


def group_rates(scores: Tensor, mask: Tensor, members: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The mean score of each group over the rows in `mask`, and how many those are.

    Args:
        scores: (B,) or (B, columns).
        mask: of the same shape; which rows count (or with what weight).
        members: (B,) group numbers, -1 where unknown.
        num_groups: number of groups.

    Returns:
        Rates (NaN for a group without rows) and counts, both (groups, columns) in the scores' dtype (half precision
        rounds counts above 2,048; the rates are right all the same).

    >>> import torch
    >>> rates, counts = group_rates(
    ...     torch.tensor([0.2, 0.4, 1.0]), torch.tensor([True, True, True]), torch.tensor([0, 0, -1]), num_groups=2
    ... )
    >>> rates.squeeze(1), counts.squeeze(1)
    (tensor([0.3000,    nan]), tensor([2., 0.]))
    """
    check_scores("scores", scores)
    columns = scores if scores.ndim == 2 else scores.unsqueeze(1)
    if not isinstance(mask, Tensor) or mask.shape != scores.shape:
        raise FairMTError(f"mask: met {shape_of(mask)}, expected {shape_of(scores)}, as scores has")
    check_members(members, num_groups, columns.shape[0])
    wide = torch.promote_types(scores.dtype, torch.float32)  # half precision counts to 2,048 and no further
    known = (members >= 0).unsqueeze(1)
    weight = torch.where(known, mask.view_as(columns), 0).to(wide)
    belongs = one_hot(members, num_groups, wide).T
    counts = belongs @ weight
    sums = belongs @ torch.where(weight > 0, columns.to(wide) * weight, 0)
    return torch.where(counts > 0, ratio(sums, counts), torch.nan).to(scores.dtype), counts.to(scores.dtype)


def check_scores(name: str, scores: object, ndim: tuple[int, ...] = (1, 2)) -> None:
    if not isinstance(scores, Tensor) or scores.ndim not in ndim or not scores.is_floating_point():
        expected = " or ".join({1: "(rows,)", 2: "(rows, columns)"}[n] for n in ndim)
        raise FairMTError(f"{name}: met {shape_of(scores)}, expected a floating tensor of shape {expected}")


def check_members(members: object, num_groups: object, rows: int) -> None:
    groups = check_integer("num_groups", num_groups, 1)
    if not isinstance(members, Tensor) or members.shape != (rows,) or members.is_floating_point():
        raise FairMTError(f"members: met {shape_of(members)}, expected an integer tensor of shape ({rows},)")
    if members.device.type == "cpu" and rows:
        low, high = (int(v) for v in members.aminmax())
        if low < -1 or high >= groups:
            met = low if low < -1 else high
            raise FairMTError(f"members: met group number {met}, expected 0 to {groups - 1}, or -1 where unknown")


def shape_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)} of {value.dtype}"
    return describe(value)
