"""Whatever may be missing: labels, tasks, groups, attributes, rows, everything."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fairmt
from tests.core.models import (
    Model,
    Problem,
    assert_same_state,
    criterion_for,
    gradients,
    loss_of,
    model_for,
    problem,
    state_of,
)

BATCHES = [problem(seed=seed) for seed in range(4)]
BATCH = BATCHES[-1]
HEADS = pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
GEOMETRIES = pytest.mark.parametrize(
    ("linear", "geometry"),
    [
        (linear, geometry)
        for linear in (True, False)
        for geometry in ("sample", "mean", "feature", "full")
        if linear or geometry != "mean"
    ],
)


def warm(linear: bool = True, **options: Any) -> tuple[Model, fairmt.FairMT]:
    """A model and a criterion after three steps, so that there is a memory and a multiplier."""
    model = model_for(BATCH, linear=linear)
    criterion = criterion_for(BATCH, model, **{"eta_step": 0.05, **options})
    for batch in BATCHES[:3]:
        loss_of(criterion, model, batch).backward()
    model.zero_grad()
    assert float(criterion.eta) > 0
    return model, criterion


def outcome(
    batch: Problem, *, linear: bool = True, change: Callable[[Problem], Problem] = lambda x: x, **options: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Value, gradients and state after a step on a batch."""
    model, criterion = warm(linear, **options)
    loss = loss_of(criterion, model, change(batch))
    loss.backward()
    return loss.detach(), gradients(model), state_of(criterion)


