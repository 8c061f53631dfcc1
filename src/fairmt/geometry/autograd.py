"""Gram matrices by differentiation: for heads of any form, and the full one of the paper's STEP 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import FairMTError, describe
from ..state import precise
from .forward import Forward, Gram


@dataclass(frozen=True)
class Feature:
    """Gradients at the features, one small backward through the head of each task."""

    def possible(self, forward: Forward) -> bool:
        return forward.differentiable

    def gram(self, forward: Forward) -> Gram:
        rows = [forward.through([head], part).flatten() for head, part in _parts(forward)]
        tasks = len(rows)
        if forward.delta_phi is not None:
            rows.append(forward.through(range(len(forward.heads)), forward.delta_phi).flatten())
        stacked = torch.stack(rows)
        (product,) = forward.reduce((stacked @ stacked.T).to(precise(stacked.device)))
        return _split(product, tasks)


class Full:
    """Gradients at the encoder's parameters, one backward through the encoder a task: slow, and the reference.

    Args:
        shared: the encoder's parameters, held by reference.
    """

    def __init__(self, shared: Iterable[Tensor] | None) -> None:
        if shared is not None and (isinstance(shared, Tensor) or not isinstance(shared, Iterable)):
            raise FairMTError(f"shared: met {describe(shared)}, expected an iterable of the encoder's parameters")
        given = list(shared or ())
        for parameter in given:
            if not isinstance(parameter, Tensor):
                raise FairMTError(f"shared: met {describe(parameter)} among them, expected tensors")
        self.shared = [parameter for parameter in given if parameter.requires_grad]
        if not self.shared:
            raise FairMTError(
                "shared: met no parameter that takes a gradient, expected the encoder's parameters "
                "(geometry='full' differentiates them)"
            )

    def possible(self, forward: Forward) -> bool:
        return forward.differentiable

    def gram(self, forward: Forward) -> Gram:
        rows = [self._at_parameters(forward, [head], part) for head, part in _parts(forward)]
        tasks = len(rows)
        if forward.delta_phi is not None:
            rows.append(self._at_parameters(forward, range(len(forward.heads)), forward.delta_phi))
        (stacked,) = forward.reduce(torch.stack(rows))
        return _split((stacked @ stacked.T).to(precise(stacked.device)), tasks)

    def _at_parameters(self, forward: Forward, heads: Sequence[int], gradient: Tensor) -> Tensor:
        at_features = forward.through(heads, gradient)
        found = torch.autograd.grad(
            forward.features,
            self.shared,
            at_features.to(forward.features.dtype),
            retain_graph=True,
            allow_unused=True,
        )
        flat = [
            torch.zeros_like(parameter) if one is None else one
            for parameter, one in zip(self.shared, found, strict=True)
        ]
        return torch.cat([one.flatten() for one in flat]).to(gradient.dtype)


def _parts(forward: Forward) -> Iterator[tuple[int, Tensor]]:
    """For each task its head and its own columns of delta, the head's others at 0."""
    for number, (columns, tasks) in enumerate(forward.heads):
        if tasks.stop - tasks.start == 1:
            yield number, forward.delta
            continue
        for column in range(columns.start, columns.stop):
            own = torch.zeros_like(forward.delta)
            own[:, column] = forward.delta[:, column]
            yield number, own


def _split(product: Tensor, tasks: int) -> Gram:
    K = product[:tasks, :tasks]
    if product.shape[0] == tasks:
        return Gram(K, torch.zeros_like(K[0]), partial(torch.zeros_like, K[0, 0]))
    return Gram(K, product[:tasks, tasks], product[tasks, tasks].clone)
