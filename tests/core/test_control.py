"""What controls a run: the multiplier, its budget, the certificate, and what happens to steps that are not sound."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fairmt
from fairmt import Classification, Detection, FairMTError, Regression, functional
from fairmt.multiplier import DualAscent, FixedStrength, UtilityBudget
from tests.core.models import (
    Model,
    assert_same_state,
    criterion_for,
    gradients,
    loss_of,
    model_for,
    problem,
    state_of,
)

BATCHES = [problem(seed=seed) for seed in range(6)]
BATCH = BATCHES[0]
HEADS = pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])


def last_of(criterion: fairmt.Criterion) -> fairmt.methods.Step:
    assert criterion.last is not None
    return criterion.last


def tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.double)


# The multiplier.


@pytest.mark.parametrize(("before", "violation", "after"), [
    (0.0, 0.01, 0.5),  # ρ·h/ε = 0.25 · 0.01 / 0.005
    (1.0, -0.004, 0.8),
    (0.1, -0.005, 0.0),  # never below 0
    (1.0, 0.1, 6.0),  # h/ε = 20, the most
    (1.0, 5.0, 6.0),
    (6.0, 1.0, 7.0),  # the ceiling
    (3.0, 0.0, 3.0),
    (2.0, -0.005, 1.75),
])  # fmt: skip
def test_the_multiplier_steps_by_the_relative_violation(before, violation, after):
    ascent = DualAscent(0.005, step=0.25, ceiling=7.0)
    ascent.eta.fill_(before)
    assert float(ascent.next(tensor(violation), None)) == pytest.approx(after)
    assert float(ascent.eta) == before


@pytest.mark.parametrize(("before", "violation", "after"), [
    (0.0, 0.4, 0.1), (1.0, -8.0, 0.0), (1.0, -0.4, 0.9), (5.0, 1000.0, 255.0),
])  # fmt: skip
def test_the_printed_step_is_absolute_and_unbounded(before, violation, after):
    ascent = DualAscent(0.005, step=0.25, ceiling=math.inf, relative=False)
    ascent.eta.fill_(before)
    assert float(ascent.next(tensor(violation), None)) == pytest.approx(after)


@pytest.mark.parametrize(("spent", "after"), [
    (-math.inf, 6.0), (-3.0, 6.0), (0.0, 6.0),  # nothing spent: the clipped 20
    (0.5, 3.5),  # at most 20·(1 − ½)
    (1.0, 1.0),  # used up: it stands
    (1.1, 0.5),  # past it: it relaxes
    (5.0, 0.0),
])  # fmt: skip
def test_the_multiplier_slows_stands_and_relaxes_as_the_budget_is_spent(spent, after):
    ascent = DualAscent(0.005, step=0.25, ceiling=50.0)
    ascent.eta.fill_(1.0)
    assert float(ascent.next(tensor(1.0), tensor(spent))) == pytest.approx(after)


def test_a_budget_never_makes_the_multiplier_rise_faster():
    ascent = DualAscent(0.005, step=0.25, ceiling=50.0)
    ascent.eta.fill_(1.0)
    for spent in (-2.0, 0.0, 0.9):
        assert float(ascent.next(tensor(-0.002), tensor(spent))) == pytest.approx(0.9)


@pytest.mark.parametrize("dual_on", ["hard", "soft"])
@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
def test_a_run_follows_the_law(dual_on, linear):
    tolerance, step, ceiling = 0.2, 0.03, 1.5
    model = model_for(BATCH, linear=linear)
    criterion = criterion_for(BATCH, model, dual_on=dual_on, tolerance=tolerance, eta_step=step, eta_max=ceiling)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    eta, seen = 0.0, set()
    for batch in BATCHES * 6:
        optimiser.zero_grad()
        loss_of(criterion, model, batch).backward()
        optimiser.step()
        last = last_of(criterion)
        assert float(last.eta) == pytest.approx(eta), "a step uses the multiplier from before it"
        psi = last.psi_hard if dual_on == "hard" else last.psi
        violation = float(sum(last.weights[name] * psi[name] for name in psi)) - tolerance**2
        assert last.violation is not None
        assert float(last.violation) == pytest.approx(violation)
        assert criterion.kkt().violation == pytest.approx(violation)
        assert criterion.kkt().slackness == pytest.approx(eta * violation)
        signal = min(violation / tolerance**2, 20)
        seen |= {"clipped"} if signal == 20 else {"free"}
        eta = min(max(eta + step * signal, 0.0), ceiling)
        seen |= {"ceiling"} if eta == ceiling else {"rising"} if signal > 0 else {"falling"}
        assert float(criterion.eta) == pytest.approx(eta)
    assert {"free", "ceiling", "rising"} <= seen, "this run shows too little"


def test_hard_and_soft_violations_differ():
    """The multiplier follows decisions; weights and gradients come from soft rates."""
    model = model_for(BATCH)
    hard, soft = (criterion_for(BATCH, model, dual_on=name) for name in ("hard", "soft"))
    loss_of(hard, model, BATCH)
    loss_of(soft, model, BATCH)
    for name in ("psi", "psi_hard", "weights"):
        assert getattr(last_of(hard), name) == getattr(last_of(soft), name)
    assert float(hard.kkt().violation) != float(soft.kkt().violation)


def test_decisions_are_taken_at_the_threshold():
    logits = torch.tensor([[0.1], [-0.1], [2.0], [-2.0]], dtype=torch.double, requires_grad=True)
    labels = {"ill": torch.ones(4)}
    members = {"gender": torch.tensor([0, 0, 1, 1])}
    for threshold, gap in ((0.5, 0.0), (0.53, 0.5), (0.2, 0.5), (0.9, 0.0)):
        tasks = {"ill": Detection(threshold=threshold)}
        criterion = fairmt.FairMT(tasks, {"gender": 2}, beta=0, memory=1)
        criterion(torch.zeros(4, 2, dtype=torch.double), {"ill": logits}, labels, members)
        assert float(last_of(criterion).psi_hard["gender/ill"]) == pytest.approx(gap**2), threshold
        soft = torch.sigmoid((logits.detach()[:, 0] - math.log(threshold / (1 - threshold))) / 0.5)
        difference = soft[:2].mean() - soft[2:].mean()
        assert float(last_of(criterion).psi["gender/ill"]) == pytest.approx(float(difference**2))


def fixed(strength: float, model: Model) -> fairmt.Criterion:
    """FairMT's criterion with a multiplier that does not move."""
    criterion = criterion_for(BATCH, model, memory=1)
    criterion.strength = FixedStrength(strength)
    return criterion


