"""Mixed precision, loss scaling, accumulation, clipping and torch.compile see an ordinary loss."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

BATCH = problem(dtype=torch.float32)
GEOMETRIES = ["sample", "mean", "feature", "full"]


def trained_a_little(linear: bool = True, batch: Problem = BATCH, **options: Any) -> tuple[Model, fairmt.FairMT]:
    """A model and a criterion whose multiplier has risen."""
    model = model_for(batch, linear=linear)
    criterion = criterion_for(batch, model, **{"eta_step": 0.05, **options})
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimiser.zero_grad()
        loss_of(criterion, model, batch).backward()
        optimiser.step()
    model.zero_grad()
    assert float(criterion.eta) > 0
    return model, criterion


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the length of all gradients together."""
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
    length = torch.cat([value.flatten() for value in expected.values()]).norm()
    assert torch.isfinite(difference).all()
    assert difference.norm() <= tolerance * length


@pytest.mark.parametrize("inside", [True, False], ids=["criterion inside", "criterion outside"])
@pytest.mark.parametrize(("linear", "geometry"), [
    *((True, geometry) for geometry in GEOMETRIES), (False, "sample"), (False, "full"),
])  # fmt: skip
def test_autocast_is_close_to_single_precision(linear, geometry, inside):
    found = []
    for enabled in (False, True):
        model, criterion = trained_a_little(linear, geometry=geometry)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            features, logits = model(BATCH.inputs)
            assert (logits["ill"].dtype == torch.bfloat16) == enabled
            with nullcontext() if inside else torch.autocast("cpu", enabled=False):
                loss = criterion(features, logits, BATCH.labels, BATCH.members)
        assert loss.dtype == torch.float32
        loss.backward()
        assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}
        assert all(value.isfinite().all() for value in criterion.buffers() if value.dtype == torch.float64)
        found.append((loss.detach(), gradients(model)))
    (plain, plain_gradients), (mixed, mixed_gradients) = found
    torch.testing.assert_close(mixed, plain, rtol=0.02, atol=0)
    assert_near(mixed_gradients, plain_gradients, 0.1)


@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
def test_the_criterion_s_own_sums_are_not_made_in_half_precision(linear):
    """Where the criterion stands, inside or outside of the autocast region, makes no difference to the last bit."""
    batch = problem(1000, dtype=torch.float32, missing=0.0)
    found = []
    for inside in (True, False):
        model, criterion = trained_a_little(linear, batch)
        with torch.autocast("cpu", torch.bfloat16):
            features, logits = model(batch.inputs)
            with torch.autocast("cpu", enabled=inside):
                loss = criterion(features, logits, batch.labels, batch.members)
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model), **state_of(criterion)})
    assert_same_state(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
def test_a_model_of_any_precision_takes_labels_of_any(dtype, linear):
    reference, criterion = trained_a_little(linear)
    model = copy.deepcopy(reference).to(dtype)
    own = copy.deepcopy(criterion)
    own.heads = criterion_for(BATCH, model).heads
    loss_of(criterion, reference, BATCH).backward()

    seen: dict[str, Tensor] = {}
    features = model.encoder(BATCH.inputs.to(dtype))
    logits = {name: head(features) for name, head in model.heads.items()}
    for name, tensor in [("features", features), *logits.items()]:
        tensor.register_hook(lambda gradient, name=name: seen.__setitem__(name, gradient))
    loss = own(features, logits, BATCH.labels, BATCH.members)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert {name: gradient.dtype for name, gradient in seen.items()} == dict.fromkeys(seen, dtype)
    assert seen.keys() == {"features", *logits}
    assert_near(
        {name: gradient.float() for name, gradient in gradients(model).items()},
        gradients(reference),
        {torch.bfloat16: 0.1, torch.float16: 0.02}.get(dtype, 1e-4),
    )


def test_heads_may_differ_in_precision():
    model, criterion = trained_a_little()
    reference = copy.deepcopy(model)
    loss_of(copy.deepcopy(criterion), reference, BATCH).backward()
    features, logits = model(BATCH.inputs)
    criterion(features, {**logits, "ill": logits["ill"].bfloat16()}, BATCH.labels, BATCH.members).backward()
    assert_near(gradients(model), gradients(reference), 0.02)


def test_half_precision_labels_and_weights_serve():
    model, criterion = trained_a_little()
    labels = {name: y.half() if y.is_floating_point() else y for name, y in BATCH.labels.items()}
    criterion.eval()
    loss = criterion(*model(BATCH.inputs), labels, BATCH.members, torch.ones(len(BATCH), dtype=torch.bfloat16))
    torch.testing.assert_close(loss, loss_of(criterion, model, BATCH), rtol=0.01, atol=0)


def test_a_half_precision_head_on_single_precision_features_is_no_mistake():
    """As under autocast, where an encoder may end in a layer that stays in single precision."""
    torch.manual_seed(0)
    features = (3 + 50 * torch.randn(64, 512)).requires_grad_()
    heads = nn.ModuleDict({"ill": nn.Linear(512, 1)})
    criterion = fairmt.FairMT({"ill": fairmt.Detection()}, {"gender": 2}, heads)
    with torch.autocast("cpu", torch.bfloat16):
        logits = {"ill": heads["ill"](features)}
    labels, members = {"ill": torch.randint(0, 2, (64,))}, {"gender": torch.randint(0, 2, (64,))}
    criterion(features, logits, labels, members).backward()


@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
def test_a_scaled_step_is_the_plain_one(linear):
    found = []
    for scaled in (False, True):
        model, criterion = trained_a_little(linear)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        loss = scaler.scale(loss_of(criterion, model, BATCH))
        loss.backward()
        scaler.unscale_(optimiser)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimiser)
        scaler.update()
        found.append(({name: value.detach() for name, value in model.named_parameters()}, state_of(criterion)))
    for name, value in found[0][0].items():
        torch.testing.assert_close(found[1][0][name], value, rtol=1e-5, atol=1e-6)
    assert_same_state(found[0][1], found[1][1])


