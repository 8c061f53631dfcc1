"""The simplex: its projection, and the minimum norm over it by both solvers, against independent ones."""

import importlib.util
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor

from fairmt import FairMTError
from fairmt.functional import min_norm, project_simplex
from fairmt.simplex import active_set, fused, interior_point, solve
from tests.core.reference import project

Solver = Callable[[Tensor, Tensor], Tensor]
Problem = tuple[Tensor, Tensor]

SOLVERS: dict[str, Solver] = {"active set": active_set.minimise, "interior point": interior_point.minimise}
# The KKT residual each of them reaches, relative to the scale of the problem.
RESIDUALS = {"active set": 1e-12, "interior point": 1e-8}
SIZES = (1, 2, 3, 9, 40, 128)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SOLVERS)
def solver(request) -> str:
    return request.param


# Problems


def training_like(T: int, normal: Callable[..., Tensor]) -> Tensor:
    """Gradients with a common component."""
    return normal(T, 300) + 0.3 * normal(300)


def repeated(T: int, normal: Callable[..., Tensor]) -> Tensor:
    return training_like(T, normal)[torch.arange(T) % max(1, T // 2)]


def some_zero(T: int, normal: Callable[..., Tensor]) -> Tensor:
    return training_like(T, normal) * (torch.arange(T) % 3 > 0)[:, None]


def many_scales(T: int, normal: Callable[..., Tensor]) -> Tensor:
    """Norms from 1e-8 to 1e8 in one matrix."""
    return training_like(T, normal) * 10 ** (16 * torch.special.ndtr(normal(T, 1)) - 8)


GRADIENTS: dict[str, Callable[[int, Callable[..., Tensor]], Tensor]] = {
    "training": training_like,
    "one direction": lambda T, normal: training_like(T, normal) + 3 * normal(T, 1) * normal(300),
    "singular": lambda T, normal: normal(T, max(1, T // 3)),
    "duplicates": repeated,
    "zero rows": some_zero,
    "all zero": lambda T, normal: torch.zeros(T, 3, dtype=torch.float64),
    "many scales": many_scales,
    "tiny": lambda T, normal: 1e-8 * training_like(T, normal),
    "huge": lambda T, normal: 1e8 * training_like(T, normal),
    "nearly parallel": lambda T, normal: normal(30) + 1e-4 * normal(T, 30),
    "no conflict": lambda T, normal: normal(T, T + 2).abs(),
}
# b is ⟨g_t, g_Φ⟩ for one more gradient, times this; None: any b at all, about as large as K.
FAIRNESS = (0.0, 1.0, 10.0, 1e5, None)


def problem(family: str, T: int, seed: int, fairness: float | None) -> Problem:
    generator = torch.Generator().manual_seed(1000 * T + seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gradients = GRADIENTS[family](T, normal)
    K = gradients @ gradients.T
    if fairness is None:
        return K, normal(T) * (K.diagonal().max() + 1e-3)
    return K, fairness * gradients @ normal(gradients.shape[1])


def kkt_residual(K: Tensor, b: Tensor, alpha: Tensor) -> float:
    """How much more the weights' mean slope is than the least slope, relative to the scale of the slopes."""
    slopes = K @ alpha + b
    scale = K.diagonal().max() + b.max() - b.min()
    return float((alpha @ slopes - slopes.min()) / scale) if scale > 0 else 0.0


def objective(K: Tensor, b: Tensor, alpha: Tensor) -> float:
    return float(alpha @ K @ alpha / 2 + b @ alpha)


def on_simplex(alpha: Tensor) -> bool:
    return bool((alpha >= 0).all()) and abs(float(alpha.sum()) - 1) < 1e-12


# Projection


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_projection_is_the_nearest_point(values: list[float]) -> None:
    projected = project_simplex(torch.tensor(values, dtype=torch.float64))
    assert on_simplex(projected)
    assert projected.tolist() == pytest.approx(project(values), abs=1e-9)
    assert torch.allclose(project_simplex(projected), projected, atol=1e-12)


@given(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), min_size=1, max_size=20), st.randoms())
def test_projection_with_a_mask_is_that_of_what_is_left(entries: list[tuple[float, bool]], random) -> None:
    random.shuffle(entries)  # and so any order
    values, kept = zip(*entries, strict=True)
    projected = project_simplex(torch.tensor(values, dtype=torch.float64), torch.tensor(kept)).tolist()
    left = [value for value, keep in entries if keep]
    assert [weight for weight, keep in zip(projected, kept, strict=True) if not keep] == [0.0] * (len(kept) - len(left))
    expected = project(left) if left else []
    assert [weight for weight, keep in zip(projected, kept, strict=True) if keep] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_projection_keeps_the_dtype(dtype: torch.dtype) -> None:
    projected = project_simplex(torch.tensor([200.0, 200.0, 199.0, -1e4], dtype=dtype))
    assert projected.dtype == dtype
    assert projected.tolist() == [0.5, 0.5, 0.0, 0.0]


def test_projection_says_what_it_met() -> None:
    with pytest.raises(FairMTError, match=r"v: met torch.float32 of shape \(2, 2\), expected a floating-point vector"):
        project_simplex(torch.zeros(2, 2))
    with pytest.raises(FairMTError, match=r"v: met torch.int64 of shape \(2,\)"):
        project_simplex(torch.zeros(2, dtype=torch.long))
    with pytest.raises(FairMTError, match=r"mask: met torch.bool of shape \(3,\), expected torch.bool of shape \(2,\)"):
        project_simplex(torch.zeros(2), torch.ones(3, dtype=torch.bool))


# Minimum norm: optimal


@pytest.mark.parametrize("family", GRADIENTS)
@pytest.mark.parametrize("T", SIZES)
def test_the_kkt_conditions_hold(solver: str, T: int, family: str) -> None:
    for seed, fairness in enumerate(FAIRNESS):
        K, b = problem(family, T, seed, fairness)
        alpha = SOLVERS[solver](K, b)
        assert on_simplex(alpha), fairness
        assert kkt_residual(K, b, alpha) <= RESIDUALS[solver], fairness


@pytest.mark.parametrize("family", GRADIENTS)
@pytest.mark.parametrize("T", [2, 9, 40])
def test_nothing_better_is_found_by_nonnegative_least_squares(solver: str, T: int, family: str) -> None:
    """min ‖Gᵀα + h‖² on the simplex, the constraint a row of great weight: another problem, another algorithm."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gradients = GRADIENTS[family](T, lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64))  # noqa: B023
        other = (
            torch.randn(gradients.shape[1], generator=generator, dtype=torch.float64)
            * gradients.norm(dim=1).mean()
            / 10
        )
        weight = 1e5 * float(torch.cat((gradients, other[None])).norm()) + 1
        alpha, _ = nnls(
            np.vstack((gradients.T.numpy(), np.full(T, weight))), np.append(-other.numpy(), weight), maxiter=50 * T
        )
        found = torch.from_numpy(alpha) / alpha.sum()
        K, b = gradients @ gradients.T, gradients @ other
        ours = SOLVERS[solver](K, b)
        norms = K.diagonal().sqrt()
        scale = float((norms @ found) ** 2 + (b @ found).abs())
        assert objective(K, b, ours) <= objective(K, b, found) + 1e-6 * scale + 1e-30


def exact_least(K: Tensor, b: Tensor) -> Fraction:
    """The least objective, in rational arithmetic: the best of the stationary points of all supports."""
    gram = [[Fraction(value) for value in row] for row in K.tolist()]
    costs = [Fraction(value) for value in b.tolist()]
    least = []
    for count in range(1, len(costs) + 1):
        for support in combinations(range(len(costs)), count):
            rows = [[gram[s][t] for t in support] + [Fraction(-1), -costs[s]] for s in support]
            rows.append([Fraction(1)] * count + [Fraction(0), Fraction(1)])
            for pivot in range(count + 1):
                swap = next(row for row in range(pivot, count + 1) if rows[row][pivot])
                rows[pivot], rows[swap] = rows[swap], rows[pivot]
                rows[pivot] = [value / rows[pivot][pivot] for value in rows[pivot]]
                for row in range(count + 1):
                    if row != pivot:
                        factor = rows[row][pivot]
                        rows[row] = [here - factor * there for here, there in zip(rows[row], rows[pivot], strict=True)]
            alpha = [row[-1] for row in rows[:count]]
            if min(alpha) >= 0:
                # The multiplier is the mean slope αᵀ(Kα + b): half of it and of bᵀα make the objective.
                least.append((rows[count][-1] + sum(a * costs[t] for a, t in zip(alpha, support, strict=True))) / 2)
    return min(least)


@pytest.mark.parametrize("family", ["training", "many scales"])
@pytest.mark.parametrize("T", [2, 3, 5])
def test_the_objective_is_right_when_norms_differ_by_sixteen_orders(solver: str, T: int, family: str) -> None:
    for seed in range(4):
        for fairness in (0.0, 1e-9, 1.0):
            K, b = problem(family, T, seed, fairness)
            alpha = [Fraction(value) for value in SOLVERS[solver](K, b).tolist()]
            alpha = [value / sum(alpha, Fraction(0)) for value in alpha]
            gradient = [[x * Fraction(value) for value in row] for x, row in zip(alpha, K.tolist(), strict=True)]
            quadratic = sum(
                (y * sum(column, Fraction(0)) for y, column in zip(alpha, zip(*gradient, strict=True), strict=True)),
                Fraction(0),
            )
            linear = sum((x * Fraction(value) for x, value in zip(alpha, b.tolist(), strict=True)), Fraction(0))
            excess = quadratic / 2 + linear - exact_least(K, b)
            assert abs(excess) <= Fraction(1, 10**6) * (quadratic + abs(linear))


@given(st.floats(-8, 8), st.floats(-8, 8), st.floats(-0.999, 0.999), st.floats(-100, 100), st.floats(-100, 100))
def test_two_tasks_have_a_closed_form(first: float, second: float, cosine: float, p: float, q: float) -> None:
    norms = torch.tensor([10**first, 10**second], dtype=torch.float64)
    K = norms[:, None] * norms * torch.tensor([[1, cosine], [cosine, 1]], dtype=torch.float64)
    b = norms.min() * norms * torch.tensor([p, q], dtype=torch.float64)
    distance = K[0, 0] + K[1, 1] - 2 * K[0, 1]
    share = float(((K[1, 1] - K[0, 1] + b[1] - b[0]) / distance).clamp(0, 1))
    assert float(solve(K, b)[0]) == pytest.approx(share, rel=1e-9, abs=1e-12)
    # The slope along the edge vanishes or points outwards, in units of the shorter gradient.
    alpha = interior_point.minimise(K, b)
    slopes = K @ alpha + b
    assert float((alpha @ slopes - slopes.min()) / norms.min() / norms.max()) < 1e-6


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 6), st.sampled_from([0.0, 1.0, 100.0]))
def test_both_solvers_agree(seed: int, T: int, rank: int, strength: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(T, rank, generator=generator, dtype=torch.float64)
    K = gradients @ gradients.T
    b = strength * gradients @ torch.randn(rank, generator=generator, dtype=torch.float64)
    exact, stepped = active_set.minimise(K, b), interior_point.minimise(K, b)
    # The weights needn't be unique, their gradient is.
    scale = float(K.diagonal().max() + b.abs().max())
    assert objective(K, b, stepped) == pytest.approx(objective(K, b, exact), abs=1e-8 * scale)
    assert torch.allclose(gradients.T @ exact, gradients.T @ stepped, atol=1e-4 * scale**0.5)


def test_the_primal_active_set_alone_is_right() -> None:
    """Pivoting settles nearly always, so what stands behind it is tried here by itself."""
    for family in GRADIENTS:
        for seed, fairness in enumerate(FAIRNESS):
            K, b = problem(family, 17, seed, fairness)
            quadratic = active_set._Quadratic(K, b)
            point = torch.tensor(quadratic.descend([1.0] + [0.0] * 16), dtype=torch.float64)
            assert on_simplex(point), family
            assert kkt_residual(K, b, point) <= 1e-11, family


def test_pivoting_settles_on_training_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a few solves, and in one where the support is guessed: its speed."""
    solves: list[list[int]] = []
    minimise_on = active_set._Quadratic.minimise_on

    def counted(self: active_set._Quadratic, support: list[int]) -> tuple[list[float], dict[int, float]]:
        solves.append(support)
        return minimise_on(self, support)

    monkeypatch.setattr(active_set._Quadratic, "minimise_on", counted)
    monkeypatch.setattr(active_set._Quadratic, "descend", None)
    for T in (9, 40, 128):
        for seed, fairness in enumerate((0.0, 0.0, 1.0, 1.0, 10.0, 10.0)):
            K, b = problem("training", T, seed, fairness)
            alpha = active_set.minimise(K, b)
            assert len(solves) <= 7
            solves.clear()
            active_set.minimise(K, b, alpha.nonzero().flatten().tolist())
            assert len(solves) == 1
            solves.clear()


def test_it_takes_over_when_pivoting_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_set, "MAX_PIVOTS", 1)
    for seed in range(10):
        K, b = problem("singular", 12, seed, 10.0)
        assert kkt_residual(K, b, active_set.minimise(K, b)) <= 1e-12


# Minimum norm: what it does not depend on


@pytest.mark.parametrize("family", ["training", "no conflict", "many scales"])
def test_the_order_of_tasks_does_not_matter(solver: str, family: str) -> None:
    K, b = problem(family, 12, 0, 1.0)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    alpha = SOLVERS[solver](K, b)
    assert torch.allclose(SOLVERS[solver](K[order][:, order], b[order]), alpha[order], atol=1e-6)


@pytest.mark.parametrize("factor", [1e-16, 1e-3, 1e16])
def test_the_scale_of_the_problem_does_not_matter(solver: str, factor: float) -> None:
    K, b = problem("training", 12, 3, 10.0)
    alpha = SOLVERS[solver](K, b)
    assert torch.allclose(SOLVERS[solver](factor * K, factor * b), alpha, atol=1e-8)
    assert torch.allclose(SOLVERS[solver](K, b + float(K.max())), alpha, atol=1e-8)  # nor does a constant in b


def test_a_duplicate_shares_its_twin_s_weight(solver: str) -> None:
    K, b = problem("training", 6, 0, 1.0)
    twice = torch.tensor([0, 1, 2, 3, 4, 5, 2])
    alpha, shared = SOLVERS[solver](K, b), SOLVERS[solver](K[twice][:, twice], b[twice])
    merged = shared[:6].clone()
    merged[2] += shared[6]
    assert torch.allclose(merged, alpha, atol=1e-6)
    assert abs(float(shared[2] - shared[6])) < 1e-2  # evenly, so that noise doesn't choose


@pytest.mark.parametrize("family", ["training", "many scales", "duplicates"])
def test_tasks_that_are_not_active_get_nothing(solver: str, family: str) -> None:
    K, b = problem(family, 10, 0, 1.0)
    active = torch.tensor([True, False, True, True, False, True, True, True, False, True])
    expected = torch.zeros(10, dtype=torch.float64)
    expected[active] = SOLVERS[solver](K[active][:, active], b[active])
    K[1], K[:, 1], b[1] = torch.nan, torch.nan, torch.nan  # what they hold is nobody's business
    alpha = solve(K, b, active) if solver == "active set" else interior_point.minimise(K, b, active)
    assert alpha[~active].tolist() == [0.0] * 3
    assert objective(K.nan_to_num(), b.nan_to_num(), alpha) == pytest.approx(
        objective(K.nan_to_num(), b.nan_to_num(), expected), rel=1e-6
    )
    assert torch.allclose(alpha, expected, atol=1e-2 if family == "duplicates" else 1e-6)


@pytest.mark.parametrize("T", [1, 2, 5])
def test_degenerate_problems_have_an_answer(T: int) -> None:
    K, b = torch.zeros(T, T, dtype=torch.float64), torch.zeros(T, dtype=torch.float64)
    none = torch.zeros(T, dtype=torch.bool)
    some = torch.arange(T) < 3
    uniform = some / some.sum()
    for method in (solve, interior_point.minimise):
        assert torch.allclose(method(K, b), torch.full_like(b, 1 / T), atol=1e-12)
        assert torch.allclose(method(K, b, some), uniform.double(), atol=1e-12)
        assert method(K, b, none).tolist() == [0.0] * T
        cheapest = method(K, torch.arange(T, 0, -1).double())  # no gradient: all to the least cost
        assert cheapest[-1] == pytest.approx(1, abs=1e-8)
        idle = method(torch.diag((torch.arange(T) > 0).double()), b)  # one task without gradient has the norm 0
        assert idle[0] == pytest.approx(1, abs=1e-8)


@given(st.integers(0, 10**6))
def test_a_guess_of_the_support_changes_nothing(seed: int) -> None:
    K, b = problem("training", 9, seed, 10.0)
    guess = torch.rand(9, generator=torch.Generator().manual_seed(seed)) < 0.5
    active = torch.arange(9) != 4
    assert torch.allclose(solve(K, b, support=guess), solve(K, b), atol=1e-12)
    assert torch.allclose(solve(K, b, active, guess), solve(K, b, active), atol=1e-12)


@pytest.mark.parametrize(("noise", "residual"), [(1e-8, 1e-6), (1e-7, 1e-6), (1e-4, 1e-3)])
@pytest.mark.parametrize("T", [6, 12, 40])
def test_a_gram_made_indefinite_by_rounding_is_survived(solver: str, T: int, noise: float, residual: float) -> None:
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        K, b = problem("singular", T, seed, 0.0 if seed % 2 else None)
        errors = noise * K.diagonal().max() * torch.randn(T, T, generator=generator, dtype=torch.float64)
        K = K + (errors + errors.T) / 2
        assert torch.linalg.eigvalsh(K)[0] < 0
        alpha = SOLVERS[solver](K, b)
        assert on_simplex(alpha)
        assert kkt_residual(K, b, alpha) <= residual


@pytest.mark.parametrize("T", [3, 6])
def test_what_is_not_finite_raises_nothing(T: int) -> None:
    K, b = problem("training", T, 0, 1.0)
    for entry in (torch.nan, torch.inf):
        for where in (K, b):
            before = where[0].clone()
            where[0] = entry
            assert solve(K, b).shape == (T,)
            where[0] = before


def test_what_is_no_gram_still_gives_weights(solver: str) -> None:
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        errors = torch.randn(7, 7, generator=generator, dtype=torch.float64)
        assert on_simplex(SOLVERS[solver](errors + errors.T, errors[0]))


# Minimum norm: the public function


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_dtype_is_kept_and_no_gradient_taken(dtype: torch.dtype) -> None:
    K = torch.tensor([[4.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 9.0]], dtype=dtype, requires_grad=True)
    alpha = min_norm(K, torch.tensor([0.0, 0.0, 1.0], dtype=dtype))
    assert alpha.dtype == dtype
    assert not alpha.requires_grad
    assert torch.allclose(alpha, torch.tensor([0.2, 0.8, 0.0], dtype=dtype))


@pytest.mark.parametrize(
    ("K", "b", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2), r"K: met shape \(2, 3\), expected a square matrix"),
        (torch.zeros(0, 0), torch.zeros(0), r"K: met shape \(0, 0\)"),
        (torch.zeros(2, 2), torch.zeros(3), r"b: met shape \(3,\), expected \(2,\)"),
        (torch.zeros(2, 2).long(), torch.zeros(2), "K: met torch.int64, expected a floating-point dtype"),
        (torch.zeros(2, 2), torch.zeros(2).long(), "b: met torch.int64"),
        (torch.full((2, 2), torch.nan), torch.zeros(2), "K: met values that are not finite"),
        (torch.eye(2), torch.tensor([0.0, torch.inf]), "b: met values that are not finite"),
    ],
)
def test_min_norm_says_what_it_met(K: Tensor, b: Tensor, message: str) -> None:
    with pytest.raises(FairMTError, match=message):
        min_norm(K, b)