def test_a_fixed_strength_stays_whatever_the_violation():
    strength = FixedStrength(0.7)
    for violation in (-1.0, 0.0, 100.0):
        assert float(strength.next(tensor(violation), None)) == 0.7
    model = model_for(BATCH)
    criterion = fixed(0.7, model)
    for batch in BATCHES:
        loss = loss_of(criterion, model, batch)
        last = last_of(criterion)
        assert float(last.eta) == float(criterion.eta) == 0.7
        plain = sum(last.alpha[name] * last.losses[name] for name in last.losses)
        assert float(loss.detach()) == pytest.approx(float(plain + 0.7 * last.phi)), "there is no bound: ε = 0"


def test_the_value_is_the_lagrangian_and_gradients_are_linear_in_the_strength():
    found = []
    for strength in (0.0, 1.0, 2.0):
        model = model_for(BATCH)
        criterion = fixed(strength, model)
        loss_of(criterion, model, BATCH).backward()
        found.append({name: value for name, value in gradients(model).items() if name.startswith("heads")})
    for name, value in found[0].items():
        torch.testing.assert_close(found[2][name] - value, 2 * (found[1][name] - value))
        if name.endswith("weight"):
            assert not torch.equal(found[1][name], value)


# The utility budget.


def test_a_budget_counts_the_worst_task_against_its_reference():
    budget = UtilityBudget(0.1, 2, 3, [1.0, 2.0, 4.0])
    rows = torch.tensor([4.0, 4.0, 0.0], dtype=torch.double)
    sums, best, spent = budget.next(torch.tensor([4.2, 8.0, 0.0], dtype=torch.double), rows)
    assert float(spent) == pytest.approx(0.5), "5 % of 10 %, by the first; the third was never seen"
    assert not budget.sums.any()
    budget.sums.copy_(sums)
    sums, _, spent = budget.next(torch.tensor([4.0, 10.4, 3.0], dtype=torch.double), rows + tensor(0.0))
    # Running losses: (2.1 + 4) / (2 + 4), (4 + 10.4) / (2 + 4).
    assert float(spent) == pytest.approx((14.4 / 6 / 2 - 1) / 0.1)
    assert best.tolist() == [1.0, 2.0, 4.0]


def test_without_references_a_task_s_own_best_serves():
    budget = UtilityBudget(0.5, 1, 2)
    rows = torch.ones(2, dtype=torch.double)
    for losses, expected, spent in (
        ([2.0, 1.0], [2.0, 1.0], 0.0),
        ([1.0, 1.25], [1.0, 1.0], 0.5),
        ([2.0, 0.5], [1.0, 0.5], 2.0),
    ):
        sums, best, found = budget.next(torch.tensor(losses, dtype=torch.double), rows)
        assert best.tolist() == expected
        assert float(found) == pytest.approx(spent)
        budget.sums.copy_(sums)
        budget.best.copy_(best)


REFERENCE = {"ill": 0.7, "traits/tall": 0.7, "traits/calm": 0.7, "health": 1.1, "pressure": 4.0}


def etas(steps: int = 6, **options: Any) -> list[float]:
    """The multiplier after each step, with a model that stands still."""
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model, **{"eta_step": 0.1, "eta_max": 1000.0, **options})
    found = []
    for _ in range(steps):
        loss_of(criterion, model, BATCH)
        found.append(float(criterion.eta))
    return found


