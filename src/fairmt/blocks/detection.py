"""Yes/no questions: binary cross-entropy, and probabilities sharpened around the decision threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..moments import negatives_per_positive
from ..state import State
from ..tasks import Detection, per_column
from .block import Terms


class DetectionBlock(State):
    """All detection columns of a problem."""

    threshold: Tensor
    sharpness: Tensor
    shift: Tensor
    given: Tensor
    balanced: Tensor

    def __init__(self, specs: Sequence[Detection]) -> None:
        super().__init__()
        threshold = [math.log(s.threshold / (1 - s.threshold)) for s in specs for _ in range(s.n)]
        sharpness = [1 / s.temperature for s in specs for _ in range(s.n)]
        given = [w for s in specs for w in (per_column(1.0, s.n) if _free(s) else per_column(s.weight, s.n))]  # type: ignore[arg-type]
        self._column("threshold", threshold)
        self._column("sharpness", sharpness)
        self._column("shift", [-t * k for t, k in zip(threshold, sharpness, strict=True)])
        self._column("given", given)
        balanced = [s.weight == "balanced" for s in specs for _ in range(s.n)]
        self.register_buffer("balanced", torch.tensor(balanced), persistent=False)
        self.any_balanced = any(balanced)
        self.weighted = self.any_balanced or any(w != 1 for w in given)

    def _column(self, name: str, values: list[float]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.float64), persistent=False)

    def terms(self, logits: Tensor, labels: Tensor, weight: Tensor, positive: Tensor, moments: Tensor) -> Terms:
        dtype = logits.dtype
        row, row_positive = weight, positive
        if self.weighted:
            factor = self.given
            if self.any_balanced:
                factor = torch.where(self.balanced, negatives_per_positive(moments), factor)
            row_positive = positive * factor.to(dtype)
            row = (weight - positive) + row_positive
        # BCE = softplus(z) − y·z, so that no probability's logarithm is taken.
        loss = torch.addcmul(row * F.softplus(logits), row_positive, logits, value=-1)
        sharpness = self.constant("sharpness", dtype)
        score = torch.sigmoid(torch.addcmul(self.constant("shift", dtype), logits, sharpness))
        return Terms(
            loss=loss.sum(0),
            labelled=weight.sum(0),
            delta=(row * torch.sigmoid(logits)).sub_(row_positive),
            score=score,
            hard=(logits >= self.constant("threshold", dtype)).to(dtype),
            slope=torch.addcmul(score, score, score, value=-1).mul_(sharpness),
        )

    def pull(self, terms: Terms, gradient: Tensor) -> Tensor:
        return gradient * terms.slope


def _free(spec: Detection) -> bool:
    return spec.weight is None or spec.weight == "balanced"
