"""The two ends between which AHFDA lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """Every measured violation counts the same."""

    def __call__(self, psi: Tensor, measured: Tensor) -> Tensor:
        return measured.to(psi.dtype) / measured.sum().clamp(min=1)


@dataclass(frozen=True)
class Maximum:
    """Only the largest violation counts."""

    def __call__(self, psi: Tensor, measured: Tensor) -> Tensor:
        largest = torch.where(measured, psi, -torch.inf).argmax()
        numbers = torch.arange(psi.numel(), device=psi.device)
        return ((numbers == largest) & measured).to(psi.dtype)