def test_a_budget_is_off_unless_asked_for():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model)
    assert criterion.budget is None
    assert fairmt.FairMT.paper(BATCH.tasks, BATCH.groups, model.heads).budget is None
    assert etas() == sorted(etas())


def test_a_generous_budget_changes_nothing():
    assert etas(max_utility_loss=1e9, reference_losses=REFERENCE) == pytest.approx(etas())
    assert etas(max_utility_loss=0.1) == pytest.approx(etas()), "a model that stands still is at its best"


@pytest.mark.parametrize("allowed", [0.05, 0.2, 0.5, 2.0])
def test_a_run_under_a_budget_follows_the_law(allowed):
    model = model_for(BATCH)
    criterion = criterion_for(
        BATCH, model, eta_step=0.1, memory=3, max_utility_loss=allowed, reference_losses=REFERENCE
    )
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    eta, sums, rows = 0.0, dict.fromkeys(REFERENCE, 0.0), dict.fromkeys(REFERENCE, 0.0)
    for batch in BATCHES:
        optimiser.zero_grad()
        loss_of(criterion, model, batch).backward()
        optimiser.step()
        last = last_of(criterion)
        labelled = {
            "ill": (~batch.labels["ill"].isnan()).sum(),
            "traits/tall": (~batch.labels["traits"][:, 0].isnan()).sum(),
            "traits/calm": (~batch.labels["traits"][:, 1].isnan()).sum(),
            "health": (batch.labels["health"] >= 0).sum(),
            "pressure": (~batch.labels["pressure"].isnan()).sum(),
        }
        for name, count in labelled.items():
            sums[name] = 2 / 3 * sums[name] + float(last.losses[name] * count)
            rows[name] = 2 / 3 * rows[name] + float(count)
        spent = max(sums[name] / rows[name] / REFERENCE[name] - 1 for name in REFERENCE) / allowed
        assert last.violation is not None
        signal = min(float(last.violation) / 0.05**2, 20, 20 * (1 - spent))
        eta = min(max(eta + 0.1 * signal, 0.0), 50.0)
        assert float(criterion.eta) == pytest.approx(eta)


def test_the_multiplier_stops_at_the_budget_and_relaxes_past_it():
    model = model_for(BATCH)
    loss_of(criterion := criterion_for(BATCH, model), model, BATCH)
    losses = {name: float(value) for name, value in last_of(criterion).losses.items()}
    free = etas()
    at_it = etas(max_utility_loss=0.25, reference_losses={name: value / 1.25 for name, value in losses.items()})
    assert at_it == pytest.approx([0.0] * 6)
    one_past = {**losses, "health": losses["health"] / 2}
    assert etas(max_utility_loss=0.25, reference_losses=one_past) == [0.0] * 6, "one task is enough"
    assert free[-1] > 1

    criterion = criterion_for(BATCH, model, max_utility_loss=0.25, reference_losses=one_past)
    criterion.strength.eta.fill_(30.0)
    loss_of(criterion, model, BATCH)
    assert float(criterion.eta) < 30


# Steps that are not sound.

POISON = {
    "a nan": ("ill", math.nan),
    "inf": ("pressure", math.inf),
    "-inf": ("ill", -math.inf),
    "a class's nan": ("health", math.nan),
    "an overflow": ("pressure", 1e200),
}


def poisoned(criterion: fairmt.Criterion, model: Model, case: str) -> Tensor:
    """A batch with one bad logit, added so that nothing but the criterion sees it."""
    name, value = POISON[case]
    features, logits = model(BATCH.inputs)
    offset = torch.zeros_like(logits[name])
    labelled = BATCH.labels[name] == 1 if name == "ill" else BATCH.labels[name] >= 0
    offset[int(labelled.nonzero()[0]), -1] = value
    loss: Tensor = criterion(features, {**logits, name: logits[name] + offset}, BATCH.labels, BATCH.members)
    return loss


def prepared(linear: bool = True, **options: Any) -> tuple[Model, fairmt.FairMT]:
    model = model_for(BATCH, linear=linear)
    criterion = criterion_for(BATCH, model, **options)
    for batch in BATCHES[1:4]:
        loss_of(criterion, model, batch).backward()
    model.zero_grad()
    return model, criterion


@HEADS
@pytest.mark.parametrize("case", POISON)
def test_a_loss_that_is_not_finite_raises_and_moves_nothing(case, linear):
    model, criterion = prepared(linear, max_utility_loss=0.5)
    before, last = state_of(criterion), criterion.last
    with pytest.raises(FairMTError, match=r"loss: met .* not finite, expected .*nonfinite='skip'"):
        poisoned(criterion, model, case)
    assert_same_state(state_of(criterion), before)
    assert criterion.last is last
    loss_of(criterion, model, BATCH).backward()
    reference, own = prepared(linear, max_utility_loss=0.5)
    loss_of(own, reference, BATCH).backward()
    assert_same_state(gradients(model), gradients(reference))
    assert_same_state(state_of(criterion), state_of(own))


