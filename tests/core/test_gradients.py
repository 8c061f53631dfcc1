"""The criterion against the plain statement of `reference.py`: values, trajectories, and both gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fairmt
from tests.core.problems import GROUPS, TASKS, Data, Model, data
from tests.core.reference import Outcome, Reference, columns_of, read_labels

EXACT = 1e-9
RHO = 0.05
"""A step of the multiplier that makes fairness weigh within a few batches (20 · ρ = 1 a step)."""

# Steps differ in size, and in some of them tasks have no label.
BATCHES = [(11, 36, ()), (12, 30, ("kind", "level")), (13, 41, ("signs", "dose")), (14, 24, ())]

METHOD = ("tolerance", "aggregation", "smoothing", "mu", "disparities", "beta", "asymmetric", "memory", "dual_on")
"""Options that the reference has too."""


def close(one: Tensor, other: Tensor, tolerance: float = EXACT) -> bool:
    return bool((one - other).norm() <= tolerance * other.norm())


def gradients(scalar: Tensor, over: Sequence[Tensor], *, keep: bool = True) -> Tensor:
    """The gradient over all tensors as one vector."""
    found = torch.autograd.grad(scalar, over, retain_graph=keep, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in found])


def numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def make(
    model: Model, *, geometry: str = "sample", heads: bool = True, **options: Any
) -> tuple[fairmt.FairMT, Reference]:
    """A criterion and its reference, with the same options."""
    shared = list(model.encoder.parameters()) if geometry == "full" else None
    criterion = fairmt.FairMT(
        TASKS,
        GROUPS,
        model.heads if heads else None,
        geometry=geometry,  # type: ignore[arg-type]
        shared=shared,
        **{"eta_step": RHO, **options},
    )
    own = {name: value for name, value in options.items() if name in METHOD}
    return criterion, Reference(TASKS, GROUPS, eta_step=RHO, **own)


def call(criterion: fairmt.Criterion, model: Model, batch: Data) -> Tensor:
    features, logits = model(batch.inputs)
    return criterion(features, logits, batch.labels, batch.members, batch.sample_weight)


def only(tasks: Mapping[str, Any], batch: Data) -> Data:
    """The batch with the labels of these tasks alone."""
    return Data(batch.inputs, {name: batch.labels[name] for name in tasks}, batch.members, batch.sample_weight)


def same_values(criterion: fairmt.Criterion, expected: Outcome) -> None:
    """What the step's record says is what the reference finds."""
    last = criterion.last
    assert last is not None
    assert set(last.active) == set(expected.losses)
    losses = {name: float(loss.detach()) for name, loss in expected.losses.items()}
    for found, wanted in (
        (numbers(last.losses), losses),
        (numbers(last.psi), expected.psi),
        (numbers(last.psi_hard), expected.psi_hard),
        (numbers(last.weights), expected.weights),
    ):
        assert found == pytest.approx(wanted, rel=EXACT, abs=1e-14)
    assert float(last.phi) == pytest.approx(float(expected.phi.detach()), rel=EXACT)
    assert float(last.eta) == pytest.approx(expected.eta, rel=EXACT)
    assert float(last.violation or 0) == pytest.approx(expected.violation, rel=EXACT)


def follow(
    criterion: fairmt.FairMT,
    reference: Reference,
    model: Model,
    *,
    weighted: bool = False,
    scaled: bool = False,
    check: Callable[[Outcome, Tensor, dict[str, Tensor]], None] | None = None,
) -> None:
    """Several steps of training, each compared whole; `check` looks at the reference's graphs as well."""
    encoder = list(model.encoder.parameters())
    parameters = [*encoder, *model.heads.parameters()]
    for seed, rows, unlabelled in BATCHES:
        batch = data(seed, rows=rows, weighted=weighted).without(*unlabelled)
        loss = call(criterion, model, batch)
        features, logits = model(batch.inputs)
        expected = reference.step(logits, batch.labels, batch.members, batch.sample_weight)
        same_values(criterion, expected)

        assert criterion.last is not None
        alpha = numbers(criterion.last.alpha)
        assert set(alpha) == {column.task for column in reference.columns}
        assert all(alpha[name] == 0 for name in alpha if name not in expected.losses)
        assert sum(alpha.values()) == pytest.approx(1, abs=1e-12)
        factor = len(expected.losses) if scaled else 1
        shared = expected.lagrangian({name: factor * value for name, value in alpha.items()})
        assert float(loss.detach()) == pytest.approx(
            float(shared.detach()) - expected.eta * reference.epsilon, rel=EXACT
        )
        assert close(gradients(loss, encoder), gradients(shared, encoder))
        plain = expected.plain()
        for head in model.heads.values():
            own = list(head.parameters())
            assert close(gradients(loss, own), gradients(plain, own))
        if check is not None:
            check(expected, features, logits)

        step = torch.autograd.grad(loss, parameters)
        length = sum(float(direction.square().sum()) for direction in step) ** 0.5
        with torch.no_grad():
            for parameter, direction in zip(parameters, step, strict=True):
                parameter.sub_(0.3 / length * direction)
    assert float(criterion.eta) == pytest.approx(reference.eta, rel=EXACT)
    assert reference.eta > 0.5, "fairness never weighed: the steps above show little"


