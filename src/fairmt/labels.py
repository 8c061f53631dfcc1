"""What a label says: a value, nothing, or nonsense. One rule a kind of task, for every dtype.

Floats mark a missing label by NaN, integers by a negative number (which a regression's integers may be).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layout import Kind


class Labels(NamedTuple):
    """Values, 0 where missing, and which rows have one."""

    values: Tensor
    labelled: Tensor


def decode(kind: Kind, labels: Tensor) -> Labels:
    """Reads labels of one kind; whether they make sense is another question (see `legal`)."""
    if labels.is_floating_point():
        infinite = torch.inf if kind == "regression" else None
        values = torch.nan_to_num(labels, posinf=infinite, neginf=None if infinite is None else -infinite)
        return Labels(values, labels == labels)
    if labels.dtype != torch.bool:
        labels = labels.long()  # the small integer types lack operations, or room for the number of classes
    if kind == "regression" or labels.dtype == torch.bool:
        return Labels(labels, torch.ones_like(labels, dtype=torch.bool))
    return Labels(labels.clamp(min=0), labels >= 0)


def legal(kind: Kind, values: Tensor, classes: Tensor | int | None = None) -> Tensor:
    """Decoded values where they make sense, and anything else where they don't: good ones are its fixed points.

    `classes` is the number of classes, one for all columns or one each.
    """
    if kind == "detection":
        return values * values if values.dtype != torch.bool else values
    if kind == "regression":
        return torch.nan_to_num(values, posinf=0.0, neginf=0.0) if values.is_floating_point() else values
    assert classes is not None
    whole = values.floor() if values.is_floating_point() else values
    last = torch.as_tensor(classes - 1, dtype=values.dtype, device=values.device)
    return torch.minimum(whole.clamp(min=0), last)


def unify(labels: list[Tensor], kind: Kind, dtype: torch.dtype) -> list[Tensor]:
    """Labels of one dtype, so that joining them does not turn an integer's "missing" into a value."""
    if len({y.dtype for y in labels}) <= 1:
        return labels
    return [y.to(dtype) if y.is_floating_point() else _with_nan(decode(kind, y), dtype) for y in labels]


def _with_nan(labels: Labels, dtype: torch.dtype) -> Tensor:
    return torch.where(labels.labelled, labels.values.to(dtype), torch.nan)


EXPECTED: dict[Kind, str] = {
    "detection": "0, 1 or missing (NaN; a negative integer)",
    "classification": "a class number from 0 to {last} or missing (NaN; a negative integer)",
    "regression": "a finite number, or NaN where missing",
}