@HEADS
@pytest.mark.parametrize("case", POISON)
def test_a_loss_that_is_not_finite_is_skipped_and_counted(case, linear):
    model, criterion = prepared(linear, nonfinite="skip", max_utility_loss=0.5, alpha_every=2)
    before = state_of(criterion)
    for count in (1, 2):
        loss = poisoned(criterion, model, case)
        assert loss.shape == ()
        assert float(loss.detach()) == 0
        loss.backward()
        assert int(criterion.skipped) == count
    # Heads get an exact zero, for a GradScaler to see; the encoder nothing at all.
    assert all(parameter.grad is None for parameter in model.encoder.parameters())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.heads.parameters())
    assert_same_state({**state_of(criterion), "skipped": before["skipped"]}, before)

    model.zero_grad()
    loss_of(criterion, model, BATCH).backward()
    reference, own = prepared(linear, max_utility_loss=0.5, alpha_every=2)
    loss_of(own, reference, BATCH).backward()
    assert_same_state(gradients(model), gradients(reference))
    assert_same_state({**state_of(criterion), "skipped": before["skipped"]}, state_of(own))


@HEADS
def test_a_bad_row_of_inputs_is_skipped_without_harm_to_the_model(linear):
    """0 times a feature that is not a number is not 0: no gradient may pass there."""
    model, criterion = prepared(linear, nonfinite="skip")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = BATCH.inputs.clone()
    inputs[3, 1] = torch.nan
    loss = loss_of(criterion, model, replace(BATCH, inputs=inputs))
    assert float(loss.detach()) == 0
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss.backward()
    optimiser.step()
    assert_same_state({name: value.detach() for name, value in model.named_parameters()}, before)


