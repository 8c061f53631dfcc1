"""One step of FairMT stated as plainly as possible: Python loops over tasks, groups, classes and rows.

Slow, and written apart from the package: it shares its specifications (`Detection` and so on) and nothing else. Losses,
rates and gaps are ordinary autograd graphs; what the method holds constant (weights, reference groups, remembered
sums) is a Python float here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fairmt import Classification, Detection, Regression

Label = float | None


class Column(NamedTuple):
    """One logit: its head, its place there, the task it belongs to, and its name in an entry's name."""

    head: str
    place: int
    task: str
    name: str


class Cell(NamedTuple):
    """One group's rate on one side of one entry."""

    attribute: str
    column: str
    side: str
    group: int


@dataclass
class Outcome:
    """What the reference finds in one step; losses and phi are graphs, the rest are numbers."""

    losses: dict[str, Tensor]
    normalised: dict[str, float]
    psi: dict[str, float]
    psi_hard: dict[str, float]
    weights: dict[str, float]
    phi: Tensor
    eta: float
    violation: float

    def lagrangian(self, alpha: Mapping[str, float]) -> Tensor:
        """Σ α_t L_t + ηΦ over the active tasks, as a graph."""
        total = self.eta * self.phi
        for task, loss in self.losses.items():
            total = total + alpha[task] * loss
        return total

    def plain(self) -> Tensor:
        """Σ L_t + ηΦ, as a graph."""
        return self.lagrangian(dict.fromkeys(self.losses, 1.0))


def columns_of(tasks: Mapping[str, Any]) -> list[Column]:
    found = []
    for head, spec in tasks.items():
        if isinstance(spec, Classification):
            found += [Column(head, k, head, f"{head}={k}") for k in range(spec.num_classes)]
            continue
        for index in range(spec.n):
            label = spec.names[index] if spec.names else index
            name = head if spec.n == 1 else f"{head}/{label}"
            found.append(Column(head, index, name, name))
    return found


def read_labels(labels: Tensor | None, spec: Any, rows: int) -> list[list[Label]]:
    """labels[row][column], None where missing."""
    width = 1 if isinstance(spec, Classification) else spec.n
    if labels is None:
        return [[None] * width for _ in range(rows)]
    table: list[list[Label]] = []
    for row in range(rows):
        values = labels[row].reshape(-1).tolist()
        line: list[Label] = []
        for value in values:
            missing = math.isnan(value)
            if not labels.is_floating_point() and not isinstance(spec, Regression):
                missing = value < 0
            line.append(None if missing else float(value))
        table.append(line)
    return table


def read_members(groups: Mapping[str, Any], members: Mapping[str, Tensor | None], rows: int) -> dict[str, list[int]]:
    """members[attribute][row], -1 where unknown; those of an intersection from its parts."""
    codes: dict[str, list[int]] = {}
    for name, size in groups.items():
        if isinstance(size, int):
            own = members[name]
            codes[name] = [-1] * rows if own is None else [int(code) for code in own.reshape(-1).tolist()]
            continue
        codes[name] = []
        for row in range(rows):
            code = 0
            for part in size.of:
                own_code = codes[part][row]
                code = -1 if code < 0 or own_code < 0 else code * groups[part] + own_code
            codes[name].append(code)
    return codes


def group_count(groups: Mapping[str, Any], name: str) -> int:
    size = groups[name]
    return size if isinstance(size, int) else math.prod(groups[part] for part in size.of)


def project(values: Sequence[float]) -> list[float]:
    """The nearest point of the simplex, by bisection for the threshold."""
    low, high = min(values) - 1.0, max(values)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(v - middle, 0.0) for v in values) > 1:
            low = middle
        else:
            high = middle
    raised = [max(v - high, 0.0) for v in values]
    return [v / sum(raised) for v in raised]