def assert_same_outcome(one: Any, other: Any, tolerance: float = 1e-10) -> None:
    """Of value, gradients and state, or of some of them."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(tensors_of(a), tensors_of(b), rtol=tolerance, atol=tolerance / 100)


def tensors_of(value: Any) -> Any:
    return {name: v for name, v in value.items() if isinstance(v, Tensor)} if isinstance(value, dict) else value


@GEOMETRIES
@pytest.mark.parametrize("how", ["marked", "none", "no rows"])
def test_a_batch_without_a_label_does_nothing(how, linear, geometry):
    model, criterion = warm(linear, geometry=geometry, max_utility_loss=0.5)
    before = state_of(criterion)
    if how == "marked":
        loss = loss_of(criterion, model, BATCH.unlabelled())
    elif how == "none":
        loss = criterion(*model(BATCH.inputs), dict.fromkeys(BATCH.labels), BATCH.members)
    else:
        loss = loss_of(criterion, model, BATCH.rows(slice(0)))
    assert loss.shape == ()
    assert float(loss.detach()) == 0
    loss.backward()
    assert all(not gradient.any() for gradient in gradients(model).values())
    assert_same_state(tensors_of(criterion.state_dict()), tensors_of(before))
    assert criterion.last is not None
    assert criterion.last.active == ()
    assert criterion.last.losses == {}
    assert all(float(value) == 0 for value in criterion.last.alpha.values())


@GEOMETRIES
def test_the_first_batch_may_have_no_label(linear, geometry):
    model = model_for(BATCH, linear=linear)
    criterion = criterion_for(BATCH, model, geometry=geometry)
    loss_of(criterion, model, BATCH.unlabelled()).backward()
    assert all(not gradient.any() for gradient in gradients(model).values())
    assert criterion.last is not None
    assert criterion.last.psi == {}
    assert criterion.kkt().above == ()
    model.zero_grad()
    fresh = criterion_for(BATCH, model, geometry=geometry)
    loss, expected = loss_of(criterion, model, BATCH), loss_of(fresh, model, BATCH)
    assert torch.equal(loss, expected)


@GEOMETRIES
@pytest.mark.parametrize("name", ["ill", "traits", "health", "pressure"])
def test_a_task_without_a_label_takes_no_part(name, linear, geometry):
    model, criterion = warm(linear, geometry=geometry)
    labels: dict[str, Any] = {**BATCH.labels, name: None}
    loss = criterion(*model(BATCH.inputs), labels, BATCH.members)
    loss.backward()
    last = criterion.last
    assert last is not None
    gone = {"traits/tall", "traits/calm"} if name == "traits" else {name}
    for task, alpha in last.alpha.items():
        assert (task in gone) == (task not in last.active) == (task not in last.losses), task
        if task in gone:
            assert float(alpha) == 0
    assert float(sum(last.alpha.values())) == pytest.approx(1)
    assert min(float(alpha) for alpha in last.alpha.values()) >= 0
    assert torch.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    for parameter in model.heads[name].parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any(), "no label, and no member in the batch: nothing pulls"


def test_a_missing_task_leaves_the_others_as_they_are_without_it():
    """Min-norm over the active tasks: an empty one takes no weight from them."""
    three = replace(
        BATCH,
        tasks={name: task for name, task in BATCH.tasks.items() if name != "ill"},
        labels={name: y for name, y in BATCH.labels.items() if name != "ill"},
    )
    model = model_for(BATCH)
    fewer = model_for(three)
    fewer.load_state_dict({name: v for name, v in model.state_dict().items() if "ill" not in name})
    one, other = criterion_for(BATCH, model), criterion_for(three, fewer)
    loss_of(one, model, BATCH.relabelled(ill=torch.full((len(BATCH),), torch.nan))).backward()
    loss_of(other, fewer, three).backward()
    assert one.last is not None
    assert other.last is not None
    for name, alpha in other.last.alpha.items():
        assert float(one.last.alpha[name]) == pytest.approx(float(alpha), abs=1e-9)
    for name, gradient in gradients(fewer).items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, gradient, rtol=1e-9, atol=1e-12)


@HEADS
def test_none_is_a_whole_batch_of_missing(linear):
    """For labels and for members alike."""
    absent = torch.full((len(BATCH),), torch.nan, dtype=torch.double)
    unknown = torch.full((len(BATCH),), -1)
    found = []
    for label, member in ((absent, unknown), (None, None)):
        model, criterion = warm(linear)
        labels: dict[str, Any] = {**BATCH.labels, "ill": label}
        members: dict[str, Any] = {**BATCH.members, "race": member}
        loss = criterion(*model(BATCH.inputs), labels, members)
        loss.backward()
        found.append((loss.detach(), gradients(model), state_of(criterion)))
    assert_same_outcome(found[1], found[0])


def test_without_any_member_only_the_tasks_are_trained():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model)
    unknown = {name: torch.full_like(m, -1) for name, m in BATCH.members.items()}
    for _ in range(3):
        model.zero_grad()
        loss_of(criterion, model, replace(BATCH, members=unknown)).backward()
    assert float(criterion.eta) == 0
    assert criterion.last is not None
    assert criterion.last.psi == {}
    assert float(criterion.last.phi) == 0
    plain = sum(criterion.last.losses.values())
    features, logits = model(BATCH.inputs)
    present = ~BATCH.labels["pressure"].isnan()
    loss = (logits["pressure"][present, 0] - BATCH.labels["pressure"][present]).square().mean()
    (expected,) = torch.autograd.grad(loss, model.heads["pressure"].weight)  # type: ignore[arg-type]
    torch.testing.assert_close(model.heads["pressure"].weight.grad, expected)
    assert math.isfinite(float(plain))
    assert features.shape[0] == len(BATCH)


def test_the_multiplier_rests_while_nothing_is_measured():
    """An unmeasured gap is not a gap of 0: the multiplier neither rises nor falls."""
    model, criterion = warm(memory=1)
    before = float(criterion.eta)
    unknown = {name: torch.full_like(m, -1) for name, m in BATCH.members.items()}
    loss_of(criterion, model, replace(BATCH, members=unknown))
    assert float(criterion.eta) == before > 0


def test_a_group_that_was_never_seen_is_never_measured():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model)
    for batch in BATCHES * 2:
        seen = torch.where(batch.members["gender"] == 1, -1, batch.members["gender"])
        loss_of(criterion, model, replace(batch, members={**batch.members, "gender": seen}))
        assert criterion.last is not None
        assert not [name for name in criterion.last.psi if name.startswith("gender/")]
        assert [name for name in criterion.last.psi if name.startswith("race/")]
        groups = {group for entry in criterion.kkt().above for group in (entry.worst_group, entry.best_group)}
        assert groups <= {0, 1, 2}


@pytest.mark.parametrize("memory", [1, 2, 5, 20])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_group_stays_measured_until_less_than_a_row_of_it_is_remembered(rows, memory):
    """n rows last seen k batches ago count for n(1 − 1/m)^k."""
    tasks = {"ill": fairmt.Detection()}
    criterion = fairmt.FairMT(tasks, {"gender": 2}, memory=memory, weighting="uniform", disparities={}, beta=0)
    members = torch.tensor([0] * 4 + [1] * rows)
    logits = torch.randn(len(members), 1, requires_grad=True)
    labels = {"ill": torch.ones(len(members))}
    features = torch.zeros(len(members), 2)

    def measured(seen: Tensor) -> bool:
        criterion(features, {"ill": logits}, labels, {"gender": seen})
        assert criterion.last is not None
        return "gender/ill" in criterion.last.psi

    assert measured(members)
    lasts = 0
    while measured(torch.where(members == 1, -1, members)):
        lasts += 1
        assert lasts < 100
    expected = 0
    while rows * (1 - 1 / memory) ** (expected + 1) >= 1:
        expected += 1
    assert lasts == expected


def test_a_remembered_rate_is_the_decayed_mean():
    """By hand: sums of scores and of rows both decay, and a group that is absent keeps its rate."""
    criterion = fairmt.FairMT({"ill": fairmt.Detection()}, {"gender": 2}, memory=4, weighting="uniform", beta=0)
    draw = torch.Generator().manual_seed(0)
    sums, counts = torch.zeros(2, dtype=torch.double), torch.zeros(2, dtype=torch.double)
    for step in range(6):
        logits = torch.randn(8, 1, generator=draw, dtype=torch.double).requires_grad_()
        members = torch.randint(0, 2, (8,), generator=draw) if step < 4 else torch.zeros(8, dtype=torch.long)
        labels = torch.randint(0, 2, (8,), generator=draw)
        features = torch.zeros(8, 2, dtype=torch.double)
        criterion(features, {"ill": logits}, {"ill": labels}, {"gender": members})
        scores = torch.sigmoid(logits.detach()[:, 0] / 0.5)
        for group in (0, 1):
            rows = (members == group) & (labels == 1)
            sums[group] = 0.75 * sums[group] + scores[rows].sum()
            counts[group] = 0.75 * counts[group] + rows.sum()
        assert criterion.last is not None
        if (counts >= 1).all():
            gap = (sums / counts).diff()
            torch.testing.assert_close(criterion.last.psi["gender/ill"], gap.square()[0])
    assert step == 5
    assert (counts >= 1).all()


def test_an_absent_group_keeps_its_gap_and_takes_no_pull():
    model, criterion = warm()
    one = replace(BATCH, members={name: torch.zeros_like(m) for name, m in BATCH.members.items()})
    loss_of(criterion, model, one).backward()
    assert criterion.last is not None
    assert float(criterion.last.psi["gender/ill"]) > 0
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@HEADS
@pytest.mark.parametrize("size", [1, 2])
def test_a_row_or_two_are_a_batch(size, linear):
    for start in range(6):
        model, criterion = warm(linear)
        loss = loss_of(criterion, model, BATCH.rows(slice(start, start + size)))
        loss.backward()
        assert torch.isfinite(loss)
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@GEOMETRIES
def test_one_row_may_be_the_first_batch(linear, geometry):
    model = model_for(BATCH, linear=linear)
    criterion = criterion_for(BATCH, model, geometry=geometry)
    loss = loss_of(criterion, model, BATCH.rows(slice(1)))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@GEOMETRIES
def test_rows_without_any_label_change_nothing(linear, geometry):
    """But for the mean geometry's B, which counts them."""
    longer = problem(40, seed=3).unlabelled(slice(24, None))
    shorter = longer.rows(slice(24))
    options: dict[str, Any] = {"geometry": geometry}
    if geometry == "mean":
        options["gradient_norm"] = "l2"  # a common factor of all gradients cancels there
    assert_same_outcome(outcome(longer, linear=linear, **options)[1:], outcome(shorter, linear=linear, **options)[1:])