class Steep(nn.Module):
    """A head whose derivative is infinite at 0, though its value is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = (self.linear(features) - self.linear.bias).sqrt()
        return out


@pytest.mark.parametrize("weighting", ["min_norm", "uniform"])
def test_a_gradient_that_is_not_finite_is_no_sound_step_either(weighting):
    model = model_for(BATCH, linear=False)
    model.heads["ill"] = Steep(1).double()
    criterion = criterion_for(BATCH, model, nonfinite="skip", weighting=weighting)
    before = state_of(criterion)
    inputs = torch.zeros_like(BATCH.inputs)
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(0)
    loss = loss_of(criterion, model, replace(BATCH, inputs=inputs))
    assert float(loss.detach()) == 0
    assert int(criterion.skipped) == 1
    assert_same_state({**state_of(criterion), "skipped": before["skipped"]}, before)


# Without a look at values.

BAD: dict[str, tuple[str, str, int, float, str]] = {
    "detection": ("labels", "ill", 5, 3.0, r"labels\['ill'\]: met 3 "),
    "column": ("labels", "traits", 4, -2.0, r"labels\['traits'\]: met -2 "),
    "class": ("labels", "health", 6, 9, r"labels\['health'\]: met 9 "),
    "regression": ("labels", "pressure", 2, math.inf, r"labels\['pressure'\]: met inf "),
    "group": ("members", "race", 1, 4, r"members\['race'\]: met 4 "),
    "low group": ("members", "gender", 1, -3, r"members\['gender'\]: met -3 "),
}


@HEADS
@pytest.mark.parametrize("case", BAD)
def test_without_a_look_bad_values_are_masked_marked_and_raised_when_asked(case, linear):
    what, name, row, value, message = BAD[case]
    missing = -1 if what == "members" else torch.nan if name != "health" else -100
    found = []
    for put in (value, missing):
        model, criterion = prepared(linear, validate=False)
        given = {"labels": dict(BATCH.labels), "members": dict(BATCH.members)}
        given[what][name] = given[what][name].clone()
        given[what][name][row] = put
        loss = criterion(*model(BATCH.inputs), given["labels"], given["members"])
        loss.backward()
        found.append((criterion, {**gradients(model), **state_of(criterion), "loss": loss.detach()}))
    (marked, one), (clean, other) = found
    assert_same_state(one, other)
    clean.check()
    with pytest.raises(FairMTError, match=message) as met:
        marked.check()
    assert str(met.value).count("expected") == 1
    marked.check()
    clean.check()


def test_all_that_was_met_since_the_last_look_is_raised_together():
    model, criterion = prepared(validate=False)
    ill, race = BATCH.labels["ill"].clone(), BATCH.members["race"].clone()
    ill[3], race[4] = 7, 5
    loss_of(criterion, model, BATCH.relabelled(ill=ill))
    loss_of(criterion, model, BATCH)
    loss_of(criterion, model, replace(BATCH, members={**BATCH.members, "race": race}))
    with pytest.raises(FairMTError) as met:
        criterion.check()
    assert "labels['ill']: met 7" in str(met.value)
    assert "members['race']: met 5" in str(met.value)
    criterion.check()


def test_without_a_look_bad_weights_count_for_nothing():
    found = []
    for value in (-1.0, 0.0):
        model, criterion = prepared(validate=False)
        weight = torch.ones(len(BATCH))
        weight[5] = value
        loss = loss_of(criterion, model, replace(BATCH, sample_weight=weight))
        loss.backward()
        found.append((criterion, {**gradients(model), "loss": loss.detach()}))
    assert_same_state(found[0][1], found[1][1])
    with pytest.raises(FairMTError, match=r"sample_weight: met -1 "):
        found[0][0].check()
    found[1][0].check()


# The certificate.


def test_the_entries_above_the_tolerance_come_worst_first_with_their_groups():
    """Three groups with TPRs 0.9, 0.5, 0.2 and FPRs 0.1, 0.1, 0.5 of one task, and errors 0, 1, 4 of another."""
    tpr, fpr, errors = [0.9, 0.5, 0.2], [0.1, 0.1, 0.5], [0.0, 1.0, 4.0]
    probability = torch.tensor([rate for pair in zip(tpr, fpr, strict=True) for rate in pair], dtype=torch.double)
    members = {"race": torch.tensor([0, 0, 1, 1, 2, 2])}
    tasks: dict[str, fairmt.Task] = {
        "ill": Detection(temperature=1.0),
        "easy": Detection(temperature=1.0),
        "age": Regression(scale=2.0),
    }
    logits = {
        "ill": probability.logit().requires_grad_(),
        "easy": torch.full((6,), 0.5, dtype=torch.double),
        "age": torch.tensor(errors, dtype=torch.double).sqrt().repeat_interleave(2),
    }
    binary = torch.tensor([1, 0] * 3)
    labels = {"ill": binary, "easy": binary, "age": torch.zeros(6)}
    criterion = fairmt.FairMT(tasks, {"race": 3}, weighting="uniform", memory=1, dual_on="soft")
    criterion(torch.zeros(6, 2, dtype=torch.double), logits, labels, members)
    above = criterion.kkt().above
    assert [(entry.entry, entry.side, entry.worst_group, entry.best_group) for entry in above] == [
        ("race/age", "error", 2, 0),
        ("race/ill", "TPR", 2, 0),
    ]
    # Errors are counted in label variances, 4 here; odds are the mean of both sides' squares.
    assert [entry.gap for entry in above] == pytest.approx([1.0, math.sqrt((0.7**2 + 0.4**2) / 2)])
    assert [math.sqrt(psi) for psi in last_of(criterion).psi.values()] == pytest.approx(
        [above[1].gap, 0.0, above[0].gap]
    )


def test_the_entries_above_the_tolerance_are_of_the_gaps_that_drive_the_multiplier():
    """Logits a hair to either side of the threshold: no soft gap to speak of, and the widest of hard ones."""
    logits = torch.tensor([0.01, 0.01, -0.01, -0.01], dtype=torch.double).requires_grad_()
    found = {}
    for dual_on in ("hard", "soft"):
        criterion = fairmt.FairMT({"ill": Detection()}, {"gender": 2}, memory=1, dual_on=dual_on)
        criterion(torch.zeros(4, 2), {"ill": logits}, {"ill": torch.ones(4)}, {"gender": torch.tensor([0, 0, 1, 1])})
        found[dual_on] = criterion.kkt()
    assert found["soft"].violation < 0
    assert found["soft"].above == ()
    assert found["hard"].violation > 0
    assert [(entry.entry, entry.worst_group, entry.best_group) for entry in found["hard"].above] == [
        ("gender/ill", 1, 0)
    ]
    assert found["hard"].above[0].gap == pytest.approx(math.sqrt(0.5))


def test_what_is_not_measured_is_neither_held_nor_broken():
    """One group alone has no gap: nothing is certified, nothing is added to the loss, and the multiplier stays."""
    logits = torch.tensor([0.5, -1.0, 2.0], dtype=torch.double).requires_grad_()
    criterion = fairmt.FairMT({"ill": Detection()}, {"gender": 2}, memory=1)
    criterion.strength.eta += 3
    labels, members = {"ill": torch.tensor([1, 0, 1])}, {"gender": torch.zeros(3, dtype=torch.long)}
    loss = criterion(torch.zeros(3, 2), {"ill": logits}, labels, members)
    assert math.isnan(criterion.kkt().violation)
    assert float(loss.detach()) == pytest.approx(float(last_of(criterion).losses["ill"]))
    assert float(criterion.eta) == 3


def test_a_skipped_step_goes_with_a_gradient_scaler():
    model, criterion = prepared(True, nonfinite="skip")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    inputs = BATCH.inputs.clone()
    inputs[3, 1] = torch.nan
    optimiser.zero_grad()
    scaler.scale(loss_of(criterion, model, replace(BATCH, inputs=inputs))).backward()
    scaler.step(optimiser)
    scaler.update()
    assert_same_state(dict(model.named_parameters()), before)


def test_the_worse_side_is_named():
    """Here the false positives are further apart than the true ones."""
    probability = torch.tensor([0.5, 0.6, 0.6, 0.1], dtype=torch.double)
    criterion = fairmt.FairMT({"ill": Detection()}, {"gender": 2}, memory=1)
    criterion(
        torch.zeros(4, 2, dtype=torch.double),
        {"ill": probability.logit().requires_grad_()},
        {"ill": torch.tensor([1, 0, 1, 0])},
        {"gender": torch.tensor([0, 0, 1, 1])},
    )
    (entry,) = criterion.kkt().above
    assert (entry.side, entry.worst_group, entry.best_group) == ("FPR", 0, 1)


def slope_problem() -> tuple[nn.Module, nn.Module, dict[str, Tensor], dict[str, Tensor], Tensor]:
    """One slope for all: three rows of group 0 want it to be 1, one row of group 1 wants 0."""
    encoder, head = (nn.Linear(1, 1, bias=False).double() for _ in range(2))
    with torch.no_grad():
        encoder.weight.fill_(0.5)
        head.weight.fill_(1.0).requires_grad_(False)
    labels = {"y": torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.double)}
    members = {"g": torch.tensor([0, 0, 0, 1])}
    return encoder, head, labels, members, torch.ones(4, 1, dtype=torch.double)


@pytest.mark.parametrize(("tolerance", "slope", "multiplier"), [
    (0.2, 0.6, 0.625),  # gap w² − (1 − w)² = 0.2; 2(w − 0.75) + η·2·0.2·2w = 0
    (0.9, 0.75, 0.0),  # the mean of the labels has a gap of 0.5 only
])  # fmt: skip
def test_a_convex_problem_ends_at_its_primal_and_dual_optimum(tolerance, slope, multiplier):
    encoder, head, labels, members, x = slope_problem()
    criterion = fairmt.FairMT(
        {"y": Regression(scale=1.0)},
        {"g": 2},
        {"y": head},
        tolerance=tolerance,
        geometry="full",
        shared=encoder.parameters(),
        memory=1,
        eta_step=0.05,
    )
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.2)

    def step() -> fairmt.methods.Kkt:
        features = encoder(x)
        loss = criterion(features, {"y": head(features)}, labels, members)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return criterion.kkt()

    first = step()
    assert first.stationarity > 0.5
    for _ in range(300):
        last = step()
    (weight,) = encoder.parameters()
    assert weight.item() == pytest.approx(slope, abs=1e-6)
    assert float(criterion.eta) == pytest.approx(multiplier, abs=1e-6)
    assert last.violation <= 1e-8
    assert abs(last.slackness) <= 1e-8
    if multiplier > 0:  # where all gradients vanish there is nothing that could cancel
        assert last.stationarity <= 1e-6
    assert [entry for entry in last.above if entry.gap > tolerance + 1e-6] == []


def test_conflicting_tasks_end_where_their_gradients_cancel():
    """Both tasks read the same number and want another one; the features themselves are trained."""
    draw = torch.Generator().manual_seed(0)
    labels = {name: torch.randn(6, generator=draw, dtype=torch.double) for name in "ab"}
    features = torch.randn(6, 1, generator=draw, dtype=torch.double).requires_grad_()
    heads = {name: nn.Linear(1, 1, bias=False).double().requires_grad_(False) for name in "ab"}
    for head in heads.values():
        head.weight.data.fill_(1.0)
    tasks = {name: Regression(scale=1.0) for name in "ab"}
    criterion = fairmt.FairMT(tasks, {"g": 2}, heads, tolerance=100.0)
    members = {"g": torch.arange(6) % 2}
    stationarity: list[float] = []
    for _ in range(150):
        features.grad = None
        logits = {name: head(features) for name, head in heads.items()}
        criterion(features, logits, labels, members).backward()
        with torch.no_grad():
            assert features.grad is not None
            features -= 0.5 * features.grad
        stationarity.append(criterion.kkt().stationarity)
    assert stationarity[0] > 0.1
    assert stationarity[-1] < 1e-6
    kkt = criterion.kkt()
    assert kkt.violation < 0
    assert kkt.slackness == 0
    assert kkt.above == ()
    alpha = last_of(criterion).alpha["a"]
    expected = alpha * labels["a"] + (1 - alpha) * labels["b"]
    torch.testing.assert_close(features.detach()[:, 0], expected, rtol=0, atol=1e-5)


def test_uniform_weights_compare_no_gradients():
    model = model_for(BATCH)
    criterion = criterion_for(BATCH, model, weighting="uniform")
    loss_of(criterion, model, BATCH)
    assert math.isnan(criterion.kkt().stationarity)
    assert not math.isnan(criterion.kkt().violation)


# The mean geometry's guard.


def mean_criterion(**options: Any) -> tuple[dict[str, nn.Module], fairmt.FairMT]:
    torch.manual_seed(0)
    heads: dict[str, nn.Module] = {name: nn.Linear(3, 1).double() for name in "ab"}
    tasks = {"a": Regression(), "b": Regression()}
    return heads, fairmt.FairMT(tasks, {"g": 2}, heads, geometry="mean", **options)


def mean_step(heads: dict[str, nn.Module], criterion: fairmt.FairMT, shift: dict[str, float], seed: int) -> list[float]:
    """α of a batch on which each task's residuals have this mean; their spread is about 1."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(8, 3, generator=draw, dtype=torch.double).requires_grad_()
    logits = {name: head(features) for name, head in heads.items()}
    labels = {}
    for name, z in logits.items():
        noise = torch.randn(8, generator=draw, dtype=torch.double)
        labels[name] = z.detach()[:, 0] - (noise - noise.mean()) - shift[name]
    criterion(features, logits, labels, {"g": torch.arange(8) % 2})
    return [float(alpha) for alpha in last_of(criterion).alpha.values()]


