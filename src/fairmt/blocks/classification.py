"""Exclusive classes: cross-entropy, and one probability a class against the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..moments import balanced_classes
from ..state import State
from ..tasks import Classification
from .block import Terms


class ClassificationBlock(State):
    """All classification heads of a problem, of equal or different numbers of classes.

    Heads are padded to the widest by a column of −∞, so that one softmax serves them all.
    """

    padded: Tensor
    place: Tensor
    classes: Tensor
    head: Tensor
    members: Tensor
    balanced: Tensor
    sharpness: Tensor
    class_counts: Tensor

    def __init__(self, specs: Sequence[Classification]) -> None:
        super().__init__()
        counts = [s.num_classes for s in specs]
        total, widest = sum(counts), max(counts)
        starts = [sum(counts[:i]) for i in range(len(counts))]
        padding = total  # the index of the extra column
        padded = [
            [start + k if k < count else padding for k in range(widest)]
            for start, count in zip(starts, counts, strict=True)
        ]
        head = [i for i, count in enumerate(counts) for _ in range(count)]
        classes = [k for count in counts for k in range(count)]
        self._fixed("padded", torch.tensor(padded).flatten())
        self._fixed("place", torch.tensor([i * widest + k for i, k in zip(head, classes, strict=True)]))
        self._fixed("classes", torch.tensor(classes))
        self._fixed("head", torch.tensor(head))
        members = torch.nn.functional.one_hot(torch.tensor(head), len(counts)).double()
        self._fixed("members", members)
        self._fixed("averages", members / members.sum(0))
        self._fixed("balanced", torch.tensor([specs[i].weight == "balanced" for i in head]))
        self._fixed("sharpness", torch.tensor([1 / specs[i].temperature for i in head], dtype=torch.float64))
        self._fixed("class_counts", torch.tensor([counts[i] for i in head], dtype=torch.float64))
        self.shape = (len(counts), widest)
        self.ragged = len(set(counts)) > 1
        self.any_balanced = any(s.weight == "balanced" for s in specs)
        self.tempered = any(s.temperature != 1 for s in specs)

    def _fixed(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def _by_head(self, columns: Tensor) -> Tensor:
        """(B, C) -> (B, heads, widest)."""
        if self.ragged:
            padding = columns.new_full((columns.shape[0], 1), -torch.inf)
            columns = torch.cat((columns, padding), dim=1)[:, self.padded]
        return columns.reshape(columns.shape[0], *self.shape)

    def _by_column(self, heads: Tensor) -> Tensor:
        """(B, heads, widest) -> (B, C)."""
        flat = heads.flatten(1)
        return flat[:, self.place] if self.ragged else flat

    def _within_head(self, columns: Tensor) -> Tensor:
        """(B, C): the sum over the classes of a head, at each of them."""
        members = self.constant("members", columns.dtype)
        return (columns @ members) @ members.T

    def terms(self, logits: Tensor, labels: Tensor, weight: Tensor, positive: Tensor, moments: Tensor) -> Terms:
        dtype = logits.dtype
        members, sharpness = self.constant("members", dtype), self.constant("sharpness", dtype)
        heads = self._by_head(logits)
        log_probability = self._by_column(torch.log_softmax(heads, dim=2))
        probability = log_probability.exp()
        row = weight
        if self.any_balanced:
            factor = torch.where(self.balanced, balanced_classes(moments, self.class_counts), 1.0).to(dtype)
            row = weight * self._within_head(labels * factor)  # each row counts by the class it is labelled with
        score = probability
        if self.tempered:
            score = self._by_column(torch.softmax(self._by_head(logits * sharpness), dim=2))
        choice = heads.argmax(dim=2)
        return Terms(
            loss=(row * log_probability.masked_fill(labels == 0, 0)).sum(0).neg() @ members,
            labelled=weight.sum(0) @ self.constant("averages", dtype),
            delta=row * (probability - labels),
            score=score,
            hard=(choice[:, self.head] == self.classes).to(dtype),
            slope=score * sharpness if self.tempered else score,
        )

    def pull(self, terms: Terms, gradient: Tensor) -> Tensor:
        weighted = terms.slope * gradient
        return weighted - terms.score * self._within_head(weighted)
