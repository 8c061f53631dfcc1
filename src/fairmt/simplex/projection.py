"""Euclidean projection onto the probability simplex."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import FairMTError


def project_simplex(v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The point of the simplex nearest to ``v``; entries where ``mask`` is False are held at 0.

    The projection is ``(v - threshold)₊`` with the one threshold that makes it sum to 1; a sort finds it. Dtype and
    device are kept, and nothing waits for the device. With no entry left, all are 0.

    >>> project_simplex(torch.tensor([0.9, 0.5, -1.0]))
    tensor([0.7000, 0.3000, 0.0000])
    """
    if v.ndim != 1 or v.numel() == 0 or not v.is_floating_point():
        raise FairMTError(
            f"v: met {v.dtype} of shape {tuple(v.shape)}, expected a floating-point vector with at least one entry"
        )
    if mask is not None and (mask.shape != v.shape or mask.dtype != torch.bool):
        raise FairMTError(
            f"mask: met {mask.dtype} of shape {tuple(mask.shape)}, expected torch.bool of shape {tuple(v.shape)}"
        )
    if mask is not None:
        v = v.masked_fill(~mask, -torch.inf)
    # The projection doesn't change when v is shifted; with the largest entry at 0 the sums below lose no digits to it.
    shifted = v - v.amax()
    descending = shifted.sort(descending=True).values
    # threshold_k is right if only the k largest entries stay positive; the largest threshold over k is the true one.
    counts = torch.arange(1, v.numel() + 1, dtype=v.dtype, device=v.device)
    threshold = ((descending.cumsum(0) - 1) / counts).amax()
    projected = (shifted - threshold).clamp_min(0)
    return projected if mask is None else projected.masked_fill(~mask, 0)
