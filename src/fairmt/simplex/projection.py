"""Euclidean projection onto the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FairMTError, describe


def project_simplex(v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The point of the simplex nearest to ``v``; entries where ``mask`` is False are held at 0.

    The projection is ``(v - threshold)₊`` with the one threshold that makes it sum to 1; a sort finds it. Dtype and
    device are kept, and nothing waits for the device. With no entry left, all are 0.

    >>> project_simplex(torch.tensor([0.9, 0.5, -1.0]))
    tensor([0.7000, 0.3000, 0.0000])
    """
    if not isinstance(v, Tensor) or v.ndim != 1 or v.numel() == 0 or not v.is_floating_point():
        met = f"{v.dtype} of shape {tuple(v.shape)}" if isinstance(v, Tensor) else describe(v)
        raise FairMTError(f"v: met {met}, expected a floating-point vector with at least one entry")
    if mask is not None and (mask.shape != v.shape or mask.dtype != torch.bool):
        raise FairMTError(
            f"mask: met {mask.dtype} of shape {tuple(mask.shape)}, expected torch.bool of shape {tuple(v.shape)}"
        )
    if v.device.type == "cpu" and not bool((v if mask is None else v[mask]).isfinite().all()):
        raise FairMTError("v: met entries that are not finite, expected finite ones")
    return project(v, mask)


def project(v: Tensor, mask: Tensor | None = None) -> Tensor:
    """`project_simplex`, unchecked."""
    wide = v.to(torch.promote_types(v.dtype, torch.float32))  # a sum of many entries outgrows half precision
    if mask is not None:
        wide = wide.masked_fill(~mask, -torch.inf)
    # The projection doesn't change when v is shifted; with the largest entry at 0 the sums below lose no digits to it.
    shifted = wide - wide.amax()
    descending = shifted.sort(descending=True).values
    # threshold_k is right if only the k largest entries stay positive; the largest threshold over k is the true one.
    counts = torch.arange(1, v.numel() + 1, dtype=wide.dtype, device=v.device)
    threshold = ((descending.cumsum(0) - 1) / counts).amax()
    projected = (shifted - threshold).clamp_min(0).to(v.dtype)
    return projected if mask is None else projected.masked_fill(~mask, 0)