def test_where_mean_gradients_vanish_the_last_alpha_stays():
    heads, criterion = mean_criterion()
    first = mean_step(heads, criterion, {"a": 1.0, "b": 0.5}, 0)
    assert abs(first[0] - 0.5) > 0.01
    for seed, noise in ((1, 0.0), (2, 1e-9), (3, -1e-7)):
        assert mean_step(heads, criterion, {"a": noise, "b": -noise / 2}, seed) == pytest.approx(first)
    assert mean_step(heads, criterion, {"a": 0.1, "b": 0.3}, 4) != pytest.approx(first, abs=1e-3)


def test_where_they_vanish_at_first_alpha_is_uniform():
    heads, criterion = mean_criterion()
    assert mean_step(heads, criterion, {"a": 1e-9, "b": 3e-9}, 0) == pytest.approx([0.5, 0.5])


def test_one_mean_gradient_that_is_there_is_enough_to_solve():
    heads, criterion = mean_criterion(gradient_norm="none")
    mean_step(heads, criterion, {"a": 1.0, "b": 0.5}, 0)
    assert mean_step(heads, criterion, {"a": 0.0, "b": 1.0}, 1) == pytest.approx([1.0, 0.0], abs=1e-6)


def test_the_guard_does_not_depend_on_the_scale_of_the_labels():
    """Small labels have small gradients; those are no noise."""
    found = []
    for scale in (1.0, 1e-6):
        heads, criterion = mean_criterion()
        with torch.no_grad():
            for head in heads.values():
                for parameter in head.parameters():
                    parameter.mul_(scale)
        draw = torch.Generator().manual_seed(0)
        features = torch.randn(8, 3, generator=draw, dtype=torch.double).requires_grad_()
        logits = {name: head(features) for name, head in heads.items()}
        labels = {name: scale * torch.randn(8, generator=draw, dtype=torch.double) for name in heads}
        criterion(features, logits, labels, {"g": torch.arange(8) % 2})
        found.append([float(alpha) for alpha in last_of(criterion).alpha.values()])
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[0] != pytest.approx([0.5, 0.5], abs=1e-3)