# Minimum norm: in one launch


def check_fused(T: int, family: str, device: str, fairnesses: tuple[float | None, ...] = FAIRNESS) -> None:
    """The kernel against the active set: over all tasks, over some, and over none."""
    for seed, fairness in enumerate(fairnesses):
        K, b = problem(family, T, seed, fairness)
        some = torch.rand(T, generator=torch.Generator().manual_seed(seed)) < 0.6
        some[-1] = True
        for active in (None, some):
            on = torch.ones(T, dtype=torch.bool) if active is None else active
            hidden = torch.where(on & on[:, None], K, math.nan), torch.where(on, b, math.nan)
            given = [*hidden, *([] if active is None else [active])]
            alpha = fused.launch(*[tensor.to(device) for tensor in given]).cpu()
            left, costs = K[on][:, on], b[on]
            assert alpha[~on].eq(0).all()
            assert on_simplex(alpha)
            assert kkt_residual(left, costs, alpha[on]) <= RESIDUALS["interior point"], (family, fairness)
            scale = float(left.diagonal().max() + costs.abs().max())
            expected = objective(left, costs, active_set.minimise(left, costs))
            assert objective(left, costs, alpha[on]) == pytest.approx(expected, abs=1e-8 * scale)
        assert fused.launch(K.to(device), b.to(device), torch.zeros_like(some).to(device)).eq(0).all()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_is_right_as_triton_interprets_it() -> None:
    """Without an accelerator; Triton must be told before it is imported, so in another process."""
    script = """
import torch
from tests.core.test_simplex import check_fused, problem
from fairmt.simplex import fused, interior_point

for T in (2, 5, 9, 17):
    for family in ("training", "duplicates", "many scales"):
        check_fused(T, family, "cpu", (0.0, 10.0) if T < 17 else (10.0,))
K, b = problem("training", 6, 0, 1.0)
assert torch.allclose(fused.launch(K[1:, 1:], b[1:]), interior_point.minimise(K[1:, 1:], b[1:]), atol=1e-9)
K = K - K.diagonal().max() * torch.eye(6)  # so indefinite that no step can be taken
assert torch.allclose(fused.launch(K, b), interior_point.minimise(K, b), atol=1e-9)
"""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root / "src"), str(root)))
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_a_kernel_that_cannot_be_compiled_is_given_up_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCuda(Tensor):
        is_cuda = True

    def launch(*_: Tensor | None) -> Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fused, "launch", launch)
    monkeypatch.setattr(fused, "_usable", True)
    K, b = problem("training", 5, 0, 1.0)
    expected = interior_point.minimise(K, b)
    with pytest.warns(UserWarning, match="Triton failed, so the minimum norm takes a slower solver: Failed to find C"):
        assert torch.allclose(fused.minimise(K.as_subclass(OnCuda), b), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(fused.minimise(K.as_subclass(OnCuda), b), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("family", GRADIENTS)
@pytest.mark.parametrize("T", [1, 2, 9, 17, 40, 64])
def test_the_kernel_is_right_on_the_device(T: int, family: str) -> None:
    check_fused(T, family, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("T", [1, 2, 9, 17, 40, 64, 128])
def test_the_device_is_not_waited_for(T: int) -> None:
    """Whether by the kernel or, with more tasks, by the interior point."""
    K, b = problem("training", T, 0, 10.0)
    expected = solve(K, b)
    K, b = K.cuda(), b.cuda()
    solve(K, b)  # compiles
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        alpha = solve(K, b)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.allclose(alpha.cpu(), expected, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("T", [1, 9, 40, 128])
def test_a_cuda_graph_holds_it(T: int) -> None:
    K, b = problem("training", T, 0, 10.0)
    active = torch.arange(T) != 3
    expected = solve(K, b, active)
    K, b, active = K.cuda(), b.cuda(), active.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        solve(K, b, active)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # any wait for the device is an error in here
        alpha = solve(K, b, active)
        projected = project_simplex(b, active)
    graph.replay()
    assert torch.allclose(alpha.cpu(), expected, atol=1e-6)
    assert projected[~active].eq(0).all()
