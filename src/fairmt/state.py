"""Modules whose buffers keep their precision, whatever `.half()` or `.to(dtype)` says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

STATE = torch.float64
"""Running sums and multipliers: small, and wrong in half precision (a decay of 0.95 would round away)."""


def precise(device: torch.device) -> torch.dtype:
    """The widest floating dtype of a device."""
    return torch.float32 if device.type == "mps" else STATE


class State(nn.Module):
    """A module of buffers that follow the device of `.to(…)` but not its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[tuple[str, torch.dtype], Tensor] = {}

    def constant(self, name: str, dtype: torch.dtype) -> Tensor:
        """A buffer that never changes, in this dtype; cast once."""
        cast = self._casts.get((name, dtype))
        if cast is None:
            cast = self._casts[name, dtype] = self.get_buffer(name).to(dtype)
        return cast

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> State:
        self._casts.clear()
        kept = dict(self._buffers)
        for name, buffer in kept.items():
            if buffer is not None and buffer.dtype == STATE:
                self._buffers[name] = buffer.float()  # a device without float64 would refuse the original
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                dtype = precise(moved.device) if buffer.is_floating_point() else buffer.dtype
                self._buffers[name] = buffer.to(moved.device, dtype)
        return self


TINY = 1e-30
"""Nothing beside a violation or a gradient, and yet 1 / TINY is finite in single precision."""


def reciprocal(weight: Tensor) -> Tensor:
    """1 / weight, and 0 where there is no weight: a mean over nothing adds nothing."""
    return (1 / weight).masked_fill(weight <= 0, 0)


def look(flag: Tensor) -> bool | Tensor:
    """What a flag says, on the CPU; the flag itself on an accelerator, where a look would wait for the device."""
    return bool(flag) if flag.device.type == "cpu" else flag


def both(one: bool | Tensor, other: bool | Tensor) -> bool | Tensor:
    """The conjunction of two flags, looked at or not."""
    return one & other


def choose(flag: bool | Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """One of two tensors, by a flag that was looked at or not."""
    if isinstance(flag, bool):
        return yes if flag else no
    return torch.where(flag, yes, no)