# The method as printed.


def printed_by_hand(
    features: Tensor,
    heads: dict[str, nn.Linear],
    labels: dict[str, Tensor],
    members: Tensor,
    eta: float,
    mu: float,
) -> dict[str, Any]:
    """The paper's formulas on one batch, with autograd for what they differentiate."""
    logits = {name: head(features) for name, head in heads.items()}
    losses: dict[str, Tensor] = {}
    psi: dict[str, Tensor] = {}
    for name, z in logits.items():
        y = labels[name]
        present = y >= 0 if name == "health" else ~y.isnan()
        if name == "health":
            losses[name] = nn.functional.cross_entropy(z[present], y[present])
            entries = functional.caeod(torch.softmax(z, 1), y, members, 2)
            psi |= {f"gender/health={k}": entry for k, entry in enumerate(entries)}
        elif name == "age":
            losses[name] = (z[:, 0] - y)[present].square().mean()
            psi["gender/age"] = functional.aep(z[:, 0], y, members, 2)
        else:
            losses[name] = nn.functional.binary_cross_entropy_with_logits(z[present, 0], y[present])
            psi[f"gender/{name}"] = functional.aeod(torch.sigmoid(z[:, 0]), y, members, 2)
    stacked = torch.stack(list(psi.values()))
    w, _, _ = functional.frank_wolfe(stacked.detach(), tensor(mu), 1e-6, 100)
    aggregate = w @ stacked
    phi = aggregate - mu / 2 * (w @ w)

    u, u_phi = [], torch.zeros(features.shape[1], dtype=torch.double)
    (g_phi,) = [torch.autograd.grad(aggregate, list(logits.values()), retain_graph=True)]
    for (name, loss), at_phi in zip(losses.items(), g_phi, strict=True):
        (delta,) = torch.autograd.grad(loss, logits[name], retain_graph=True)
        y = labels[name]
        rows = (y >= 0).sum() if name == "health" else (~y.isnan()).sum()
        weight = heads[name].weight.detach()
        u.append(delta.sum(0) / rows @ weight)
        u_phi += at_phi.sum(0) / rows @ weight
    V = torch.stack(u)
    alpha = functional.min_norm(V @ V.T, eta * V @ u_phi)

    total = sum(a * loss for a, loss in zip(alpha, losses.values(), strict=True)) + eta * aggregate
    plain = sum(losses.values()) + eta * aggregate
    (at_features,) = torch.autograd.grad(total, features, retain_graph=True)
    at_heads = torch.autograd.grad(plain, [p for head in heads.values() for p in head.parameters()])
    return {
        "alpha": dict(zip(losses, alpha, strict=True)),
        "psi": {name: value.detach() for name, value in psi.items()},
        "w": dict(zip(psi, w, strict=True)),
        "phi": phi.detach(),
        "features": at_features,
        "heads": at_heads,
    }


