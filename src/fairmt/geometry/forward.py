"""What a geometry sees of a step, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import FairMTError
from ..ranks import Ranks
from ..state import TINY


class Forward(NamedTuple):
    """One forward pass, from the features on, and the sensitivities of losses and violation at the logits.

    Attributes:
        features: as the encoder gave them, in the graph.
        logits: as the heads gave them, in the graph, in the layout's order.
        weight: all heads' weights (C, D) where they are linear on the features, else None.
        delta: (B, C) ∂L_t/∂z, each task at its own columns.
        delta_phi: (B, C) ∂Φ/∂z, or None without a fairness term.
        rows: (T,) number of labelled rows of each task, over all ranks.
        owner: (C, T) one-hot, which task a column belongs to; None where each column is a task.
        heads: the columns and the tasks of each head.
        ranks: the processes that share the batch (None: one).
    """

    features: Tensor
    logits: Sequence[Tensor]
    weight: Tensor | None
    delta: Tensor
    delta_phi: Tensor | None
    rows: Tensor
    owner: Tensor | None
    heads: Sequence[tuple[slice, slice]]
    ranks: Ranks | None

    @property
    def differentiable(self) -> bool:
        """Whether autograd can go from the logits to the features."""
        return self.features.requires_grad and any(z.requires_grad for z in self.logits)

    def at_features(self, gradient: Tensor) -> Tensor:
        """A gradient at the logits (B, C), taken through the heads to the features."""
        if self.weight is not None:
            return gradient @ self.weight
        return self.through(range(len(self.heads)), gradient)

    def through(self, heads: Sequence[int], gradient: Tensor) -> Tensor:
        """The same by autograd, from some of the heads; each takes its columns of `gradient`.

        Logits without a gradient of their own (a detached probe) give the features none.
        """
        heads = [i for i in heads if self.logits[i].requires_grad]
        if not heads:
            return torch.zeros_like(self.features, dtype=gradient.dtype)
        outputs = [self.logits[i] for i in heads]
        # A mean over many rows has gradients too small for half precision; their direction is the same at size 1.
        size = gradient.abs().amax().clamp(min=TINY) if gradient.numel() else gradient.new_ones(())
        gradients = [
            (gradient[:, self.heads[i][0]] / size).reshape(output.shape).to(output.dtype)
            for i, output in zip(heads, outputs, strict=True)
        ]
        (found,) = torch.autograd.grad(outputs, self.features, gradients, retain_graph=True, allow_unused=True)
        if found is None:
            raise FairMTError(
                "features: the logits were not computed from this tensor, expected the one the heads took "
                "(a model compiled as a whole, or DistributedDataParallel's find_unused_parameters or static_graph, "
                "hides the way from features to logits: compile encoder and heads apart, leave these options off, "
                "or pass heads= that are linear)"
            )
        return found.to(gradient.dtype) * size

    def per_task(self, columns: Tensor) -> Tensor:
        """(C, …) summed over each task's columns to (T, …)."""
        return columns if self.owner is None else self.owner.to(columns.dtype).T @ columns

    def per_column(self, tasks: Tensor) -> Tensor:
        """(T,) repeated to (C,)."""
        return tasks if self.owner is None else self.owner.to(tasks.dtype) @ tasks

    def reduce(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums over all ranks."""
        return parts if self.ranks is None else self.ranks.sum(*parts)


class Gram(NamedTuple):
    """Inner products of gradients: K_ts = ⟨g_t, g_s⟩ and cross_t = ⟨g_t, g_Φ⟩ (0 without a fairness term).

    `phi_square` gives ‖g_Φ‖² when asked; `share` is K's diagonal over its largest possible value, where a geometry
    can vanish.
    """

    K: Tensor
    cross: Tensor
    phi_square: Callable[[], Tensor]
    share: Tensor | None = None

    def where(self, sound: Tensor) -> Gram:
        """Zeros in place of a Gram matrix that is not finite, decided on the device."""
        K, cross = (torch.where(sound, x, 0) for x in (self.K, self.cross))
        return Gram(K, cross, self.phi_square, self.share)


class Geometry(Protocol):
    """A way to measure how gradients meet."""

    def possible(self, forward: Forward) -> bool:
        """Whether this pass lets it be measured (gradients may be off, or the features frozen)."""
        ...

    def gram(self, forward: Forward) -> Gram: ...
