"""What was wrong with values on an accelerator, remembered there until someone asks.

Looking at a value on an accelerator makes the host wait for it. So a step only marks what it met, and `raise_met`,
called now and then, turns the marks into an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import FairMTError
from .state import State

EXPECTED = {
    "labels": "0, 1 or missing (NaN; a negative integer) for a detection, a class number or missing for a "
    "classification, a finite number or NaN for a regression",
    "members": "a group number, or -1 for unknown",
    "sample_weight": "a finite number of at least 0",
    "loss": "a finite loss and finite gradients",
    "heads": "logits that are the head's output on the features (or heads=None); met is their relative difference",
}


class Watch(State):
    """One cell for each thing that can go wrong; a cell holds the worst value met, or NaN."""

    met: Tensor

    def __init__(self, cells: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self.cells = list(cells)
        self.register_buffer("met", torch.full((len(self.cells),), torch.nan), persistent=False)

    def cells_of(self, kind: str) -> slice:
        """The cells of one kind, which stand side by side."""
        numbers = [i for i, (own, _) in enumerate(self.cells) if own == kind]
        return slice(numbers[0], numbers[-1] + 1)

    def note(self, cells: slice, values: Tensor, bad: Tensor) -> None:
        """Marks the cells with the largest of the bad values; `values` and `bad` are (rows, cells)."""
        if values.shape[0] == 0:
            return
        worst = torch.where(bad, values.to(self.met.dtype), -torch.inf).amax(0)
        self.met[cells] = torch.where(bad.any(0), worst, self.met[cells])

    def raise_met(self) -> None:
        """Raises for all that was met since the last call, and forgets it."""
        values = self.met.tolist()
        self.met.fill_(torch.nan)
        lines = [
            f"{kind}[{name!r}]: met {value:g} in an earlier step (masked there), expected {EXPECTED[kind]}"
            if name
            else f"{kind}: met {value:g} in an earlier step, expected {EXPECTED[kind]}"
            for (kind, name), value in zip(self.cells, values, strict=True)
            if value == value
        ]
        if lines:
            raise FairMTError("\n".join(lines))
