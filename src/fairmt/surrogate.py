"""One scalar, two gradients.

The encoder must see the gradient of Σ α_t L_t + ηΦ, the heads that of Σ L_t + ηΦ. With G_head and G_shared the
wanted gradients at the logits and A(·) the heads' vector–Jacobian product onto the features,

    S = ⟨z, sg(G_head)⟩ + ⟨Z, sg(A(G_shared) − A(G_head))⟩

has both: through the logits the heads get theirs and the encoder A(G_head), and through the features the encoder gets
the difference. S is linear in its gradients, so loss scaling, accumulation and clipping see an ordinary loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Surrogate(torch.autograd.Function):
    """Bears a value, and hands out the two gradients; S itself is never computed."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        at_logits: Tensor | None,
        at_features: Tensor,
        heads: Sequence[tuple[slice, slice]],
        features: Tensor,
        *logits: Tensor,
    ) -> Tensor:
        ctx.sound = at_logits is not None
        ctx.save_for_backward(at_logits, at_features)
        ctx.heads = heads
        ctx.like = [(features.shape, features.dtype), *((z.shape, z.dtype) for z in logits)]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        if not ctx.sound:
            # Zeros would not do: zero times an activation that is not finite is not zero.
            return (None,) * (4 + len(needed))
        at_logits, at_features = ctx.saved_tensors
        scale = gradient.to(at_logits.dtype)
        parts: list[Tensor | None] = [None] * len(needed)
        if needed[0]:
            shape, dtype = ctx.like[0]
            parts[0] = (at_features * scale).to(dtype).view(shape)
        if any(needed[1:]):
            scaled = at_logits * scale
            pieces = torch.split(scaled, [columns.stop - columns.start for columns, _ in ctx.heads], dim=1)
            for i, piece in enumerate(pieces, start=1):
                shape, dtype = ctx.like[i]
                if needed[i]:
                    own = piece if piece.shape == shape else piece.reshape(shape)
                    parts[i] = own if own.dtype == dtype else own.to(dtype)
        return (None, None, None, None, *parts)


def surrogate(
    value: Tensor,
    at_logits: Tensor | None,
    at_features: Tensor,
    heads: Sequence[tuple[slice, slice]],
    features: Tensor,
    logits: Sequence[Tensor],
) -> Tensor:
    """A scalar of this value whose backward gives `at_logits` to the logits and `at_features` to the features.

    Args:
        value: what it reports.
        at_logits: (B, C) G_head, all heads side by side; None: no gradient goes anywhere.
        at_features: A(G_shared) − A(G_head), like the features.
        heads: the columns (and the tasks) of each of `logits`.
        features, logits: in the graph.
    """
    result: Tensor = _Surrogate.apply(  # type: ignore[no-untyped-call]
        value, at_logits, at_features, heads, features, *logits
    )
    return result
