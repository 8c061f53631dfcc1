"""Several processes: sums over samples become sums over all ranks' samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The processes that share a batch; one process where none are set up.

    Every quantity of a criterion is a sum over samples, so reducing sums is all that several ranks need. Reductions
    happen in training steps only: evaluating on one rank alone never waits for the others.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def world(self) -> int:
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self._group)

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The parts (of one dtype) summed over all ranks, in one call."""
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self._group)
        pieces = torch.split(flat, [part.numel() for part in parts])
        return tuple(piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self._group)  # a process group is a handle: it can't be copied

    def __getstate__(self) -> dict[str, Any]:
        return {"_group": None}  # nor can it be stored; the default group serves where it is loaded