@GEOMETRIES
def test_a_weight_of_0_is_an_absent_row(linear, geometry):
    """Of whatever label and group; geometry "mean" counts rows, see above."""
    longer = problem(40, seed=3)
    weight = torch.where(torch.arange(40) < 24, 1.0, 0.0).double()
    options: dict[str, Any] = {"geometry": geometry, "max_utility_loss": 0.5}
    if geometry == "mean":
        options["gradient_norm"] = "l2"
    assert_same_outcome(
        outcome(replace(longer, sample_weight=weight), linear=linear, **options),
        outcome(longer.rows(slice(24)), linear=linear, **options),
    )


@HEADS
def test_weights_of_1_are_no_weights(linear):
    ones = replace(BATCH, sample_weight=torch.ones(len(BATCH), dtype=torch.long))
    assert_same_outcome(outcome(ones, linear=linear), outcome(BATCH, linear=linear))


@HEADS
@pytest.mark.parametrize("factor", [1e-6, 3.0, 1e6])
def test_the_scale_of_the_weights_does_not_matter(factor, linear):
    """To the value and the gradients of a first step; later ones remember batches by their weight."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.rand(len(BATCH), generator=draw, dtype=torch.double)
    found = []
    for scale in (1.0, factor):
        model = model_for(BATCH, linear=linear)
        criterion = criterion_for(BATCH, model)
        batch = replace(BATCH, sample_weight=scale * weight)
        loss = loss_of(criterion, model, batch)
        loss.backward()
        assert criterion.last is not None
        found.append((loss.detach(), gradients(model), criterion.last.psi, criterion.eta.clone()))
    assert_same_outcome(found[1], found[0], 1e-8)


def test_a_weight_of_2_is_a_row_twice():
    """In losses and gaps; what counts as measured counts rows."""
    twice = torch.cat((torch.arange(24), torch.arange(8)))
    weight = torch.where(torch.arange(24) < 8, 2.0, 1.0).double()
    found = []
    for batch in (replace(BATCH, sample_weight=weight), BATCH.rows(twice)):
        model = model_for(BATCH)
        criterion = criterion_for(BATCH, model, weighting="uniform")
        loss_of(criterion, model, batch).backward()
        assert criterion.last is not None
        found.append((criterion.last.losses, criterion.last.psi, gradients(model)))
    assert_same_outcome(found[1], found[0])


def test_weights_of_0_alone_are_a_batch_without_labels():
    model, criterion = warm()
    before = state_of(criterion)
    zero = replace(BATCH, sample_weight=torch.zeros(len(BATCH)))
    loss = loss_of(criterion, model, zero)
    loss.backward()
    assert float(loss.detach()) == 0
    assert all(not gradient.any() for gradient in gradients(model).values())
    assert torch.equal(criterion.eta, before["strength.eta"])


def as_integers(y: Tensor, dtype: torch.dtype, mark: int = -1) -> Tensor:
    return torch.where(y == y, y, mark).to(dtype)


@HEADS
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_integers_say_missing_by_a_negative_number(dtype, linear):
    """One head's labels may be integers while another's of its kind are floats."""
    ill = as_integers(BATCH.labels["ill"], dtype, -7)
    health = BATCH.labels["health"].clamp(min=-1).to(dtype)
    assert_same_outcome(
        outcome(BATCH, linear=linear, change=lambda b: b.relabelled(ill=ill, health=health)),
        outcome(BATCH, linear=linear),
    )


def test_all_heads_of_a_kind_may_be_integers():
    ill, traits = (as_integers(BATCH.labels[name], torch.int64) for name in ("ill", "traits"))
    assert_same_outcome(outcome(BATCH, change=lambda b: b.relabelled(ill=ill, traits=traits)), outcome(BATCH))


def test_floats_say_missing_by_nan_for_classes_too():
    health = torch.where(BATCH.labels["health"] < 0, torch.nan, BATCH.labels["health"].double())
    assert_same_outcome(outcome(BATCH, change=lambda b: b.relabelled(health=health)), outcome(BATCH))


def test_classes_may_be_floats_in_one_head_and_integers_in_another():
    both = {"health": fairmt.Classification(3), "mood": fairmt.Classification(4)}
    mood = torch.arange(len(BATCH)) % 5 - 1
    found = []
    for label in (mood, torch.where(mood < 0, torch.nan, mood.double())):
        batch = replace(BATCH, tasks={**BATCH.tasks, **both}, labels={**BATCH.labels, "mood": label})
        model = model_for(batch)
        criterion = criterion_for(batch, model)
        loss = loss_of(criterion, model, batch)
        loss.backward()
        found.append((loss.detach(), gradients(model), state_of(criterion)))
    assert_same_outcome(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_labels_that_can_t_be_negative_are_all_there(dtype):
    ill = BATCH.labels["ill"].nan_to_num()
    assert_same_outcome(
        outcome(BATCH, change=lambda b: b.relabelled(ill=ill.to(dtype))),
        outcome(BATCH, change=lambda b: b.relabelled(ill=ill)),
    )


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_labels_are_read_or_refused(dtype):
    ill = BATCH.labels["ill"].nan_to_num()
    expected = outcome(BATCH, change=lambda b: b.relabelled(ill=ill))
    with suppress(fairmt.FairMTError):
        assert_same_outcome(outcome(BATCH, change=lambda b: b.relabelled(ill=ill.to(dtype))), expected)


def test_a_regression_s_integers_may_be_negative():
    pressure = (BATCH.labels["pressure"].nan_to_num() - 3).round()
    assert_same_outcome(
        outcome(BATCH, change=lambda b: b.relabelled(pressure=pressure.long())),
        outcome(BATCH, change=lambda b: b.relabelled(pressure=pressure)),
    )


def test_a_column_may_have_a_dimension_of_its_own():
    labels = {name: y.reshape(len(BATCH), -1) for name, y in BATCH.labels.items()}
    members = {name: m.unsqueeze(1).int() for name, m in BATCH.members.items()}
    model, criterion = warm()
    features, logits = model(BATCH.inputs)
    logits = {name: z.squeeze(1) if z.shape[1] == 1 else z for name, z in logits.items()}
    loss = criterion(features, logits, labels, members)
    loss.backward()
    assert_same_outcome((loss.detach(), gradients(model), state_of(criterion)), outcome(BATCH))


def test_members_may_be_of_any_integer_dtype():
    members = {"gender": BATCH.members["gender"] == 1, "race": BATCH.members["race"].to(torch.int8)}
    assert_same_outcome(outcome(BATCH, change=lambda b: replace(b, members=members)), outcome(BATCH))


@GEOMETRIES
def test_frozen_features_train_the_heads(linear, geometry):
    """As a linear probe: the heads' gradients are those of the whole model."""
    options: dict[str, Any] = {"geometry": geometry}
    whole = outcome(BATCH, linear=linear, **options)[1]
    model, criterion = warm(linear, **options)
    features = model.encoder(BATCH.inputs).detach()
    logits = {name: head(features) for name, head in model.heads.items()}
    criterion(features, logits, BATCH.labels, BATCH.members).backward()
    for name, parameter in model.named_parameters():
        if name.startswith("heads"):
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-10, atol=1e-12)
        else:
            assert parameter.grad is None
    assert criterion.last is not None
    assert float(sum(criterion.last.alpha.values())) == pytest.approx(1)