class Reference:
    """State and step; the options have FairMT's names and defaults."""

    def __init__(
        self,
        tasks: Mapping[str, Any],
        groups: Mapping[str, Any],
        *,
        tolerance: float = 0.05,
        aggregation: Literal["ahfda", "mean", "max"] = "ahfda",
        smoothing: float = 10.0,
        mu: float | None = None,
        disparities: Mapping[str, str | None] | None = None,
        beta: float = 1.0,
        asymmetric: bool = True,
        memory: float = 20,
        dual_on: Literal["hard", "soft"] = "hard",
        eta_step: float = 0.01,
        eta_max: float = 50.0,
    ) -> None:
        self.tasks, self.groups, self.columns = tasks, groups, columns_of(tasks)
        self.epsilon = tolerance**2
        self.aggregation, self.smoothing, self.mu = aggregation, smoothing, mu
        self.disparities = dict(disparities or {})
        self.beta, self.asymmetric, self.memory = beta, asymmetric, memory
        self.dual_on, self.eta_step, self.eta_max = dual_on, eta_step, eta_max
        self.eta = 0.0
        self.seen: dict[str, list[tuple[float, float]]] = {column.task: [] for column in self.columns}
        self.remembered: dict[Cell, dict[str, float]] = {}

    def step(
        self,
        logits: Mapping[str, Tensor],
        labels: Mapping[str, Tensor | None],
        members: Mapping[str, Tensor | None],
        sample_weight: Tensor | None = None,
    ) -> Outcome:
        """One step in training mode: label moments, memory and multiplier move."""
        z, y, codes, w = self._read(logits, labels, members, sample_weight)
        for column in self.columns:
            if isinstance(self.tasks[column.head], Classification) and column.place > 0:
                continue
            for row, line in enumerate(y[column.head]):
                label = line[column.place]
                if label is not None and w[row] > 0:
                    self.seen[column.task].append((w[row], label))

        losses = self._losses(z, y, w)
        table = self._table(z, y, codes, w)
        psi, psi_hard, graphs = self._gaps(table)
        weights = self.weigh(psi)
        phi = sum((weights[entry] * graphs[entry] for entry in graphs), torch.zeros((), dtype=torch.float64))
        driving = psi_hard if self.dual_on == "hard" else psi
        violation = sum(weights[entry] * driving[entry] for entry in psi) - self.epsilon
        units = {column.task: self.unit_error(column) for column in self.columns}
        normalised = {task: float(loss.detach()) / units[task] for task, loss in losses.items()}
        eta = self.eta
        if losses:
            self.remembered = {cell: sums["kept"] for cell, sums in table.items()}
        if losses and psi:
            self.eta = min(max(eta + self.eta_step * min(violation / self.epsilon, 20.0), 0.0), self.eta_max)
        return Outcome(losses, normalised, psi, psi_hard, weights, phi, eta, violation)

    def _read(
        self, logits: Mapping[str, Tensor], labels: Any, members: Any, sample_weight: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, list[list[Label]]], dict[str, list[int]], list[float]]:
        rows = next(iter(logits.values())).shape[0]
        z = {name: value.reshape(rows, -1) for name, value in logits.items()}
        y = {name: read_labels(labels[name], spec, rows) for name, spec in self.tasks.items()}
        w = [1.0] * rows if sample_weight is None else [float(v) for v in sample_weight.tolist()]
        return z, y, read_members(self.groups, members, rows), w

    # Losses

    def _losses(self, z: Mapping[str, Tensor], y: Any, w: list[float]) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = {}
        for column in self.columns:
            if column.task in losses:
                continue
            spec, terms, weight = self.tasks[column.head], [], 0.0
            for row, row_weight in enumerate(w):
                label = y[column.head][row][column.place if not isinstance(spec, Classification) else 0]
                if label is None or row_weight == 0:
                    continue
                terms.append(row_weight * self._row_loss(column, z[column.head][row], label))
                weight += row_weight
            if terms:
                losses[column.task] = torch.stack(terms).sum() / weight
        return losses

    def _row_loss(self, column: Column, z: Tensor, label: float) -> Tensor:
        spec = self.tasks[column.head]
        if isinstance(spec, Classification):
            factor = 1.0
            if spec.weight == "balanced":
                of_class = [weight for weight, value in self.seen[column.task] if value == label]
                everyone = [weight for weight, _ in self.seen[column.task]]
                factor = sum(everyone) / (spec.num_classes * sum(of_class))
            return factor * F.cross_entropy(z, torch.tensor(int(label)))
        own, target = z[column.place], torch.tensor(label, dtype=z.dtype)
        if isinstance(spec, Detection):
            factor = self._positive_weight(column) if label == 1 else 1.0
            return factor * F.binary_cross_entropy_with_logits(own, target)
        return self._error(spec, own, target)

    def _positive_weight(self, column: Column) -> float:
        spec = self.tasks[column.head]
        if spec.weight is None:
            return 1.0
        if spec.weight != "balanced":
            return float(spec.weight[column.place] if isinstance(spec.weight, Sequence) else spec.weight)
        positive = sum(weight for weight, label in self.seen[column.task] if label == 1)
        negative = sum(weight for weight, label in self.seen[column.task] if label == 0)
        return negative / positive if positive > 0 and negative > 0 else 1.0

    @staticmethod
    def _error(spec: Regression, prediction: Tensor, target: Tensor) -> Tensor:
        if spec.loss == "mse":
            return F.mse_loss(prediction, target)
        if spec.loss == "mae":
            return F.l1_loss(prediction, target)
        return F.huber_loss(prediction, target, delta=spec.delta)

    def unit_error(self, column: Column) -> float:
        """The error of a miss by one standard deviation of the labels."""
        spec = self.tasks[column.head]
        if not isinstance(spec, Regression):
            return 1.0
        if spec.scale is not None:
            deviation = float(spec.scale[column.place] if isinstance(spec.scale, Sequence) else spec.scale)
        else:
            pairs = self.seen[column.task]
            if len({label for _, label in pairs}) < 2:
                deviation = 1.0
            else:
                total = sum(weight for weight, _ in pairs)
                mean = sum(weight * label for weight, label in pairs) / total
                deviation = math.sqrt(sum(weight * (label - mean) ** 2 for weight, label in pairs) / total)
        return float(self._error(spec, torch.tensor(deviation, dtype=torch.float64), torch.tensor(0.0).double()))

    # Rates and gaps

    def _sides(self, spec: Any) -> list[tuple[str, float, float]]:
        """Name, direction in which it is worse, share."""
        kind = {Detection: "detection", Classification: "classification", Regression: "regression"}[type(spec)]
        if self.disparities.get(kind, "on") is None:
            return []
        if isinstance(spec, Regression):
            return [("error", 1.0, 1.0)]
        sides = [("TPR", -1.0, 1 / (1 + self.beta))]
        return [*sides, ("FPR", 1.0, self.beta / (1 + self.beta))] if self.beta > 0 else sides

    def _cells(self) -> Iterator[tuple[str, Column, str, list[Cell]]]:
        for attribute in self.groups:
            for column in self.columns:
                for side, _, _ in self._sides(self.tasks[column.head]):
                    numbers = range(group_count(self.groups, attribute))
                    yield attribute, column, side, [Cell(attribute, column.name, side, group) for group in numbers]

    def _counts(self, side: str, spec: Any, column: Column, label: Label) -> bool:
        if label is None:
            return False
        if side == "error":
            return True
        positive = label == (column.place if isinstance(spec, Classification) else 1)
        return positive == (side == "TPR")

    def _scores(self, column: Column, z: Tensor, labels: list[Label]) -> tuple[Tensor, list[float]]:
        """Soft scores (a graph) and hard ones of all rows of one column."""
        spec = self.tasks[column.head]
        if isinstance(spec, Detection):
            threshold = math.log(spec.threshold / (1 - spec.threshold))
            hard = [float(p >= spec.threshold) for p in torch.sigmoid(z.detach()[:, column.place]).tolist()]
            return torch.sigmoid((z[:, column.place] - threshold) / spec.temperature), hard
        if isinstance(spec, Classification):
            hard = [float(choice == column.place) for choice in z.detach().argmax(dim=1).tolist()]
            return F.softmax(z / spec.temperature, dim=1)[:, column.place], hard
        errors = []
        for row, label in enumerate(labels):
            target = torch.tensor(0.0 if label is None else label, dtype=z.dtype)
            errors.append(self._error(spec, z[row, column.place], target))
        error = torch.stack(errors)
        return error, error.tolist()

    def _table(
        self, z: Mapping[str, Tensor], y: Any, codes: Mapping[str, list[int]], w: list[float]
    ) -> dict[Cell, Any]:
        """For each cell the remembered sums with this batch in them, and the rate: its value and its graph."""
        scores = {}
        for column in self.columns:
            index = 0 if isinstance(self.tasks[column.head], Classification) else column.place
            own = [line[index] for line in y[column.head]]
            scores[column] = (own, *self._scores(column, z[column.head], own))
        table: dict[Cell, Any] = {}
        for attribute, column, side, cells in self._cells():
            own, soft, hard = scores[column]
            spec = self.tasks[column.head]
            counting = [row for row, label in enumerate(own) if self._counts(side, spec, column, label) and w[row] > 0]
            for cell in cells:
                rows = [row for row in counting if codes[attribute][row] == cell.group]
                old = self.remembered.get(cell, {"soft": 0.0, "hard": 0.0, "weight": 0.0, "rows": 0.0})
                kept = {name: (1 - 1 / self.memory) * value for name, value in old.items()}
                mean = None
                if rows:
                    values = soft[rows] * torch.tensor([w[row] for row in rows], dtype=soft.dtype)
                    mean = values.sum() / sum(w[row] for row in rows)
                    kept["soft"] += float(values.detach().sum())
                    kept["hard"] += sum(w[row] * hard[row] for row in rows)
                    kept["weight"] += sum(w[row] for row in rows)
                    kept["rows"] += len(rows)
                table[cell] = {"kept": kept, "mean": mean}
        return table

    def _sides_met(self, table: Mapping[Cell, Any]) -> Iterator[tuple[str, Column, str, float, float, list[Cell]]]:
        """Each side with two groups that have data: attribute, column, name, sign, share, and those groups' cells."""
        for attribute, column, name, cells in self._cells():
            measured = [cell for cell in cells if table[cell]["kept"]["rows"] >= 1]
            if len(measured) >= 2:
                _, sign, share = next(side for side in self._sides(self.tasks[column.head]) if side[0] == name)
                yield attribute, column, name, sign, share / self.unit_error(column) ** 2, measured

    def _gaps(self, table: Mapping[Cell, Any]) -> tuple[dict[str, float], dict[str, float], dict[str, Tensor]]:
        """For each measured entry its squared gap: soft, hard, and the soft one's graph."""
        psi: dict[str, float] = {}
        psi_hard: dict[str, float] = {}
        graphs: dict[str, Tensor] = {}
        for attribute, column, _, sign, share, cells in self._sides_met(table):
            badness = sorted((sign * self._rate(table[cell]) for cell in cells), key=Tensor.item)
            best, worst = badness[0], badness[-1]
            gap = worst - (best.detach() if self.asymmetric else best)
            hard = [table[cell]["kept"]["hard"] / table[cell]["kept"]["weight"] for cell in cells]
            entry = f"{attribute}/{column.name}"
            graphs[entry] = graphs.get(entry, torch.zeros((), dtype=gap.dtype)) + share * gap * gap
            psi[entry] = float(graphs[entry].detach())
            psi_hard[entry] = psi_hard.get(entry, 0.0) + share * (max(hard) - min(hard)) ** 2
        return psi, psi_hard, graphs

    def badness(
        self,
        logits: Mapping[str, Tensor],
        labels: Mapping[str, Tensor | None],
        members: Mapping[str, Tensor | None],
        sample_weight: Tensor | None = None,
    ) -> dict[str, tuple[str, float, list[float]]]:
        """By side its entry, its share in it, and its groups' rates, higher being worse; nothing moves."""
        z, y, codes, w = self._read(logits, labels, members, sample_weight)
        table = self._table(z, y, codes, w)
        found = {}
        for attribute, column, name, sign, share, cells in self._sides_met(table):
            rates = [sign * float(self._rate(table[cell]).detach()) for cell in cells]
            found[f"{attribute}/{column.name}/{name}"] = (f"{attribute}/{column.name}", share, rates)
        return found

    @staticmethod
    def _rate(cell: Mapping[str, Any]) -> Tensor:
        """The value from memory, the gradient from the batch."""
        value = torch.tensor(cell["kept"]["soft"] / cell["kept"]["weight"], dtype=torch.float64)
        mean = cell["mean"]
        return value if mean is None else value + (mean - mean.detach())

    def weigh(self, psi: Mapping[str, float]) -> dict[str, float]:
        """The aggregation's weights on the measured entries."""
        if not psi:
            return {}
        values = list(psi.values())
        if self.aggregation == "mean":
            weights = [1 / len(values)] * len(values)
        elif self.aggregation == "max":
            weights = [float(i == values.index(max(values))) for i in range(len(values))]
        else:
            mu = self.mu if self.mu is not None else self.smoothing * (sum(values) or 1.0)
            weights = project([value / mu for value in values])
        return dict(zip(psi, weights, strict=True))