def test_the_printed_method_is_the_printed_method():
    """Batch estimates at temperature 1, an absolute μ, means over each task's own rows, η + ρ(Φ − ε)."""
    tasks: dict[str, fairmt.Task] = {
        "ill": Detection(temperature=0.3),  # it is printed at 1
        "calm": Detection(),
        "health": Classification(3, temperature=2.0),
        "age": Regression(),
    }
    torch.manual_seed(3)
    heads = {name: nn.Linear(6, 3 if name == "health" else 1).double() for name in tasks}
    epsilon, mu, rho = 0.02, 0.05, 3.0
    criterion = fairmt.FairMT.paper(tasks, {"gender": 2}, nn.ModuleDict(heads), epsilon=epsilon, mu=mu, eta_step=rho)
    eta = 0.0
    for step in range(4):
        draw = torch.Generator().manual_seed(step)
        features = torch.randn(20, 6, generator=draw, dtype=torch.double).requires_grad_()
        members = torch.randint(0, 2, (20,), generator=draw)
        labels = {
            "ill": torch.randint(0, 2, (20,), generator=draw).double(),
            "calm": torch.randint(0, 2, (20,), generator=draw).double(),
            "health": torch.randint(0, 3, (20,), generator=draw),
            "age": torch.randn(20, generator=draw, dtype=torch.double),
        }
        labels["ill"][:6] = torch.nan
        labels["health"][10:13] = -100
        labels["age"][15:] = torch.nan
        expected = printed_by_hand(features, heads, labels, members, eta, mu)

        parameters = [p for head in heads.values() for p in head.parameters()]
        for parameter in parameters:
            parameter.grad = None
        logits = {name: head(features) for name, head in heads.items()}
        criterion(features, logits, labels, {"gender": members}).backward()
        last = last_of(criterion)
        assert float(last.eta) == pytest.approx(eta)
        for found, wanted in (
            (last.psi, expected["psi"]),
            (last.weights, expected["w"]),
            (last.alpha, expected["alpha"]),
        ):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert float(found[name]) == pytest.approx(float(value), abs=1e-8), (step, name)
        assert float(last.phi) == pytest.approx(float(expected["phi"]))
        torch.testing.assert_close(features.grad, expected["features"], rtol=1e-8, atol=1e-10)
        for parameter, wanted in zip(parameters, expected["heads"], strict=True):
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-8, atol=1e-10)
        eta = max(eta + rho * (float(expected["phi"]) - epsilon), 0.0)
        assert float(criterion.eta) == pytest.approx(eta, rel=1e-8)
    assert eta > 0.01, "the multiplier had no say"


def test_the_printed_means_are_over_rows_whatever_their_weights():
    """|B_t| counts labelled rows of a weight above 0, a task's loss is its weighted mean."""
    torch.manual_seed(1)
    tasks = {"a": Regression(), "b": Regression()}
    heads = {name: nn.Linear(4, 1).double() for name in tasks}
    features = torch.randn(12, 4, dtype=torch.double)
    labels = {name: torch.randn(12, dtype=torch.double) for name in tasks}
    labels["a"][:5] = torch.nan
    weight = torch.rand(12, dtype=torch.double)
    weight[10] = 0
    criterion = fairmt.FairMT.paper(tasks, {"gender": 2}, nn.ModuleDict(heads))
    logits = {name: head(features) for name, head in heads.items()}
    criterion(features, logits, labels, {"gender": torch.arange(12) % 2}, weight)
    means = []
    for name, head in heads.items():
        counted = ~labels[name].isnan() & (weight > 0)
        residual = (logits[name].detach()[:, 0] - labels[name])[counted]
        delta = 2 * weight[counted] * residual / weight[counted].sum()
        means.append(delta.sum() / counted.sum() * head.weight.detach()[0])
    V = torch.stack(means)
    expected = functional.min_norm(V @ V.T, torch.zeros(2, dtype=torch.double))
    assert 0.01 < float(expected[0]) < 0.99
    assert [float(alpha) for alpha in last_of(criterion).alpha.values()] == pytest.approx(expected.tolist(), abs=1e-8)
