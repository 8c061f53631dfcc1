"""The gaps of one task on one batch: the paper's estimate, differentiable by autograd.

The criterion computes the same from remembered sums and differentiates by hand; these are the plain statement.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..blocks.regression import error_and_slope
from ..errors import FairMTError, check_choice, check_number
from ..labels import EXPECTED, decode, legal
from ..layout import Kind
from ..tasks import RegressionLoss
from .gaps import comparable, spread
from .rates import check_members, check_scores, group_rates, shape_of
from .sides import equalized_odds


def aeod(
    probs: Tensor,
    labels: Tensor,
    members: Tensor,
    num_groups: int,
    beta: float = 1.0,
    *,
    asymmetric: bool = True,
) -> Tensor:
    """Asymmetric equalized odds of one detection: ( max_g [τ − TPR_g]₊² + β max_g [FPR_g − φ]₊² ) / (1 + β).

    Args:
        probs: (B,) soft positive scores.
        labels: (B,) 0, 1 or missing.
        members: (B,) group numbers, -1 where unknown.
        num_groups: number of groups.
        beta: weight of the false positive side; 0 leaves it out (equal opportunity).
        asymmetric: whether the best group's rate is a fixed reference (no gradient).

    Returns:
        A 0-dim tensor; NaN when neither side has two groups with data.

    >>> import torch
    >>> aeod(torch.tensor([0.9, 0.5, 0.1, 0.1]), torch.tensor([1, 1, 0, 0]), torch.tensor([0, 1, 0, 1]), 2)
    tensor(0.0800)
    """
    check_scores("probs", probs, (1,))
    values, labelled = _labels("detection", labels, probs.shape[0])
    return _one_vs_rest(probs.unsqueeze(1), values == 1, labelled, members, num_groups, beta, asymmetric)[0]


def caeod(
    probs: Tensor,
    labels: Tensor,
    members: Tensor,
    num_groups: int,
    beta: float = 1.0,
    *,
    asymmetric: bool = True,
) -> Tensor:
    """Class-wise asymmetric equalized odds: `aeod` of each class against the rest.

    Args:
        probs: (B, C) class probabilities.
        labels: (B,) class numbers, or missing.

    Returns:
        (C,); NaN for a class neither side of which has two groups with data.
    """
    check_scores("probs", probs, (2,))
    values, labelled = _labels("classification", labels, probs.shape[0], probs.shape[1])
    positive = values == torch.arange(probs.shape[1], device=probs.device)
    return _one_vs_rest(probs, positive, labelled, members, num_groups, beta, asymmetric)


def aep(
    predictions: Tensor,
    labels: Tensor,
    members: Tensor,
    num_groups: int,
    loss: RegressionLoss = "mse",
    *,
    asymmetric: bool = True,
) -> Tensor:
    """Asymmetric error parity of one regression: max_g [Err_g − min_g Err_g]₊², in the labels' own units.

    Args:
        predictions: (B,).
        labels: (B,) numbers, NaN where missing.
        loss: the error: "mse", "mae" or "huber".

    Returns:
        A 0-dim tensor; NaN when fewer than two groups have data.
    """
    check_scores("predictions", predictions, (1,))
    check_choice("loss", loss, ("mse", "mae", "huber"))
    values, labelled = _labels("regression", labels, predictions.shape[0])
    check_members(members, num_groups, predictions.shape[0])
    wide = torch.promote_types(predictions.dtype, torch.float32)  # squares leave the range of half precision
    residual = torch.where(labelled, predictions.unsqueeze(1).to(wide) - values.to(wide), 0)
    error, _ = error_and_slope(residual, loss)
    rates, counts = group_rates(error, labelled, members, num_groups)
    missing = counts == 0
    side = spread(rates.masked_fill(missing, 0), missing, +1, asymmetric=asymmetric)
    return torch.where(comparable(missing), side.gap.square(), torch.nan)[0].to(predictions.dtype)


def _one_vs_rest(
    probs: Tensor,
    positive: Tensor,
    labelled: Tensor,
    members: Tensor,
    num_groups: int,
    beta: float,
    asymmetric: bool,
) -> Tensor:
    check_number("beta", beta, least=0)
    check_members(members, num_groups, probs.shape[0])
    psi = probs.new_zeros(probs.shape[1])
    measured = torch.zeros_like(psi, dtype=torch.bool)
    for side in equalized_odds(beta):
        rows = labelled & (positive if side.rows == "positive" else ~positive)
        rates, counts = group_rates(probs, rows, members, num_groups)
        missing = counts == 0
        found = spread(rates.masked_fill(missing, 0), missing, side.worse, asymmetric=asymmetric)
        psi = psi + side.share * found.gap.square()
        measured = measured | comparable(missing)
    return torch.where(measured, psi, torch.nan)


def _labels(kind: Kind, labels: object, rows: int, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Values and mask (B, 1)."""
    if not isinstance(labels, Tensor) or labels.shape != (rows,):
        raise FairMTError(f"labels: met {shape_of(labels)}, expected a tensor of shape ({rows},)")
    column = labels.unsqueeze(1)
    values, labelled = decode(kind, column)
    bad = legal(kind, values, classes) != values
    if labels.device.type == "cpu" and bool(bad.any()):
        expected = EXPECTED[kind].format(last=(classes or 0) - 1)
        raise FairMTError(f"labels: met {column[bad][0].item():g}, expected {expected}")
    return values, labelled & ~bad
