"""AHFDA: its weights against independent solvers, its gradient, its two ends, and Algorithm 1."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from fairmt import FairMTError
from fairmt.aggregation import Ahfda, Maximum, Mean
from fairmt.functional import ahfda, frank_wolfe, project_simplex
from tests.core.reference import project

violations = st.lists(st.integers(0, 10_000).map(lambda number: number / 10_000), min_size=1, max_size=12)
strengths = st.sampled_from([1e-4, 1e-2, 0.1, 1.0, 30.0])
smoothings = st.sampled_from([0.01, 0.3, 1.0, 3.0, 10.0, 30.0])


def vector(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def objective(w: Tensor, psi: Tensor, mu: float) -> float:
    return float(w @ psi - mu / 2 * (w @ w))


def on_simplex(w: Tensor) -> bool:
    return bool((w >= 0).all()) and abs(float(w.sum()) - 1) < 1e-12


# The exact form


@given(violations, strengths)
def test_the_exact_weights_are_the_projection(values: list[float], mu: float) -> None:
    phi, w = ahfda(vector(values), mu)
    assert on_simplex(w)
    assert torch.allclose(w, vector(project([value / mu for value in values])), rtol=1e-9, atol=1e-9)
    assert float(phi) == pytest.approx(objective(w, vector(values), mu), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mu", [0.02, 0.2, 2.0])
def test_a_general_solver_finds_nothing_better(mu: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    psi = torch.rand(2 + seed, generator=generator, dtype=torch.float64)
    _, w = ahfda(psi, mu)
    values = psi.numpy()
    found = minimize(
        lambda x: mu / 2 * x @ x - x @ values,
        np.full(len(values), 1 / len(values)),
        jac=lambda x: mu * x - values,
        bounds=[(0, 1)] * len(values),
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert objective(w, psi, mu) >= -found.fun - 1e-9
    assert torch.allclose(w, torch.from_numpy(found.x), atol=1e-4)


@given(violations, strengths)
def test_the_weights_satisfy_the_optimality_conditions(values: list[float], mu: float) -> None:
    psi = vector(values)
    _, w = ahfda(psi, mu)
    slope = psi - mu * w
    best = float(slope.max())
    assert bool((slope[w > 1e-12] >= best - 1e-12).all())


@given(violations, strengths)
def test_the_gradient_of_phi_is_w(values: list[float], mu: float) -> None:
    psi = vector(values).requires_grad_()
    phi, w = ahfda(psi, mu)
    phi.backward()
    assert psi.grad is not None
    assert not w.requires_grad
    assert torch.equal(psi.grad, w)
    nudge = 1e-7 * max(mu, 1e-3)
    for entry in range(len(values)):
        e = torch.zeros_like(w)
        e[entry] = nudge
        with torch.no_grad():
            slope = (ahfda(psi + e, mu)[0] - ahfda(psi - e, mu)[0]) / (2 * nudge)
        assert float(slope) == pytest.approx(float(w[entry]), abs=1e-5)


def test_a_mu_in_the_graph_is_held_constant() -> None:
    mu = torch.tensor(0.05, dtype=torch.float64, requires_grad=True)
    psi = vector([0.1, 0.12, 0.0]).requires_grad_()
    phi, w = ahfda(psi, mu)
    (gradient,) = torch.autograd.grad(phi, psi)
    assert torch.equal(gradient, w)
    assert not mu.grad


@given(violations, strengths, st.data())
def test_permuted_violations_have_permuted_weights(values: list[float], mu: float, draw: st.DataObject) -> None:
    order = draw.draw(st.permutations(range(len(values))))
    phi, w = ahfda(vector(values), mu)
    again, permuted = ahfda(vector(values)[order], mu)
    assert torch.allclose(permuted, w[order], atol=1e-12)
    assert float(again) == pytest.approx(float(phi), abs=1e-12)


def test_between_the_largest_and_the_uniform() -> None:
    psi = vector([0.04, 0.01, 0.09, 0.0])
    assert ahfda(psi, 1e-6)[1].tolist() == [0, 0, 1, 0]
    assert torch.allclose(ahfda(psi, 1e6)[1], torch.full_like(psi, 0.25), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    psi = torch.tensor([0.125, 0.375], dtype=dtype, requires_grad=True)
    phi, w = ahfda(psi, 0.5)
    assert phi.dtype == w.dtype == dtype
    assert w.tolist() == [0.25, 0.75]
    phi.backward()
    assert psi.grad is not None
    assert torch.equal(psi.grad, w)


# Frank–Wolfe


def by_hand(psi: list[float], mu: float, iterations: int) -> tuple[list[float], float]:
    """Algorithm 1: uniform start, best vertex, exact line search; the gap is the one from before the last update."""
    w, gap = [1 / len(psi)] * len(psi), math.inf
    for _ in range(iterations):
        gradient = [mu * own - value for own, value in zip(w, psi, strict=True)]
        vertex = gradient.index(min(gradient))
        direction = [float(entry == vertex) - own for entry, own in enumerate(w)]
        gap = -sum(g * d for g, d in zip(gradient, direction, strict=True))
        step = min(max(gap / (mu * sum(d * d for d in direction)), 0), 1)
        w = [own + step * d for own, d in zip(w, direction, strict=True)]
    return w, gap


@pytest.mark.parametrize("iterations", [1, 2, 3, 7])
def test_the_first_iterations_are_algorithm_1(iterations: int) -> None:
    psi, mu = [0.05, 0.11, 0.1, 0.02], 0.1
    w, gap, count = frank_wolfe(vector(psi), mu, tol=0, max_iter=iterations)
    wanted, wanted_gap = by_hand(psi, mu, iterations)
    assert w.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert gap == pytest.approx(wanted_gap, rel=1e-9)
    assert count == iterations


def test_one_iteration_worked_out() -> None:
    # From (½, ½) the gradient is (−0.4, −0.85); the second vertex, d = (−½, ½), gap 0.225, step 0.225 / (0.1·½) > 1.
    w, gap, _ = frank_wolfe(vector([0.45, 0.9]), 0.1, tol=1e-9, max_iter=1)
    assert w.tolist() == [0, 1]
    assert gap == pytest.approx(0.225)
    # With μ = 1 the step is 0.225 / ½ = 0.45, which is the optimum (0.275, 0.725).
    w, gap, count = frank_wolfe(vector([0.45, 0.9]), 1.0, tol=1e-9)
    assert w.tolist() == pytest.approx([0.275, 0.725])
    assert count == 2  # the gap is the one from before the update, so one more look is needed
    assert gap == pytest.approx(0, abs=1e-9)


@given(violations, strengths, st.sampled_from([1e-2, 1e-3, 1e-4]))
def test_frank_wolfe_is_within_its_gap_of_the_exact_answer(values: list[float], mu: float, tol: float) -> None:
    psi = vector(values)
    best, _ = ahfda(psi, mu)
    w, gap, count = frank_wolfe(psi, mu, tol, max_iter=300)
    assert on_simplex(w)
    assert isinstance(gap, float)
    assert isinstance(count, int)
    assert count <= 300
    assert gap <= tol or count == 300
    assert -1e-12 <= float(best) - objective(w, psi, mu) <= gap + 1e-12


@given(violations, st.sampled_from([0.5, 1.0, 30.0]))
def test_phi_by_frank_wolfe_has_its_own_weights_for_gradient(values: list[float], mu: float) -> None:
    psi = vector(values).requires_grad_()
    exact, _ = ahfda(psi, mu)
    phi, w = ahfda(psi, mu, solver="frank_wolfe", tol=1e-3, max_iter=500)
    phi.backward()
    assert psi.grad is not None
    assert torch.equal(psi.grad, w)
    assert 0 <= float(exact.detach() - phi.detach()) + 1e-12 <= 2e-3


# The criterion's aggregations: relative strength, and entries that are not measured


@st.composite
def measured_violations(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    values = draw(violations)
    mask = draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)).filter(any))
    measured = torch.tensor(mask)
    return torch.where(measured, vector(values), 0), measured


@pytest.mark.parametrize(
    "aggregation",
    [Mean(), Maximum(), Ahfda(), Ahfda(0.3), Ahfda(mu=0.05), Ahfda(3.0, solver="frank_wolfe")],
    ids=str,
)
@given(measured_violations())
def test_unmeasured_entries_weigh_nothing_and_change_nothing(aggregation: Any, given: tuple[Tensor, Tensor]) -> None:
    psi, measured = given
    w = aggregation(psi, measured)
    assert on_simplex(w)
    assert not w[~measured].any()
    alone = aggregation(psi[measured], torch.ones_like(psi[measured], dtype=torch.bool))
    assert torch.allclose(w[measured], alone, atol=1e-12)


@pytest.mark.parametrize("aggregation", [Mean(), Maximum(), Ahfda(), Ahfda(0.3), Ahfda(mu=0.05)], ids=range(5))
def test_with_nothing_measured_all_weights_are_zero(aggregation: Any) -> None:
    w = aggregation(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.bool))
    assert w.tolist() == [0, 0, 0]


@given(measured_violations(), smoothings)
def test_relative_weights_are_a_projection(given: tuple[Tensor, Tensor], smoothing: float) -> None:
    psi, measured = given
    w = Ahfda(smoothing)(psi, measured)
    total = float(psi.sum())
    wanted = project([value / (smoothing * (total or 1)) for value in psi[measured].tolist()])
    assert torch.allclose(w[measured], vector(wanted), atol=1e-9)
    assert torch.allclose(Ahfda(smoothing)(7 * psi, measured), w, atol=1e-12), "the size of all violations has no say"


@given(measured_violations(), st.sampled_from([1.0, 1.5, 10.0]))
def test_from_a_smoothing_of_one_on_weights_are_a_mixture(given: tuple[Tensor, Tensor], smoothing: float) -> None:
    psi, measured = given
    if psi.sum() == 0:
        return
    w = Ahfda(smoothing)(psi, measured)
    mixture = psi / (smoothing * psi.sum()) + measured * (1 - 1 / smoothing) / measured.sum()
    assert torch.allclose(w, mixture, atol=1e-12)
    projected = project_simplex(psi / (smoothing * psi.sum()), measured)
    assert torch.allclose(w, projected, atol=1e-12)


def test_a_smoothing_of_one_weighs_by_violation() -> None:
    w = Ahfda(1.0)(vector([0.01, 0.03, 0.0, 0.04]), torch.tensor([True, True, False, True]))
    assert w.tolist() == pytest.approx([0.125, 0.375, 0, 0.5])


def test_a_vanishing_smoothing_leaves_the_largest() -> None:
    psi, measured = vector([0.01, 0.03, 0.0, 0.04]), torch.tensor([True, True, False, True])
    assert Ahfda(1e-6)(psi, measured).tolist() == [0, 0, 0, 1]
    assert Maximum()(psi, measured).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("smoothing", [0.1, 1.0, 10.0])
def test_without_a_violation_weights_are_uniform(smoothing: float) -> None:
    measured = torch.tensor([True, False, True, True, True])
    w = Ahfda(smoothing)(torch.zeros(5, dtype=torch.float64), measured)
    assert w.tolist() == pytest.approx([0.25, 0, 0.25, 0.25, 0.25])


def test_mean_and_maximum() -> None:
    psi, measured = vector([0.0, 0.01, 0.02]), torch.tensor([False, True, True])
    assert Mean()(psi, measured).tolist() == [0, 0.5, 0.5]
    assert Maximum()(psi, measured).tolist() == [0, 0, 1]
    # All measured gaps are 0, and the largest must still be a measured one.
    assert Maximum()(torch.zeros_like(psi), measured).tolist() == [0, 1, 0]


# Mistakes

PSI = torch.tensor([0.1, 0.2])
MISTAKES: list[tuple[str, Callable[[], Any]]] = [
    (r"psi: met .*\(1, 2\)", lambda: ahfda(PSI.unsqueeze(0), 1.0)),
    (r"psi: met .*\(0,\)", lambda: ahfda(PSI[:0], 1.0)),
    (r"psi: met .*\(2,\).*int64", lambda: frank_wolfe(PSI.long(), 1.0)),
    (r"psi: met .*0\.1", lambda: frank_wolfe([0.1], 1.0)),  # type: ignore[arg-type]
    (r"mu: met 0", lambda: ahfda(PSI, 0)),
    (r"mu: met -1", lambda: frank_wolfe(PSI, -1.0)),
    (r"mu: met nan", lambda: ahfda(PSI, math.nan)),
    (r"mu: met .*0", lambda: ahfda(PSI, torch.tensor(0.0))),
    (r"mu: met '1'", lambda: ahfda(PSI, "1")),  # type: ignore[arg-type]
    (r"max_iter: met 0", lambda: frank_wolfe(PSI, 1.0, max_iter=0)),
    (r"solver: met 'newton'", lambda: ahfda(PSI, 1.0, solver="newton")),  # type: ignore[arg-type]
    (r"solver: met 'newton'", lambda: Ahfda(solver="newton")),  # type: ignore[arg-type]
    (r"smoothing: met 0", lambda: Ahfda(0)),
    (r"smoothing: met nan", lambda: Ahfda(math.nan)),
    (r"mu: met -0.1", lambda: Ahfda(mu=-0.1)),
]


@pytest.mark.parametrize(("message", "mistake"), MISTAKES, ids=[message for message, _ in MISTAKES])
def test_a_mistake_is_named(message: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises(FairMTError, match=message):
        mistake()
