"""A small problem with every kind of task, and a small network for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import fairmt

INPUTS, FEATURES = 5, 8


@dataclass(frozen=True)
class Problem:
    """Tasks, groups, and one batch of rows."""

    tasks: dict[str, fairmt.Task]
    groups: dict[str, Any]
    inputs: Tensor
    labels: dict[str, Tensor]
    members: dict[str, Tensor]
    sample_weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, index: Any) -> Problem:
        """Some of the rows."""
        return replace(
            self,
            inputs=self.inputs[index],
            labels={name: y[index] for name, y in self.labels.items()},
            members={name: m[index] for name, m in self.members.items()},
            sample_weight=None if self.sample_weight is None else self.sample_weight[index],
        )

    def relabelled(self, **labels: Tensor) -> Problem:
        """With other labels for some of the tasks."""
        return replace(self, labels={**self.labels, **labels})

    def unlabelled(self, index: Any = slice(None)) -> Problem:
        """Without any label in these rows."""
        labels = {name: y.clone() for name, y in self.labels.items()}
        for y in labels.values():
            y[index] = torch.nan if y.is_floating_point() else -100
        return replace(self, labels=labels)


def problem(
    rows: int = 24, seed: int = 0, *, dtype: torch.dtype = torch.float64, missing: float = 0.2, **tasks: fairmt.Task
) -> Problem:
    """Rows drawn at random; `tasks` takes the place of tasks of the same names."""
    draw = torch.Generator().manual_seed(seed)

    def without_some(y: Tensor, mark: float) -> Tensor:
        return torch.where(torch.rand(y.shape, generator=draw) < missing, mark, y).to(y.dtype)

    inputs = torch.randn(rows, INPUTS, generator=draw, dtype=dtype)
    noise = torch.randn(rows, 4, generator=draw, dtype=dtype)
    own: dict[str, fairmt.Task] = {
        "ill": fairmt.Detection(weight="balanced"),
        "traits": fairmt.Detection(2, names=["tall", "calm"]),
        "health": fairmt.Classification(3),
        "pressure": fairmt.Regression(),
    }
    return Problem(
        tasks=own | tasks,
        groups={"gender": 2, "race": 3} | fairmt.cross("gender", "race"),
        inputs=inputs,
        labels={
            "ill": without_some((inputs[:, 0] + noise[:, 0] > 0.3).to(dtype), torch.nan),
            "traits": without_some((inputs[:, 1:3] + noise[:, :2] > 0).to(dtype), torch.nan),
            "health": without_some((inputs[:, 3] + noise[:, 2]).long().clamp(-1, 1) + 1, -100),
            "pressure": without_some(2 + 1.5 * (inputs[:, 4] + noise[:, 3]), torch.nan),
        },
        members={
            "gender": torch.randint(0, 2, (rows,), generator=draw),
            "race": torch.randint(-1, 3, (rows,), generator=draw),
        },
    )


class Model(nn.Module):
    """An encoder and a head a task; heads are one linear layer, or two with a bend between."""

    def __init__(self, tasks: Mapping[str, fairmt.Task], *, linear: bool = True, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = nn.Sequential(nn.Linear(INPUTS, FEATURES), nn.Tanh())
            self.heads = nn.ModuleDict({name: _head(task.width, linear) for name, task in tasks.items()})

    def forward(self, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.encoder(inputs)
        return features, {name: head(features) for name, head in self.heads.items()}


def _head(width: int, linear: bool) -> nn.Module:
    if linear:
        return nn.Linear(FEATURES, width)
    return nn.Sequential(nn.Linear(FEATURES, 6), nn.GELU(), nn.Linear(6, width))


def model_for(batch: Problem, *, linear: bool = True, seed: int = 0) -> Model:
    """A model in the dtype of the batch."""
    return Model(batch.tasks, linear=linear, seed=seed).to(batch.inputs.dtype)


def criterion_for(batch: Problem, model: Model, **options: Any) -> fairmt.FairMT:
    """A criterion that looks at the model's heads; steps are large, so that the multiplier has its say early."""
    if options.get("geometry") == "full":
        options["shared"] = model.encoder.parameters()
    return fairmt.FairMT(batch.tasks, batch.groups, model.heads, **{"eta_step": 0.5, **options})


def loss_of(criterion: fairmt.Criterion, model: nn.Module, batch: Problem) -> Tensor:
    """The criterion called on the model's outputs for the batch."""
    features, logits = model(batch.inputs)
    loss: Tensor = criterion(features, logits, batch.labels, batch.members, batch.sample_weight)
    return loss


def gradients(model: nn.Module, *, none_is_zero: bool = False) -> dict[str, Tensor]:
    """A copy of every parameter's gradient."""
    found = {}
    for name, parameter in model.named_parameters():
        assert none_is_zero or parameter.grad is not None, f"{name} has no gradient"
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    return found


def state_of(criterion: nn.Module) -> dict[str, Any]:
    """A copy of the whole state."""
    return copy.deepcopy(criterion.state_dict())


def assert_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Bit by bit."""
    assert one.keys() == other.keys()
    moved = [name for name in one if not _same(one[name], other[name])]
    assert not moved, f"differ: {moved}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
