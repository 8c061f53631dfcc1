"""A planted problem: a minority is served worse, and need not be.

Real data seldom says whether a gap between groups could be closed, or at whose cost. Here it is known:
one law makes everybody's labels, and a function that serves both groups fully exists; yet a plain mean of
the losses leaves the minority behind, because the inputs that tell the minority's labels are learned
late.

**In words.** Everybody has a hidden state, and every label is a noisy function of it, the same in both
groups. The state is read twice. The *quick reading* is plain to see, and right for the majority; for the
minority it reads something else, unrelated to their labels. The *careful reading* is right for everybody,
but comes as pairs of numbers whose small difference carries it. Gradient descent finds the quick reading
first. From then on the majority gives it little reason to look further, and the minority, being few, a
faint one. A *marker*, a few inputs that each tell a little of the membership, lets a network guess who is
who.

**In formulas.** With z, z', n, e, e', ε and ζ standard normal, m = 1 in the minority and 0 in the
majority, c the contrast, s the marker and σ the noise:

    quick     q = (1 − m)·z + m·z' + e/20         6 inputs
    careful   a = √(1 − c²)·n + c·(z + e'/10)     6 inputs
              b = √(1 − c²)·n − c·(z + e'/10)     6 inputs
    marker    r = m·s + ζ                         4 inputs
    scores    y_k = ⟨u_k, z⟩ + σ·ε_k              9 of them; the unit directions u_k are fixed by `world`

Three detections (`"signs"`) ask whether a score exceeds 0, ¼ or ½ of its standard deviation (50 %, 40 %
and 31 % say yes), a classification (`"kind"`) which of four scores is the largest, two regressions
(`"level"`, `"pace"`) for a score itself. z has one distribution in both groups, so base rates, label
noise and attainable errors are equal: every gap is the network's doing. And (a − b)/2c is z up to a tenth
of its standard deviation, for everybody: one linear function of the inputs, which needs no membership,
serves all. Levelling down is never needed.

Standardising the inputs takes nothing of the plant away: the careful reading hides in directions of small
variance, not in columns of small scale.

A second attribute, `"site"`, is innocent: three groups, drawn independently of all else. Its true gaps
are 0; what is measured there is chance.

**The recipe it is made for.** What is learned late is neglected only for as long as training is brief.
Two hidden layers of 64, 8,000 rows, batches of 256, 40 epochs of SGD with momentum 0.9, weight decay 5e-4
and a rate falling from 0.02 to 0 along a cosine, on the mean of the six losses in the encoder and each
whole loss in its own head. There the gap between the groups is 36 points; the sum of the losses in the encoder
leaves 17, and closes the gap when it trains three times as long. So does Adam, whose steps do not shrink with the
gradient: it follows a faint direction as readily as a strong one. `benchmarks/planted.py` prints the table, with
groups of equal weight (which shows that a fair solution of full utility is reached by gradient descent) and with
FairMT; README shows it. A lower `contrast` makes the plant harder.

>>> train, test = planted(8_000, seed=0), planted(4_000, seed=1)  # one population, different people
>>> test.inputs.shape, test.groups, list(test.tasks)
(torch.Size([4000, 22]), {'group': 2, 'site': 3}, ['signs', 'kind', 'level', 'pace'])
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import FairMTError
from ..tasks import Classification, Detection, Regression, Task

MAJORITY = 0
MINORITY = 1

_STATE = 6  # dimensions of the hidden state: at least those of either orthonormal set of directions
_MARKERS = 4
_SITES = 3
_CLASSES = 4
_CUTS = (0.0, 0.25, 0.5)  # where each detection begins, in standard deviations of its score
_QUICK_NOISE = 0.05  # below the careful reading's, so that a fit on the majority prefers the quick one
_CAREFUL_NOISE = 0.1


@dataclass(frozen=True)
class Planted:
    """Rows of the planted problem, with the specifications a criterion takes.

    Attributes:
        inputs: `(N, 22)`.
        labels: by task: `signs`, `(N, 3)` of 0, 1 or NaN; `kind`, `(N,)` of 0 … 3 or −100; `level` and
            `pace`, `(N,)` of numbers or NaN.
        members: by attribute, `(N,)` of integers: `group` (0 the majority, 1 the minority) and `site`
            (0 … 2); −1 is unknown.
        tasks: what is predicted, by name.
        groups: number of groups by attribute.

    >>> data = planted(100, seed=0)
    >>> half = data.take(torch.arange(50))  # or a mask, or a slice
    >>> len(half), half.labels["signs"].shape
    (50, torch.Size([50, 3]))
    """

    inputs: Tensor
    labels: Mapping[str, Tensor]
    members: Mapping[str, Tensor]
    tasks: Mapping[str, Task]
    groups: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, index: Tensor | slice) -> Planted:
        """The rows that `index` picks: row numbers, a boolean mask or a slice."""
        return replace(
            self,
            inputs=self.inputs[index],
            labels={name: values[index] for name, values in self.labels.items()},
            members={name: values[index] for name, values in self.members.items()},
        )

    def to(self, device: torch.device | str) -> Planted:
        """The same rows on another device."""
        return replace(
            self,
            inputs=self.inputs.to(device),
            labels={name: values.to(device) for name, values in self.labels.items()},
            members={name: values.to(device) for name, values in self.members.items()},
        )


def planted(
    rows: int,
    seed: int,
    *,
    world: int = 0,
    minority: float = 0.15,
    missing: float = 0.0,
    unknown: float = 0.0,
    contrast: float = 0.1,
    marker: float = 1.5,
    noise: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Planted:
    """Draws `rows` people of the planted problem that this module describes.

    Args:
        rows: how many.
        seed: of the people. Training, validation and test rows are draws with different seeds from one world.
        world: seed of the law behind the labels.
        minority: probability that a person belongs to the minority.
        missing: probability that a label is missing, independently for each of the six tasks.
        unknown: probability that a membership is unknown, independently for each attribute.
        contrast: size of the careful reading within its pair, above 0 and up to 1; smaller is learned later.
        marker: by how many standard deviations each marker differs between the groups.
        noise: standard deviation of the label noise, against 1 of the signal: how hard the tasks are for all.
        dtype: of inputs and float labels. Draws do not depend on it, nor on `missing` and `unknown`.

    >>> data = planted(1_000, seed=0, missing=0.5, unknown=0.1)
    >>> hidden = data.labels["level"].isnan(), data.members["site"] < 0
    >>> [f"{mask.double().mean():.1f}" for mask in hidden]
    ['0.5', '0.1']
    """
    _check_draw(rows, dtype)
    _check_shares(minority=minority, missing=missing, unknown=unknown, contrast=contrast)
    _check_sizes(marker=marker, noise=noise)
    # In float64, in a fixed order, and what is hidden last: an option changes nothing but what it is about.
    generator = torch.Generator().manual_seed(seed)

    def normal(columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    def uniform(columns: int) -> Tensor:
        return torch.rand(rows, columns, generator=generator, dtype=torch.float64)

    is_minority = uniform(1) < minority
    site = (uniform(1) * _SITES).long()
    state, elsewhere = normal(_STATE), normal(_STATE)
    quick = torch.where(is_minority, elsewhere, state) + _QUICK_NOISE * normal(_STATE)
    careful = contrast * (state + _CAREFUL_NOISE * normal(_STATE))
    common = math.sqrt(1 - contrast**2) * normal(_STATE)
    markers = marker * is_minority + normal(_MARKERS)
    inputs = torch.cat([quick, common + careful, common - careful, markers], dim=1)

    directions = _directions(world)
    scores = state @ directions.T + noise * normal(len(directions))
    kind_scores, sign_scores, numbers = torch.split(scores, [_CLASSES, len(_CUTS), 2], dim=1)
    cuts = math.sqrt(1 + noise**2) * torch.tensor(_CUTS, dtype=torch.float64)
    labels = {
        "signs": (sign_scores > cuts).to(dtype),
        "kind": kind_scores.argmax(dim=1),
        "level": numbers[:, 0].to(dtype),
        "pace": numbers[:, 1].to(dtype),
    }
    members = {"group": is_minority.squeeze(1).long(), "site": site.squeeze(1)}

    return Planted(
        inputs=inputs.to(dtype),
        labels={name: _hide(values, missing, generator) for name, values in labels.items()},
        members={name: _hide(values, unknown, generator, fill=-1) for name, values in members.items()},
        tasks={
            "signs": Detection(len(_CUTS), names=("first", "second", "third")),
            "kind": Classification(_CLASSES),
            "level": Regression(),
            "pace": Regression(),
        },
        groups={"group": 2, "site": _SITES},
    )


def _directions(world: int) -> Tensor:
    """Unit directions of the scores, `(9, state)`: the classes', then the detections' and the regressions'.

    Each of these two sets is orthonormal, so that in any world the classes are equally frequent and no two
    tasks of a set are alike.
    """
    generator = torch.Generator().manual_seed(world)
    turns = torch.linalg.qr(torch.randn(2, _STATE, _STATE, generator=generator, dtype=torch.float64)).Q
    return torch.cat([turns[0, :_CLASSES], turns[1, : len(_CUTS) + 2]])


def _hide(values: Tensor, share: float, generator: torch.Generator, fill: int = -100) -> Tensor:
    """The values with a share of them replaced: by NaN among floats, by `fill` among integers."""
    mask = torch.rand(values.shape, generator=generator, dtype=torch.float64) < share
    return values.masked_fill(mask, math.nan if values.is_floating_point() else fill)


def _check_draw(rows: object, dtype: torch.dtype) -> None:
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise FairMTError(f"planted: rows: met {rows!r}, expected an int of at least 1")
    if not dtype.is_floating_point:
        raise FairMTError(f"planted: dtype: met {dtype}, expected a floating type")


def _check_shares(**shares: float) -> None:
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise FairMTError(f"planted: {name}: met {share!r}, expected a number from 0 to 1")
    if shares["contrast"] == 0:
        raise FairMTError("planted: contrast: met 0, expected more: else nothing tells the minority's labels")


def _check_sizes(**sizes: float) -> None:
    for name, size in sizes.items():
        if not (math.isfinite(size) and size >= 0):
            raise FairMTError(f"planted: {name}: met {size!r}, expected a finite number of at least 0")
