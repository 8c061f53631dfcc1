"""Gram matrices of linear heads, without a backward pass through anything.

For a head z = Z Wᵀ + c the gradient of L_t at the features is exactly V_t = δ_t W_t with δ_t = ∂L_t/∂z, so that
⟨V_t, V_s⟩ = Σ (δ_tᵀδ_s) ∘ (W_t W_sᵀ): two small products, whatever the size of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import FairMTError, check_number, short
from ..ranks import Ranks
from ..state import precise
from .autograd import Feature
from .forward import Forward, Gram


@dataclass(frozen=True)
class Sample:
    """⟨V_t, V_s⟩ summed over samples: exact. Heads of another form go by autograd."""

    def possible(self, forward: Forward) -> bool:
        return forward.weight is not None or forward.differentiable

    def gram(self, forward: Forward) -> Gram:
        if forward.weight is None:
            return Feature().gram(forward)
        weight = forward.weight
        wide = precise(weight.device)
        meeting = (weight @ weight.T).to(wide)
        delta, phi = forward.delta, forward.delta_phi
        both = delta if phi is None else torch.cat((delta, phi), dim=1)
        (product,) = forward.reduce((delta.T @ both).to(wide))
        columns = delta.shape[1]
        K = forward.per_task(forward.per_task(product[:, :columns] * meeting).T)
        if phi is None:
            return Gram(K, torch.zeros_like(K[0]), partial(torch.zeros_like, K[0, 0]))
        cross = forward.per_task((product[:, columns:] * meeting).sum(1))
        return Gram(K, cross, partial(_sample_square, forward.ranks, phi, meeting))


def _sample_square(ranks: Ranks | None, phi: Tensor, meeting: Tensor) -> Tensor:
    product = (phi.T @ phi).to(meeting.dtype)
    if ranks is not None:
        (product,) = ranks.sum(product)
    return (product * meeting).sum()


@dataclass(frozen=True)
class BatchMean:
    """The paper's proxy: mean sensitivities u_t over the batch, through the heads' weights.

    Args:
        printed: divide by the task's labelled rows |B_t| instead of the batch's, which inflates sparse tasks.
    """

    printed: bool = False

    def possible(self, forward: Forward) -> bool:
        return True

    def gram(self, forward: Forward) -> Gram:
        if forward.weight is None:
            raise FairMTError(
                "geometry: met 'mean' with heads that are not one nn.Linear on the features, expected "
                "geometry='sample' or 'feature' for those, or the linear heads passed as heads="
            )
        weight = forward.weight
        wide = precise(weight.device)
        weight = weight.to(wide)
        delta = forward.delta
        phi = torch.zeros_like(delta) if forward.delta_phi is None else forward.delta_phi
        sums = torch.stack((delta.sum(0), phi.sum(0), delta.square().sum(0))).to(wide)
        sums, count = forward.reduce(sums, sums.new_full((1,), delta.shape[0]))
        if self.printed:
            count = forward.per_column(forward.rows.to(wide))
        u, u_phi, square = sums / count.clamp(min=1)
        g = forward.per_task(u.unsqueeze(1) * weight)
        g_phi = u_phi @ weight
        K = g @ g.T
        # |u|² ≤ mean |δ|², so K_tt has a largest possible value; a tiny share of it is rounding, not a gradient.
        bound = forward.per_task(square) * forward.per_task(weight.square().sum(1))
        share = K.diagonal() / torch.where(bound > 0, bound, 1.0)
        return Gram(K, g @ g_phi, partial(torch.dot, g_phi, g_phi), share)


def head_gram(
    delta: Tensor, weight: Tensor, sizes: Sequence[int], delta_phi: Tensor, eta: float | Tensor
) -> tuple[Tensor, Tensor]:
    """K and b of the minimum-norm problem for linear heads, summed over samples (exact).

    Args:
        delta: (B, C) sensitivities ∂L_t/∂z of each task's loss at its own logits, all heads side by side.
        weight: (C, D) the heads' weights.
        sizes: number of columns of each task, summing to C.
        delta_phi: (B, C) sensitivities of the violation.
        eta: the multiplier.

    Returns:
        K (T, T) with K_ts = ⟨g_t, g_s⟩ and b (T,) with b_t = η ⟨g_t, g_Φ⟩.

    >>> import torch
    >>> K, b = head_gram(torch.eye(2), torch.eye(2), [1, 1], torch.ones(2, 2), eta=0.5)
    >>> K, b
    (tensor([[1., 0.],
            [0., 1.]]), tensor([0.5000, 0.5000]))
    """
    return _public(Sample(), delta, weight, sizes, delta_phi, eta)


def head_gram_mean(
    delta: Tensor, weight: Tensor, sizes: Sequence[int], delta_phi: Tensor, eta: float | Tensor
) -> tuple[Tensor, Tensor]:
    """K and b of the paper's proxy: means over the batch in place of samples; arguments as `head_gram`.

    With u_t the mean of δ_t, g_t ≈ u_tᵀ W_t: for scalar heads K is Diag(u) W Wᵀ Diag(u). The printed
    b = η K(u_Φ ⊘ u) ⊙ u has one ⊙ u too many for the residual it expands; b = η u ⊙ (W Wᵀ u_Φ) is it.
    """
    return _public(BatchMean(), delta, weight, sizes, delta_phi, eta)


def _public(
    geometry: Sample | BatchMean,
    delta: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    delta_phi: Tensor,
    eta: float | Tensor,
) -> tuple[Tensor, Tensor]:
    for name, tensor in (("delta", delta), ("weight", weight), ("delta_phi", delta_phi)):
        if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
            met = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise FairMTError(f"{name}: met {met}, expected a floating matrix")
    columns = delta.shape[1]
    if weight.shape[0] != columns:
        raise FairMTError(
            f"weight: met shape {tuple(weight.shape)}, expected ({columns}, features), as delta has columns"
        )
    if delta_phi.shape != delta.shape:
        raise FairMTError(f"delta_phi: met shape {tuple(delta_phi.shape)}, expected {tuple(delta.shape)}, as delta has")
    whole = isinstance(sizes, list | tuple) and all(isinstance(n, int) and n > 0 for n in sizes)
    if not whole or sum(sizes) != columns:
        raise FairMTError(f"sizes: met {short(sizes)}, expected positive ints that sum to delta's {columns} columns")
    if not isinstance(eta, Tensor):
        check_number("eta", eta, least=0)
    owner = torch.zeros(columns, len(sizes), dtype=delta.dtype, device=delta.device)
    task = [t for t, size in enumerate(sizes) for _ in range(size)]
    owner[torch.arange(columns), task] = 1
    forward = Forward(
        features=delta.new_zeros((delta.shape[0], weight.shape[1])),
        logits=(),
        weight=weight.detach(),
        delta=delta.detach(),
        delta_phi=delta_phi.detach(),
        rows=torch.full((len(sizes),), delta.shape[0], device=delta.device),
        owner=owner,
        heads=(),
        ranks=None,
    )
    gram = geometry.gram(forward)
    return gram.K.to(delta.dtype), (eta * gram.cross).to(delta.dtype)