LINEAR = [("sample", True), ("mean", True), ("feature", True), ("full", True)]
OTHER = [("sample", False), ("feature", False), ("full", False)]


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("memory", [1, 20])
@pytest.mark.parametrize(("geometry", "linear"), [*LINEAR, *OTHER])
def test_gradients_are_the_methods_in_every_geometry(geometry: str, linear: bool, memory: int, weighted: bool) -> None:
    model = Model(linear=linear)
    criterion, reference = make(model, geometry=geometry, memory=memory)
    follow(criterion, reference, model, weighted=weighted)


@pytest.mark.parametrize("linear", [True, False])
def test_gradients_without_the_heads_at_hand(linear: bool) -> None:
    model = Model(linear=linear)
    criterion, reference = make(model, heads=False)
    follow(criterion, reference, model)


@pytest.mark.parametrize(
    "options",
    [
        {"asymmetric": False},
        {"asymmetric": False, "memory": 1, "beta": 0.5},
        {"beta": 0.0},
        {"beta": 0.5},
        {"aggregation": "mean"},
        {"aggregation": "max"},
        {"smoothing": 0.2},
        {"smoothing": 1.0},
        {"mu": 0.3},
        {"dual_on": "soft"},
        {"dual_on": "soft", "tolerance": 0.6},
        {"disparities": {"regression": None}},
        {"disparities": {"detection": None, "classification": None}},
        {"disparities": {"classification": None}, "beta": 0.0, "memory": 3},
    ],
    ids=str,
)
def test_gradients_under_options(options: dict[str, Any]) -> None:
    model = Model()
    criterion, reference = make(model, **options)
    follow(criterion, reference, model)


@pytest.mark.parametrize(("geometry", "linear"), [("sample", True), ("mean", True), ("feature", False)])
def test_encoder_scale_sum_multiplies_alpha_by_the_active_tasks(geometry: str, linear: bool) -> None:
    model = Model(linear=linear)
    criterion, reference = make(model, geometry=geometry, encoder_scale="sum")
    follow(criterion, reference, model, scaled=True)


def test_eta_is_clipped_rises_and_falls() -> None:
    """Equal inputs have no gap between groups, so that the multiplier falls by ρ a step."""
    tasks = {"ill": TASKS["ill"]}
    model = Model(tasks=tasks)
    options: dict[str, Any] = {"eta_step": 0.4, "eta_max": 1.0, "tolerance": 0.01, "memory": 1, "dual_on": "soft"}
    criterion, reference = fairmt.FairMT(tasks, GROUPS, model.heads, **options), Reference(tasks, GROUPS, **options)
    etas = []
    for equal in (False, True, True, True, True, False, True):
        batch = only(tasks, data(14))
        features, logits = model(0 * batch.inputs if equal else 4 * batch.inputs)
        criterion(features, logits, batch.labels, batch.members)
        reference.step(logits, batch.labels, batch.members)
        assert float(criterion.eta) == pytest.approx(reference.eta)
        etas.append(float(criterion.eta))
    assert etas == pytest.approx([1, 0.6, 0.2, 0, 0, 1, 0.6])