@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
def test_a_factor_on_the_loss_is_a_factor_on_every_gradient(linear):
    found = []
    for factor in (1.0, -0.25):
        model, criterion = trained_a_little(linear)
        (factor * loss_of(criterion, model, BATCH)).backward()
        found.append({name: gradient / factor for name, gradient in gradients(model).items()})
    assert_near(found[1], found[0], 1e-6)


@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
def test_accumulation_adds_up_the_gradients_of_its_parts(linear):
    batch = problem(30)
    parts = [batch.rows(slice(start, start + 10)) for start in (0, 10, 20)]
    model, criterion = trained_a_little(linear, batch)
    apart = copy.deepcopy(criterion)
    apart.load_state_dict(criterion.state_dict())

    for part in parts:
        (loss_of(criterion, model, part) / len(parts)).backward()
    accumulated = gradients(model)

    total = {name: torch.zeros_like(value) for name, value in accumulated.items()}
    for part in parts:
        model.zero_grad()
        loss_of(apart, model, part).backward()
        for name, gradient in gradients(model).items():
            total[name] += gradient / len(parts)
    assert_near(accumulated, total, 1e-12)
    assert_same_state(state_of(criterion), state_of(apart))

    # One call is one move of the state, so three parts decay the memory three times.
    once, moved = trained_a_little(linear, batch)[1], state_of(criterion)["measure.moments.moments"]
    added = moved - state_of(once)["measure.moments.moments"]
    torch.testing.assert_close(added[0, 0], (~batch.labels["ill"].isnan()).sum().double())


def test_two_losses_before_one_backward_do_not_disturb_each_other():
    model, criterion = trained_a_little()
    alone = copy.deepcopy(criterion)
    first = loss_of(criterion, model, BATCH)
    second = loss_of(criterion, model, BATCH)
    (first + second).backward()
    together = gradients(model)
    model.zero_grad()
    loss_of(alone, model, BATCH).backward()
    loss_of(alone, model, BATCH).backward()
    assert_near(together, gradients(model), 1e-6)


def test_clipping_bounds_the_gradient():
    model, criterion = trained_a_little()
    loss_of(criterion, model, BATCH).backward()
    before = gradients(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm > 0.1
    assert_near({name: value * norm / 0.1 for name, value in gradients(model).items()}, before, 1e-4)


def test_the_loss_adds_up_with_a_penalty_of_the_user_s_own():
    model, criterion = trained_a_little()
    reference = copy.deepcopy(criterion)
    (loss_of(criterion, model, BATCH) + sum(p.square().sum() for p in model.parameters())).backward()
    both = gradients(model)
    model.zero_grad()
    loss_of(reference, model, BATCH).backward()
    expected = {name: gradients(model)[name] + 2 * value.detach() for name, value in model.named_parameters()}
    assert_near(both, expected, 1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look at features
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("linear", "what"), [(True, "encoder"), (False, "encoder"), (True, "heads"), (True, "model")])
def test_a_compiled_model_trains_as_a_plain_one(linear, what, backend):
    model, criterion = trained_a_little(linear)
    plain, plain_criterion = copy.deepcopy(model), trained_a_little(linear)[1]
    plain_criterion.heads = criterion_for(BATCH, plain).heads
    loss_of(plain_criterion, plain, BATCH).backward()

    torch.compiler.reset()
    compiled: nn.Module = model
    if what == "encoder":
        model.encoder.compile(backend=backend)
    elif what == "heads":
        for name, head in model.heads.items():
            model.heads[name] = torch.compile(head, backend=backend)  # type: ignore[assignment]
        criterion.heads = criterion_for(BATCH, model).heads
    else:
        compiled = torch.compile(model, backend=backend)  # type: ignore[assignment]
    loss_of(criterion, compiled, BATCH).backward()
    names = {name: name.replace("_orig_mod.", "") for name, _ in model.named_parameters()}
    assert_near({names[name]: value for name, value in gradients(model).items()}, gradients(plain), 1e-5)
    assert criterion.last is not None
    assert criterion.last.gram is not None


def test_other_heads_compiled_together_with_the_encoder_are_refused():
    """One compiled graph hides the features from autograd; the message says what to do."""
    model, criterion = trained_a_little(linear=False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    before = state_of(criterion)
    with pytest.raises(fairmt.FairMTError, match=r"features: the logits were not computed.*compile.*apart"):
        loss_of(criterion, compiled, BATCH)  # type: ignore[arg-type]
    assert_same_state(state_of(criterion), before)
