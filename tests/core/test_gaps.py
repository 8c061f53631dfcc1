"""Rates and gaps of the pure functions, against loops over rows and groups."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fairmt import FairMTError
from fairmt.functional import aeod, aep, caeod, group_rates

Label = float | None
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
CLASSES = 3


class Rows(NamedTuple):
    """Rows of a small problem, in plain Python."""

    probs: list[float]
    labels: list[Label]
    members: list[int]
    num_groups: int


def rows(
    labels: st.SearchStrategy[Any], scores: st.SearchStrategy[float], *, width: int = 1, cover: tuple[float, ...] = ()
) -> st.SearchStrategy[Rows]:
    """Rows of any sort; with `cover` there are several groups, and each has all of these labels."""

    def build(free: int, groups: int) -> st.SearchStrategy[Rows]:
        size = free + len(cover) * groups
        return st.builds(
            Rows,
            st.lists(scores, min_size=size * width, max_size=size * width, unique=True),
            st.lists(st.none() | labels, min_size=free, max_size=free).map(lambda own: [*cover * groups, *own]),
            st.lists(st.integers(-1, groups - 1), min_size=free, max_size=free).map(
                lambda own: [*[group for group in range(groups) for _ in cover], *own]
            ),
            st.just(groups),
        )

    return st.tuples(st.integers(0, 12), st.integers(2 if cover else 1, 4)).flatmap(lambda shape: build(*shape))


probabilities = st.integers(1, 9999).map(lambda number: number / 10000)
numbers = st.integers(-999, 999).map(lambda number: number / 100)
yes_no = st.sampled_from([0.0, 1.0])
which = st.integers(0, CLASSES - 1).map(float)

detections = rows(yes_no, probabilities)
classifications = rows(which, probabilities, width=CLASSES)
regressions = rows(numbers, numbers)
betas = st.sampled_from([0.0, 0.5, 1.0, 3.0])

# Ones in which every side is measured.
full_detections = rows(yes_no, probabilities, cover=(0.0, 1.0))
full_classifications = rows(which, probabilities, width=CLASSES, cover=(0.0, 1.0, 2.0))
full_regressions = rows(numbers, probabilities, cover=(0.0,))


def floats(values: list[Any]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def ints(values: list[Any], missing: int = -1) -> Tensor:
    return torch.tensor([missing if value is None else int(value) for value in values], dtype=torch.long)


# The naive statement


def naive_rates(scores: list[float], counted: list[bool], members: list[int], num_groups: int) -> dict[int, float]:
    rates = {}
    for group in range(num_groups):
        own = [score for score, c, m in zip(scores, counted, members, strict=True) if c and m == group]
        if own:
            rates[group] = sum(own) / len(own)
    return rates


def naive_gap(rates: dict[int, float]) -> float | None:
    return max(rates.values()) - min(rates.values()) if len(rates) >= 2 else None


def naive_odds(scores: list[float], positive: list[bool | None], row: Rows, beta: float) -> float:
    tpr = naive_gap(naive_rates(scores, [p is True for p in positive], row.members, row.num_groups))
    fpr = naive_gap(naive_rates(scores, [p is False for p in positive], row.members, row.num_groups))
    if beta == 0:
        fpr = None
    if tpr is None and fpr is None:
        return math.nan
    return ((tpr or 0) ** 2 + beta * (fpr or 0) ** 2) / (1 + beta)


def naive_aeod(row: Rows, beta: float) -> float:
    return naive_odds(row.probs, [None if y is None else y == 1 for y in row.labels], row, beta)


def naive_caeod(row: Rows, beta: float) -> list[float]:
    return [
        naive_odds(row.probs[k::CLASSES], [None if y is None else y == k for y in row.labels], row, beta)
        for k in range(CLASSES)
    ]


def naive_aep(row: Rows, loss: str) -> float:
    errors = []
    for prediction, label in zip(row.probs, row.labels, strict=True):
        miss = abs(prediction - (label or 0))
        huber = miss**2 / 2 if miss <= 1 else miss - 0.5
        errors.append({"mse": miss**2, "mae": miss, "huber": huber}[loss])
    gap = naive_gap(naive_rates(errors, [y is not None for y in row.labels], row.members, row.num_groups))
    return math.nan if gap is None else gap**2


def close(found: Tensor, wanted: Any, tolerance: float = 1e-10) -> bool:
    target = torch.as_tensor(wanted, dtype=torch.float64)
    return torch.allclose(found.double(), target, rtol=tolerance, atol=tolerance, equal_nan=True)


# Rates


@given(detections, st.integers(1, 3))
def test_group_rates_are_means_over_the_rows_that_count(row: Rows, columns: int) -> None:
    counted = [y == 1 for y in row.labels]
    scores = floats(row.probs).unsqueeze(1) + torch.arange(columns).double()
    mask = torch.tensor(counted, dtype=torch.bool).unsqueeze(1).expand(-1, columns)
    rates, counts = group_rates(scores, mask, ints(row.members), row.num_groups)
    assert rates.shape == counts.shape == (row.num_groups, columns)
    wanted = naive_rates(row.probs, counted, row.members, row.num_groups)
    for group in range(row.num_groups):
        own = sum(c and m == group for c, m in zip(counted, row.members, strict=True))
        assert counts[group].tolist() == [own] * columns
        value = wanted.get(group, math.nan)
        assert close(rates[group], [value + column for column in range(columns)])


def test_group_rates_weigh_rows_and_take_one_column_without_its_axis() -> None:
    scores, members = torch.tensor([0.2, 0.8, 0.5]), torch.tensor([0, 0, 1])
    rates, counts = group_rates(scores, torch.tensor([3.0, 1.0, 0.0]), members, 2)
    assert rates.shape == (2, 1)
    assert rates[0].item() == pytest.approx(0.35)
    assert math.isnan(rates[1].item())
    assert counts.flatten().tolist() == [4, 0]


def test_group_rates_gradient_is_finite_beside_empty_groups_and_bad_scores() -> None:
    scores = torch.tensor([0.2, 0.8, math.nan], requires_grad=True)
    rates, _ = group_rates(scores, torch.tensor([True, True, False]), torch.tensor([0, 0, 1]), 3)
    rates[0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [0.5, 0.5, 0]


# Gaps


@given(detections, betas)
def test_aeod_is_the_loop(row: Rows, beta: float) -> None:
    wanted = naive_aeod(row, beta)
    for labels in (floats(row.labels), ints(row.labels), ints(row.labels, -100).to(torch.int16)):
        found = aeod(floats(row.probs), labels, ints(row.members), row.num_groups, beta)
        assert found.shape == ()
        assert close(found, wanted)
    symmetric = aeod(floats(row.probs), floats(row.labels), ints(row.members), row.num_groups, beta, asymmetric=False)
    assert close(symmetric, wanted)


@given(classifications, betas)
def test_caeod_is_the_loop(row: Rows, beta: float) -> None:
    probs, wanted = floats(row.probs).view(-1, CLASSES), naive_caeod(row, beta)
    for labels in (floats(row.labels), ints(row.labels), ints(row.labels, -100).to(torch.int32)):
        found = caeod(probs, labels, ints(row.members), row.num_groups, beta)
        assert found.shape == (CLASSES,)
        assert close(found, wanted)
    symmetric = caeod(probs, floats(row.labels), ints(row.members), row.num_groups, beta, asymmetric=False)
    assert close(symmetric, wanted)


@given(regressions, st.sampled_from(["mse", "mae", "huber"]))
def test_aep_is_the_loop(row: Rows, loss: Any) -> None:
    arguments = (floats(row.probs), floats(row.labels), ints(row.members), row.num_groups, loss)
    wanted = naive_aep(row, loss)
    assert aep(*arguments).shape == ()
    assert close(aep(*arguments), wanted)
    assert close(aep(*arguments, asymmetric=False), wanted)


def test_booleans_are_labels() -> None:
    probs, members = torch.tensor([0.9, 0.5, 0.1, 0.4]), torch.tensor([0, 1, 0, 1])
    labels = torch.tensor([True, True, False, False])
    assert aeod(probs, labels, members, 2).item() == pytest.approx((0.4**2 + 0.3**2) / 2)
    both = torch.stack((1 - probs, probs), dim=1)
    assert torch.allclose(caeod(both, labels, members, 2), caeod(both, labels.long(), members, 2))


def test_integers_of_a_regression_are_values_even_below_zero() -> None:
    predictions, labels = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([-1, -3, 2])
    assert aep(predictions, labels, torch.tensor([0, 1, 1]), 2).item() == pytest.approx((6.5 - 1) ** 2)


@pytest.mark.parametrize(("beta", "wanted"), [(1.0, 0.08), (0.0, 0.16), (3.0, 0.04)])
def test_a_side_with_one_group_adds_nothing_and_keeps_the_shares(beta: float, wanted: float) -> None:
    probs, members = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0, 1, 0])
    assert aeod(probs, torch.tensor([1, 1, 0]), members, 2, beta).item() == pytest.approx(wanted)


def test_without_a_measured_side_a_gap_is_not_a_number() -> None:
    probs, members = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([0, 0, 1])
    assert aeod(probs, torch.tensor([1, 1, 0]), members, 2).isnan()
    # Only false positives are measured, and beta=0 leaves those out.
    negatives = torch.tensor([0, 0, 0])
    assert not aeod(probs, negatives, members, 2).isnan()
    assert aeod(probs, negatives, members, 2, beta=0).isnan()
    both = torch.stack((1 - probs, probs), dim=1)
    assert caeod(both, negatives, members, 2, beta=0).isnan().tolist() == [False, True]
    assert aep(probs, torch.tensor([1.0, 2.0, math.nan]), members, 2).isnan()
    assert aep(probs[:0], torch.empty(0), members[:0], 2).isnan()


# Gradients


def best_and_worst(scores: list[float], counted: list[bool], row: Rows, worse: int) -> tuple[list[int], list[int]]:
    """The rows of the best and of the worst group of one side."""
    rates = naive_rates(scores, counted, row.members, row.num_groups)
    best, worst = min(rates, key=lambda g: worse * rates[g]), max(rates, key=lambda g: worse * rates[g])
    found = [
        [i for i, (c, m) in enumerate(zip(counted, row.members, strict=True)) if c and m == group]
        for group in (best, worst)
    ]
    return found[0], found[1]


def apart(scores: list[float], counted: list[bool], row: Rows) -> bool:
    """Whether the gap is there and no two groups are level, so that best and worst are clear."""
    rates = sorted(naive_rates(scores, counted, row.members, row.num_groups).values())
    return len(rates) >= 2 and all(high - low > 1e-6 for low, high in pairwise(rates))


def check_sides(gradient: Tensor, best: list[int], worst: list[int], sign: int, *, asymmetric: bool) -> None:
    touched = [i for i, value in enumerate(gradient.tolist()) if value != 0]
    assert touched == sorted(worst if asymmetric else best + worst)
    # Descent pulls the worst group to the best one, and the best, where it is touched at all, the other way.
    assert bool((sign * gradient[worst] > 0).all())
    if not asymmetric:
        assert bool((sign * gradient[best] < 0).all())
        assert float(gradient.sum()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("asymmetric", [True, False])
@given(full_detections)
def test_one_sided_the_best_group_is_left_alone(asymmetric: bool, row: Rows) -> None:
    positive, negative = [y == 1 for y in row.labels], [y == 0 for y in row.labels]
    assume(apart(row.probs, positive, row) and apart(row.probs, negative, row))
    probs = floats(row.probs).requires_grad_()
    labels, members = floats(row.labels), ints(row.members)
    (eo,) = torch.autograd.grad(aeod(probs, labels, members, row.num_groups, 0, asymmetric=asymmetric), probs)
    check_sides(eo, *best_and_worst(row.probs, positive, row, -1), -1, asymmetric=asymmetric)
    (eod,) = torch.autograd.grad(aeod(probs, labels, members, row.num_groups, 1, asymmetric=asymmetric), probs)
    check_sides(2 * eod - eo, *best_and_worst(row.probs, negative, row, +1), +1, asymmetric=asymmetric)


@pytest.mark.parametrize("asymmetric", [True, False])
@given(full_classifications)
def test_one_sided_the_best_group_of_a_class_is_left_alone(asymmetric: bool, row: Rows) -> None:
    probs = floats(row.probs).view(-1, CLASSES).requires_grad_()
    psi = caeod(probs, ints(row.labels), ints(row.members), row.num_groups, 0, asymmetric=asymmetric)
    for k in range(CLASSES):
        counted, scores = [y == k for y in row.labels], row.probs[k::CLASSES]
        assume(apart(scores, counted, row))
        (gradient,) = torch.autograd.grad(psi[k], probs, retain_graph=True)
        assert not gradient[:, [other for other in range(CLASSES) if other != k]].any()
        check_sides(gradient[:, k], *best_and_worst(scores, counted, row, -1), -1, asymmetric=asymmetric)


@pytest.mark.parametrize("asymmetric", [True, False])
@given(full_regressions)
def test_one_sided_the_group_with_the_least_error_is_left_alone(asymmetric: bool, row: Rows) -> None:
    # All predictions lie above their labels, so that more is worse in every row.
    predictions = row.probs
    above = row._replace(labels=[None if y is None else 0.0 for y in row.labels])
    errors, counted = [p * p for p in predictions], [y is not None for y in row.labels]
    assume(apart(errors, counted, above))
    leaf = floats(predictions).requires_grad_()
    psi = aep(leaf, floats(above.labels), ints(row.members), row.num_groups, asymmetric=asymmetric)
    (gradient,) = torch.autograd.grad(psi, leaf)
    per_error = gradient / (2 * leaf.detach())
    check_sides(per_error, *best_and_worst(errors, counted, above, +1), +1, asymmetric=asymmetric)


def test_symmetric_gradients_are_derivatives() -> None:
    generator = torch.Generator().manual_seed(2)
    members, labels = torch.arange(24) % 3, (torch.arange(24) // 3) % 3
    scores = torch.rand(24, generator=generator, dtype=torch.float64).requires_grad_()
    columns = torch.rand(24, 3, generator=generator, dtype=torch.float64).requires_grad_()
    values = torch.randn(24, generator=generator, dtype=torch.float64)

    def odds(probs: Tensor) -> Tensor:
        return aeod(probs, labels % 2, members, 3, 0.5, asymmetric=False)

    def classes(probs: Tensor) -> Tensor:
        return caeod(probs, labels, members, 3, 0.5, asymmetric=False)

    assert torch.autograd.gradcheck(odds, (scores,))
    assert torch.autograd.gradcheck(classes, (columns,))
    for loss in ("mse", "mae", "huber"):

        def errors(predictions: Tensor, loss: Any = loss) -> Tensor:
            return aep(3 * predictions, values, members, 3, loss, asymmetric=False)

        assert torch.autograd.gradcheck(errors, (scores,))


# What must not matter


def all_gaps(row: Rows, order: list[int] | None = None, rename: list[int] | None = None, groups: int = 0) -> Tensor:
    """The three gaps of one set of scores, rows reordered and groups renamed."""
    index = torch.tensor(order if order is not None else range(len(row.labels)), dtype=torch.long)
    names = torch.tensor([*(rename or range(row.num_groups)), -1])
    members = names[ints(row.members)][index]
    labels = ints(row.labels)[index]
    probs = floats(row.probs).view(-1, CLASSES)[index]
    count = groups or row.num_groups
    one = aeod(probs[:, 0], torch.where(labels < 0, labels, labels.clamp(max=1)), members, count)
    numbers = torch.where(labels < 0, torch.nan, labels.double())
    classes, error = caeod(probs, labels, members, count), aep(probs[:, 1], numbers, members, count)
    return torch.cat((one.view(1), classes, error.view(1)))


@given(classifications, st.data())
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(row: Rows, draw: st.DataObject) -> None:
    plain = all_gaps(row)
    order = draw.draw(st.permutations(range(len(row.labels))))
    rename = draw.draw(st.permutations(range(row.num_groups)))
    assert close(all_gaps(row, order), plain)
    assert close(all_gaps(row, rename=rename), plain)
    assert close(all_gaps(row, groups=row.num_groups + 3), plain)  # groups without anyone


@given(detections, st.data())
def test_renamed_groups_have_each_others_rates(row: Rows, draw: st.DataObject) -> None:
    rename = draw.draw(st.permutations(range(row.num_groups)))
    mask = torch.tensor([y is not None for y in row.labels], dtype=torch.bool)
    plain = group_rates(floats(row.probs), mask, ints(row.members), row.num_groups)
    members = torch.tensor([*rename, -1])[ints(row.members)]
    renamed = group_rates(floats(row.probs), mask, members, row.num_groups)
    for before, after in zip(plain, renamed, strict=True):
        assert close(after[rename], before.double())


@given(classifications, st.lists(st.booleans(), min_size=1, max_size=4))
def test_unlabelled_rows_and_unknown_members_add_nothing(row: Rows, unlabelled: list[bool]) -> None:
    more = Rows(
        [*row.probs, *[0.999, 0.001, 0.5] * len(unlabelled)],
        [*row.labels, *[None if gone else 1.0 for gone in unlabelled]],
        [*row.members, *[0 if gone else -1 for gone in unlabelled]],
        row.num_groups,
    )
    assert close(all_gaps(more), all_gaps(row))


# Dtypes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_floating_dtype_is_kept(dtype: torch.dtype) -> None:
    tolerance = 4 * torch.finfo(dtype).eps
    probs = torch.tensor([0.875, 0.5, 0.125, 0.25, 0.75, 0.5], dtype=dtype, requires_grad=True)
    both = torch.stack((1 - probs, probs), dim=1)
    members = torch.tensor([0, 1, 0, 1, -1, 1], dtype=torch.int32)
    for label_dtype in (torch.float32, dtype):
        labels = torch.tensor([1, 1, 0, 0, 1, math.nan], dtype=label_dtype)
        gaps = [
            (aeod(probs, labels, members, 2), (0.375**2 + 0.125**2) / 2),
            (caeod(both, labels, members, 2)[1], (0.375**2 + 0.125**2) / 2),
            (aep(probs, labels, members, 2), (0.15625 - 0.015625) ** 2),
        ]
        for found, wanted in gaps:
            assert found.dtype == dtype
            assert float(found.detach()) == pytest.approx(wanted, rel=tolerance)
            (gradient,) = torch.autograd.grad(found, probs, retain_graph=True)
            assert gradient.dtype == dtype
            assert bool(gradient.isfinite().all())
            assert bool(gradient.any())
    rates, counts = group_rates(probs, labels == labels, members, 2)
    assert rates.dtype == counts.dtype == dtype
    assert rates.flatten().tolist() == [0.5, 0.375]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_does_not_lose_large_groups(dtype: torch.dtype) -> None:
    """Sums and counts pass what the dtype can hold; rates do not."""
    size = 80_000
    members = torch.arange(2 * size) % 2
    scores = torch.where(members == 0, 0.25, 0.75).to(dtype)
    rates, _ = group_rates(scores, torch.ones_like(scores), members, 2)
    assert rates.flatten().tolist() == [0.25, 0.75]
    assert aeod(scores, torch.ones(2 * size), members, 2, beta=0).item() == 0.25
    assert aep(8 * scores, torch.zeros(2 * size), members, 2).item() == 32**2


# Mistakes

ROW = torch.tensor([0.1, 0.2, 0.3])
YES = torch.tensor([0, 1, 1])
WHO = torch.tensor([0, 1, -1])
MISTAKES: list[tuple[str, Callable[[], Any]]] = [
    (r"scores: met .*\(3,\).*int64", lambda: group_rates(YES, YES, WHO, 2)),
    (r"scores: met .*\(3, 1, 1\)", lambda: group_rates(ROW.view(3, 1, 1), YES, WHO, 2)),
    (r"scores: met .*0\.1", lambda: group_rates([0.1], YES, WHO, 2)),  # type: ignore[arg-type]
    (r"mask: met .*\(2,\)", lambda: group_rates(ROW, YES[:2], WHO, 2)),
    (r"members: met .*\(2,\)", lambda: group_rates(ROW, YES, WHO[:2], 2)),
    (r"members: met .*\(3,\).*float32", lambda: group_rates(ROW, YES, WHO.float(), 2)),
    (r"members: met group number 2, expected 0 to 1", lambda: group_rates(ROW, YES, WHO + 1, 2)),
    (r"members: met group number -3", lambda: group_rates(ROW, YES, WHO - 2, 2)),
    (r"num_groups: met 0", lambda: group_rates(ROW, YES, WHO, 0)),
    (r"num_groups: met 2.0", lambda: aeod(ROW, YES, WHO, 2.0)),  # type: ignore[arg-type]
    (r"probs: met .*\(3, 1\)", lambda: aeod(ROW.unsqueeze(1), YES, WHO, 2)),
    (r"probs: met .*\(3,\).*int64", lambda: aeod(YES, YES, WHO, 2)),
    (r"labels: met .*\(2,\)", lambda: aeod(ROW, YES[:2], WHO, 2)),
    (r"labels: met .*1, 0, 1", lambda: aeod(ROW, [1, 0, 1], WHO, 2)),  # type: ignore[arg-type]
    (r"labels: met 2, expected 0, 1 or missing", lambda: aeod(ROW, YES + 1, WHO, 2)),
    (r"labels: met 0.5, expected 0, 1 or missing", lambda: aeod(ROW, YES / 2, WHO, 2)),
    (r"labels: met inf", lambda: aeod(ROW, YES / 0, WHO, 2)),
    (r"members: met group number 2", lambda: aeod(ROW, YES, WHO + 1, 2)),
    (r"beta: met -1", lambda: aeod(ROW, YES, WHO, 2, -1)),
    (r"beta: met nan", lambda: caeod(ROW.unsqueeze(1), YES * 0, WHO, 2, math.nan)),
    (r"probs: met .*\(3,\)", lambda: caeod(ROW, YES, WHO, 2)),
    (r"labels: met 1, expected a class number from 0 to 0", lambda: caeod(ROW.unsqueeze(1), YES, WHO, 2)),
    (r"labels: met 0.5, expected a class number", lambda: caeod(ROW.expand(3, 3), YES / 2, WHO, 2)),
    (r"labels: met -1, expected a class number", lambda: caeod(ROW.expand(3, 3), -YES.float(), WHO, 2)),
    (r"predictions: met .*\(3, 1\)", lambda: aep(ROW.unsqueeze(1), ROW, WHO, 2)),
    (r"labels: met .*\(3, 1\)", lambda: aep(ROW, ROW.unsqueeze(1), WHO, 2)),
    (r"labels: met inf, expected a finite number", lambda: aep(ROW, ROW / 0, WHO, 2)),
    (r"loss: met 'rmse'", lambda: aep(ROW, ROW, WHO, 2, "rmse")),  # type: ignore[arg-type]
    (r"members: met group number 2", lambda: aep(ROW, ROW, WHO + 1, 2)),
]


@pytest.mark.parametrize(("message", "mistake"), MISTAKES, ids=[message for message, _ in MISTAKES])
def test_a_mistake_is_named(message: str, mistake: Callable[[], Any]) -> None:
    with pytest.raises(FairMTError, match=message):
        mistake()