def test_frank_wolfe_drives_the_gradient_with_its_own_weights() -> None:
    model = Model()
    criterion, reference = make(model, solver="frank_wolfe", mu=0.3)
    encoder = list(model.encoder.parameters())
    for seed in (11, 12):
        batch = data(seed)
        loss = call(criterion, model, batch)
        _, logits = model(batch.inputs)
        assert criterion.last is not None
        own = numbers(criterion.last.weights)
        reference.weigh = lambda psi, own=own: own  # type: ignore[method-assign, misc]
        expected = reference.step(logits, batch.labels, batch.members)
        same_values(criterion, expected)
        wanted = expected.lagrangian(numbers(criterion.last.alpha))
        assert close(gradients(loss, encoder), gradients(wanted, encoder))
        exact = Reference(TASKS, GROUPS, mu=0.3).weigh(expected.psi)
        objective = [
            sum(w[name] * psi - 0.15 * w[name] ** 2 for name, psi in expected.psi.items()) for w in (own, exact)
        ]
        assert objective[1] - 0.01 <= objective[0] <= objective[1] + 1e-12


@pytest.mark.parametrize(("geometry", "linear"), [("sample", True), ("feature", False), ("full", True)])
def test_a_scaled_loss_scales_every_gradient(geometry: str, linear: bool) -> None:
    model = Model(linear=linear)
    criterion, _ = make(model, geometry=geometry)
    call(criterion, model, data(11))
    criterion.eval()
    parameters = list(model.parameters())
    plain = gradients(call(criterion, model, data(12)), parameters)
    scaled = gradients(65536 * call(criterion, model, data(12)), parameters)
    assert plain.norm() > 0
    assert close(scaled / 65536, plain, 1e-14)


# How gradients meet


