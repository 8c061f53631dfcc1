"""Small made problems with a bit of everything: kinds, widths, dtypes, what is missing, who is unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fairmt

INPUTS, FEATURES = 5, 16  # more features than tasks, so that no Gram is singular and α is one

TASKS: dict[str, Any] = {
    # In an order that is not the kinds': names, not places, must decide.
    "level": fairmt.Regression(2),
    "signs": fairmt.Detection(3, names=["a", "b", "c"], weight="balanced"),
    "kind": fairmt.Classification(4, weight="balanced"),
    "ill": fairmt.Detection(threshold=0.3, weight=2.5),
    "pace": fairmt.Regression(loss="mae"),
    "pair": fairmt.Detection(2, weight=[0.5, 3.0], temperature=0.8),
    "mood": fairmt.Classification(3, temperature=0.7),
    "dose": fairmt.Regression(loss="huber", scale=2.0, delta=0.8),
    "load": fairmt.Regression(2, names=["x", "y"], scale=[4.0, 7.0]),
    "seen": fairmt.Detection(),
}
GROUPS: dict[str, Any] = {"sex": 2, "race": 3} | fairmt.cross("sex", "race")


@dataclass(frozen=True)
class Data:
    """One batch, as a user would give it."""

    inputs: Tensor
    labels: dict[str, Tensor]
    members: dict[str, Tensor]
    sample_weight: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.inputs.shape[0]

    def take(self, index: Tensor) -> "Data":
        """The rows of `index`, in its order."""
        return Data(
            self.inputs[index],
            {name: label[index] for name, label in self.labels.items()},
            {name: code[index] for name, code in self.members.items()},
            None if self.sample_weight is None else self.sample_weight[index],
        )

    def without(self, *names: str) -> "Data":
        """With no label at all for some heads."""
        labels = {name: torch.full_like(y, _missing(y)) if name in names else y for name, y in self.labels.items()}
        return replace(self, labels=labels)


def data(seed: int, *, rows: int = 36, missing: float = 0.3, weighted: bool = False) -> Data:
    """A batch of `TASKS` and `GROUPS`, its labels related to inputs and groups; `missing` of them are not there."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, INPUTS, generator=g, dtype=torch.float64)
    sex, race = torch.randint(0, 2, (rows,), generator=g), torch.randint(0, 3, (rows,), generator=g)
    signal = x + 0.5 * sex.unsqueeze(1) * x.flip(1) + 0.3 * torch.randn(rows, INPUTS, generator=g, dtype=torch.float64)

    def gone(*shape: int) -> Tensor:
        return torch.rand(rows, *shape, generator=g) < missing

    labels = {
        # Floats miss by NaN, integers by any negative number, booleans can't.
        "level": (3 * signal[:, :2] + 2).masked_fill(gone(2), torch.nan),
        "signs": (signal[:, :3] > 0.4).double().masked_fill(gone(3), torch.nan),
        "kind": (2 * signal[:, 0] + 2).long().clamp(0, 3).masked_fill(gone(), -100),
        "ill": (signal[:, 1] > 0.8).to(torch.int8).masked_fill(gone(), -1),
        "pace": signal[:, 2:3].float().masked_fill(gone(1), torch.nan),
        "pair": (signal[:, 3:5] > 0).int().masked_fill(gone(2), -7),
        "mood": (signal[:, 3] + 1).clamp(0, 2).floor().masked_fill(gone(), torch.nan),
        "dose": (2 * signal[:, 4]).masked_fill(gone(), torch.nan),
        "load": (4 * signal[:, 1:3]).round().int().float().masked_fill(gone(2), torch.nan),
        "seen": signal[:, 0] > 0,
    }
    members = {"sex": sex.masked_fill(gone(), -1), "race": race.to(torch.int32).masked_fill(gone(), -1)}
    weight = 0.2 + 2 * torch.rand(rows, generator=g, dtype=torch.float64) if weighted else None
    if weight is not None:
        weight[:2] = 0.0
    return Data(x, labels, members, weight)


class Model(nn.Module):
    """An encoder and one head a task, in float64."""

    def __init__(self, *, linear: bool = True, seed: int = 0, tasks: Mapping[str, Any] = TASKS) -> None:
        super().__init__()
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.encoder = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))
        self.heads = nn.ModuleDict({name: _head(width(task), linear) for name, task in tasks.items()})
        self.double()
        torch.random.set_rng_state(state)

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.encoder(inputs)
        return features, {name: head(features) for name, head in self.heads.items()}


def width(task: Any) -> int:
    return task.num_classes if isinstance(task, fairmt.Classification) else task.n


def _head(outputs: int, linear: bool) -> nn.Module:
    if linear:
        return nn.Linear(FEATURES, outputs)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.GELU(), nn.Linear(6, outputs))


def _missing(label: Tensor) -> float:
    if label.dtype == torch.bool:
        raise ValueError("a boolean label can't be missing")
    return torch.nan if label.is_floating_point() else -1
