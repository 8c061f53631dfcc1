"""The gap between the group that is worst off and the one that is best off."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Spread(NamedTuple):
    """Gaps (0 where fewer than two groups are measured), and the groups they lie between."""

    gap: Tensor
    worst: Tensor
    best: Tensor


def spread(rates: Tensor, missing: Tensor, worse: Tensor | int, *, asymmetric: bool = True) -> Spread:
    """The gap over the groups, which are the last dimension but one.

    max_g [τ − r_g]₊ with τ = max_g r_g is max − min, so by value no gap has a direction. What gives it one is that
    the reference (the best group's rate) takes no gradient: the lagging group is pulled up, the best left alone.

    Args:
        rates: (…, G, S).
        missing: which of them rest on no data, broadcastable to them.
        worse: +1 where a higher rate is worse, -1 where a lower one is; broadcastable to (S,).
        asymmetric: hold the reference fixed under differentiation.
    """
    badness = rates * worse
    worst = badness.masked_fill(missing, -torch.inf).max(-2)
    best = badness.masked_fill(missing, torch.inf).min(-2)
    reference = best.values.detach() if asymmetric else best.values
    # One measured group is its own reference, a gap of 0; none gives −∞, which is clamped to 0 too.
    return Spread((worst.values - reference).clamp(min=0), worst.indices, best.indices)


def comparable(missing: Tensor) -> Tensor:
    """Where two groups or more are measured."""
    return missing.sum(-2) <= missing.shape[-2] - 2