@HEADS
def test_a_frozen_head_trains_the_encoder(linear):
    reference = outcome(BATCH, linear=linear)[1]
    model, criterion = warm(linear)
    model.heads["ill"].requires_grad_(False)
    loss_of(criterion, model, BATCH).backward()
    for name, parameter in model.named_parameters():
        if name.startswith("heads.ill"):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, reference[name], rtol=1e-10, atol=1e-12)


def test_without_heads_the_gradients_are_the_same():
    found = []
    for given in (True, False):
        model = model_for(BATCH)
        criterion = fairmt.FairMT(BATCH.tasks, BATCH.groups, model.heads if given else None, eta_step=0.1)
        for batch in BATCHES:
            model.zero_grad()
            loss = loss_of(criterion, model, batch)
            loss.backward()
        found.append((loss.detach(), gradients(model), state_of(criterion)))
    assert_same_outcome(found[1], found[0], 1e-8)


def test_the_arguments_are_left_as_they_are():
    model, criterion = warm()
    batch = copy.deepcopy(replace(BATCH, sample_weight=torch.ones(len(BATCH))))
    features, logits = model(batch.inputs)
    kept = {name: z.detach().clone() for name, z in logits.items()}
    criterion(features, logits, batch.labels, batch.members, batch.sample_weight).backward()
    torch.testing.assert_close({name: z.detach() for name, z in logits.items()}, kept, rtol=0, atol=0)
    torch.testing.assert_close(batch.labels, BATCH.labels, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.members, BATCH.members, rtol=0, atol=0)