def explicit(
    geometry: str, model: Model, outcome: Outcome, features: Tensor, logits: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The gradients that a geometry compares, by task, and the violation's under ""."""
    scalars = {**outcome.losses, "": outcome.phi}
    if geometry == "full":
        return {name: gradients(scalar, list(model.encoder.parameters())) for name, scalar in scalars.items()}
    if geometry in ("sample", "feature"):
        return {name: gradients(scalar, [features]) for name, scalar in scalars.items()}
    means = {}
    for name, scalar in scalars.items():
        at_logits = torch.autograd.grad(
            scalar, list(logits.values()), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        weights = [model.get_parameter(f"heads.{head}.weight").detach() for head in logits]
        parts = [d.mean(0) @ weight for d, weight in zip(at_logits, weights, strict=True)]
        means[name] = torch.stack(parts).sum(0)
    return means


def normalisers(kind: str, outcome: Outcome, rows: Mapping[str, Tensor]) -> dict[str, float]:
    found = {}
    for name, loss in outcome.normalised.items():
        size = loss if kind in ("loss", "loss+") else 1.0
        found[name] = size * (float(rows[name].norm()) if kind in ("l2", "loss+") else 1.0)
    return found


def residual(K: Tensor, b: Tensor, alpha: Tensor) -> float:
    """How far α is from the optimum of ½αᵀKα + bᵀα on the simplex, relative to the problem's scale."""
    assert bool((alpha >= 0).all())
    slope = K @ alpha + b
    scale = max(float(K.diagonal().max()), float(b.max() - b.min()))
    return float(alpha @ slope - slope.min()) / scale


@pytest.mark.parametrize("kind", ["loss+", "none", "l2", "loss"])
@pytest.mark.parametrize(("geometry", "linear"), [*LINEAR, *OTHER])
def test_alpha_solves_the_minimum_norm_problem_of_the_explicit_gradients(
    geometry: str, linear: bool, kind: str
) -> None:
    model = Model(linear=linear)
    criterion, reference = make(model, geometry=geometry, gradient_norm=kind)
    for seed, rows, unlabelled in BATCHES[:3]:
        batch = data(seed, rows=rows).without(*unlabelled)
        call(criterion, model, batch)
        features, logits = model(batch.inputs)
        outcome = reference.step(logits, batch.labels, batch.members)
        gradient = explicit(geometry, model, outcome, features, logits)
        assert criterion.last is not None
        assert criterion.last.gram is not None
        names = list(criterion.last.active)

        order = [criterion.layout.task_names.index(name) for name in names]
        stacked = torch.stack([gradient[name] for name in names])
        product = stacked @ stacked.T
        assert close(criterion.last.gram.K[order][:, order], product)
        assert close(criterion.last.gram.cross[order], stacked @ gradient[""])
        others = [number for number in range(criterion.layout.tasks) if number not in order]
        assert not criterion.last.gram.K[others].any()

        sizes = normalisers(kind, outcome, gradient)
        s = torch.tensor([sizes[name] for name in names], dtype=torch.float64)
        K = product / (s.unsqueeze(1) * s)
        b = outcome.eta * (stacked @ gradient[""]) / (s * s.mean())
        alpha = torch.stack([criterion.last.alpha[name] for name in names])
        assert residual(K, b, alpha) <= 1e-6
    assert outcome.eta > 0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_the_papers_gram_divides_by_each_tasks_own_rows(weighted: bool) -> None:
    model = Model()
    criterion = fairmt.FairMT.paper(TASKS, GROUPS, model.heads)
    batch = data(11, weighted=weighted)
    call(criterion, model, batch)
    features, logits = model(batch.inputs)
    outcome = Reference(TASKS, GROUPS, memory=1).step(logits, batch.labels, batch.members, batch.sample_weight)
    gradient = explicit("mean", model, outcome, features, logits)
    assert criterion.last is not None
    assert criterion.last.gram is not None
    names = list(criterion.last.active)
    weight = torch.ones(batch.rows) if batch.sample_weight is None else batch.sample_weight
    own_rows = {}
    for column in columns_of(TASKS):
        labels = read_labels(batch.labels[column.head], TASKS[column.head], batch.rows)
        place = 0 if isinstance(TASKS[column.head], fairmt.Classification) else column.place
        own_rows[column.task] = sum(
            line[place] is not None and bool(w > 0) for line, w in zip(labels, weight, strict=True)
        )
    stacked = torch.stack([gradient[name] * batch.rows / own_rows[name] for name in names])
    order = [criterion.layout.task_names.index(name) for name in names]
    assert close(criterion.last.gram.K[order][:, order], stacked @ stacked.T)


def test_encoder_scale_sum_divides_eta_in_the_minimum_norm_problem() -> None:
    model = Model()
    criterion, reference = make(model, encoder_scale="sum", gradient_norm="none")
    for seed in (11, 12, 13):
        batch = data(seed)
        call(criterion, model, batch)
        features, logits = model(batch.inputs)
        outcome = reference.step(logits, batch.labels, batch.members)
    gradient = explicit("sample", model, outcome, features, logits)
    assert criterion.last is not None
    names = list(criterion.last.active)
    stacked = torch.stack([gradient[name] for name in names])
    alpha = torch.stack([criterion.last.alpha[name] for name in names])
    b = outcome.eta * (stacked @ gradient[""])
    assert residual(stacked @ stacked.T, b / len(names), alpha) <= 1e-6
    assert residual(stacked @ stacked.T, b, alpha) > 1e-3, "the factor makes no difference here"


@pytest.mark.parametrize("scale", ["mean", "sum"])
def test_stationarity_is_the_encoders_relative_gradient(scale: str) -> None:
    model = Model()
    criterion, reference = make(model, dual_on="soft", encoder_scale=scale)
    for seed in (11, 12):
        batch = data(seed)
        call(criterion, model, batch)
        features, logits = model(batch.inputs)
        outcome = reference.step(logits, batch.labels, batch.members)
    gradient = explicit("sample", model, outcome, features, logits)
    assert criterion.last is not None
    times = len(outcome.losses) if scale == "sum" else 1
    alpha = {name: times * value for name, value in numbers(criterion.last.alpha).items()}
    whole = sum((alpha[name] * gradient[name] for name in outcome.losses), outcome.eta * gradient[""])
    parts = sum(alpha[name] * gradient[name].norm() for name in outcome.losses) + outcome.eta * gradient[""].norm()
    kkt = criterion.kkt()
    assert kkt.stationarity == pytest.approx(float(whole.norm() / parts), rel=1e-6)
    assert kkt.violation == pytest.approx(outcome.violation, rel=EXACT)
    assert kkt.slackness == pytest.approx(outcome.eta * outcome.violation, rel=EXACT)
    gaps = {name: math.sqrt(psi) for name, psi in outcome.psi.items() if math.sqrt(psi) > 0.05}
    assert [entry.entry for entry in kkt.above] == sorted(gaps, key=lambda name: -gaps[name])
    assert [entry.gap for entry in kkt.above] == pytest.approx(sorted(gaps.values(), reverse=True), rel=EXACT)


# Against finite differences. With a memory of one batch the gradient is a derivative, once what the method holds
# constant is held: the weights, and one-sided also the best groups' rates.


NUDGE = 1e-6
PLAIN_TASKS: dict[str, Any] = {
    "dose": fairmt.Regression(loss="huber", scale=2.0, delta=0.8),
    "signs": fairmt.Detection(3, names=["a", "b", "c"]),
    "mood": fairmt.Classification(3, temperature=0.7),
    "load": fairmt.Regression(2, names=["x", "y"], scale=[4.0, 7.0]),
}
"""Tasks whose losses do not depend on the batches before."""


class Probe:
    """A batch at fixed logits: a criterion in evaluation mode, and what its violation's gradient is there."""

    def __init__(self, **options: Any) -> None:
        self.batch = only(PLAIN_TASKS, data(21, weighted=True))
        with torch.no_grad():
            _, self.logits = Model(tasks=PLAIN_TASKS, seed=3)(self.batch.inputs)
        self.logits = {name: 3 * z for name, z in self.logits.items()}
        self.frozen = torch.zeros(self.batch.rows, 3, dtype=torch.float64)
        self.criterion = fairmt.FairMT(
            PLAIN_TASKS, GROUPS, weighting="uniform", memory=1, eta_step=RHO, dual_on="soft", **options
        )
        # Two calls that differ in η alone.
        plain = self._gradient()
        self.eta = float(self.criterion.eta)
        assert self.eta > 0.1
        self.gradient = {name: (g - plain[name]) / self.eta for name, g in self._gradient().items()}
        self.criterion.eval()

    def _gradient(self) -> dict[str, Tensor]:
        leaves = {name: z.clone().requires_grad_() for name, z in self.logits.items()}
        found = torch.autograd.grad(self._loss(leaves), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    def _loss(self, logits: dict[str, Tensor]) -> Tensor:
        return self.criterion(self.frozen, logits, self.batch.labels, self.batch.members, self.batch.sample_weight)

    @torch.no_grad()
    def phi(self, logits: dict[str, Tensor]) -> float:
        self._loss(logits)
        assert self.criterion.last is not None
        return float(self.criterion.last.phi)

    def agrees(self, phi: Callable[[dict[str, Tensor]], float]) -> bool:
        """Whether the gradient is the derivative of `phi`, along a few directions."""
        generator = torch.Generator().manual_seed(5)
        for _ in range(6):
            way = {name: torch.randn(z.shape, generator=generator).double() for name, z in self.logits.items()}
            ahead = phi({name: z + NUDGE * way[name] for name, z in self.logits.items()})
            behind = phi({name: z - NUDGE * way[name] for name, z in self.logits.items()})
            slope = sum(float((g * way[name]).sum()) for name, g in self.gradient.items())
            size = sum(float(g.square().sum()) for g in self.gradient.values()) ** 0.5
            if abs(slope - (ahead - behind) / (2 * NUDGE)) > 1e-6 * size:
                return False
        return True


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_symmetric_gradient_is_a_true_derivative(beta: float) -> None:
    probe = Probe(asymmetric=False, beta=beta, aggregation="mean")
    assert probe.agrees(probe.phi)


def test_the_printed_phi_has_the_weights_for_its_gradient() -> None:
    probe = Probe(asymmetric=False, mu=30.0, printed=True)
    assert probe.agrees(probe.phi)
    assert probe.criterion.last is not None
    assert all(0.001 < float(w) < 0.9 for w in probe.criterion.last.weights.values())
    without_the_term = Probe(asymmetric=False, mu=30.0)
    assert not without_the_term.agrees(without_the_term.phi), "the weights do not move here"


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_one_sided_gradient_is_the_derivative_with_the_best_group_held(beta: float) -> None:
    probe = Probe(beta=beta)
    assert not probe.agrees(probe.phi), "holding the best group makes no difference here"
    batch, reference = probe.batch, Reference(PLAIN_TASKS, GROUPS, memory=1, beta=beta)
    probe.phi(probe.logits)
    assert probe.criterion.last is not None
    weights = numbers(probe.criterion.last.weights)

    def sides(logits: dict[str, Tensor]) -> dict[str, tuple[str, float, list[float]]]:
        """For each side its entry, its share, and the badness of each group with data."""
        return reference.badness(logits, batch.labels, batch.members, batch.sample_weight)

    held = {side: min(badness) for side, (_, _, badness) in sides(probe.logits).items()}

    def phi(logits: dict[str, Tensor]) -> float:
        return sum(
            weights[entry] * share * (max(badness) - held[side]) ** 2
            for side, (entry, share, badness) in sides(logits).items()
        )

    assert phi(probe.logits) == pytest.approx(probe.phi(probe.logits), rel=EXACT)
    assert probe.agrees(phi)
