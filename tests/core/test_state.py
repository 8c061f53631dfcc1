"""A criterion's state: the whole of it, exactly, and nothing of the user's model."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise
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

BATCHES = [problem(seed=seed) for seed in range(6)]
BATCH = BATCHES[0]


def through_a_file(state: Any) -> Any:
    """What is left of a state after it was stored and read as data, not as code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Run:
    """A model, its optimiser and its criterion."""

    def __init__(self, seed: int = 0, *, linear: bool = True, **options: Any) -> None:
        self.model = model_for(BATCH, linear=linear, seed=seed)
        self.criterion = criterion_for(BATCH, self.model, **options)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def train(self, batches: list[Problem]) -> list[fairmt.methods.Step]:
        steps = []
        for batch in batches:
            self.optimiser.zero_grad()
            loss_of(self.criterion, self.model, batch).backward()
            self.optimiser.step()
            assert self.criterion.last is not None
            steps.append(self.criterion.last)
        return steps

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.model, "criterion": self.criterion, "optimiser": self.optimiser}
        return {name: part.state_dict() for name, part in parts.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.criterion.load_state_dict(state["criterion"])
        self.optimiser.load_state_dict(state["optimiser"])


def tensors_of(criterion: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in criterion.state_dict().items() if isinstance(value, Tensor)}


def assert_identical(one: Any, other: Any, where: str = "state") -> None:
    """Bit by bit, through dictionaries and lists."""
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_identical(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_identical(a, b, f"{where}[{number}]")
    else:
        assert one == other, where


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "other heads": {"linear": False},
    "mean": {"geometry": "mean"},
    "alpha every 4": {"alpha_every": 4},
    "budget": {"max_utility_loss": 0.5, "memory": 3},
    "uniform": {"weighting": "uniform"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_resumed_run_equals_an_unbroken_one(case):
    unbroken = Run(**OPTIONS[case])
    unbroken.train(BATCHES)

    first = Run(**OPTIONS[case])
    first.train(BATCHES[:3])
    resumed = Run(seed=1, **OPTIONS[case])
    resumed.load(through_a_file(first.state()))
    steps = resumed.train(BATCHES[3:])

    assert_identical(resumed.state(), unbroken.state())
    assert unbroken.criterion.last is not None
    assert_identical(steps[-1].alpha, unbroken.criterion.last.alpha)
    assert any(float(step.eta) > 0 for step in steps), "the multiplier had no say in this run"


@pytest.mark.parametrize(("case", "buffer"), [
    ("default", "measure.moments.moments"),
    ("default", "measure.constraint.memory.table"),
    ("default", "strength.eta"),
    ("alpha every 4", "weighting.alpha"),
    ("budget", "budget.sums"),
    ("budget", "budget.best"),
])  # fmt: skip
def test_a_resumed_run_needs_every_buffer(case, buffer):
    """Without one of them the run takes another way, so the test above sees each."""
    unbroken = Run(**OPTIONS[case])
    unbroken.train(BATCHES)
    first, resumed = Run(**OPTIONS[case]), Run(**OPTIONS[case])
    first.train(BATCHES[:3])
    state = through_a_file(first.state())
    state["criterion"][buffer] = resumed.criterion.state_dict()[buffer]
    resumed.load(state)
    resumed.train(BATCHES[3:])
    with pytest.raises(AssertionError, match="differ"):
        assert_same_state(state_of(resumed.criterion), state_of(unbroken.criterion))


def test_the_state_holds_all_that_moves():
    """Every buffer that a run changes is in the state, whether or not it is said to be."""
    run = Run(max_utility_loss=0.1)
    before = {name: buffer.clone() for name, buffer in run.criterion.named_buffers()}
    run.train(BATCHES)
    moved = {name for name, buffer in run.criterion.named_buffers() if not torch.equal(buffer, before[name])}
    unread = {name for name in moved if name.endswith("watch.met")}
    assert moved - unread
    assert moved - unread <= run.criterion.state_dict().keys()


def test_the_number_of_skipped_batches_is_in_the_state():
    run, other = Run(nonfinite="skip"), Run(nonfinite="skip")
    features, logits = run.model(BATCH.inputs)
    run.criterion(features, {**logits, "ill": logits["ill"] * torch.nan}, BATCH.labels, BATCH.members)
    other.load(through_a_file(run.state()))
    assert int(other.criterion.skipped) == 1


def test_alpha_every_resumes_in_the_middle_of_its_round():
    def solved(steps: list[fairmt.methods.Step]) -> list[bool]:
        return [step.gram is not None for step in steps]

    unbroken = Run(alpha_every=4)
    assert solved(unbroken.train(BATCHES)) == [True, False, False, False, True, False]
    first, resumed = Run(alpha_every=4), Run(alpha_every=4)
    first.train(BATCHES[:3])
    resumed.load(through_a_file(first.state()))
    assert solved(resumed.train(BATCHES[3:])) == [False, True, False]


def test_alpha_is_kept_between_the_steps_that_solve_for_it():
    steps = Run(alpha_every=3).train(BATCHES)
    kept = [all(torch.equal(a.alpha[name], b.alpha[name]) for name in a.alpha) for a, b in pairwise(steps)]
    assert kept == [True, True, False, True, True]


@pytest.mark.parametrize("geometry", ["sample", "full"])
def test_the_model_is_no_part_of_the_criterion(geometry):
    run = Run(geometry=geometry)
    run.train(BATCHES[:1])
    assert not list(run.criterion.parameters())
    own = {tensor.data_ptr() for tensor in run.model.parameters()}
    assert not own & {buffer.data_ptr() for buffer in run.criterion.buffers()}
    assert not own & {value.data_ptr() for value in tensors_of(run.criterion).values()}
    assert not set(run.model.modules()) & set(run.criterion.modules())
    run.criterion.requires_grad_(False)
    assert all(parameter.requires_grad for parameter in run.model.parameters())
    run.criterion.eval()
    assert run.model.training


class Pair(nn.Module):
    """A user's module that holds both."""

    def __init__(self, model: Model, criterion: fairmt.FairMT, *, model_first: bool) -> None:
        super().__init__()
        if model_first:
            self.model, self.criterion = model, criterion
        else:
            self.criterion, self.model = criterion, model


def heads_seen(criterion: fairmt.FairMT) -> list[int]:
    assert criterion.heads.modules is not None
    return [id(module) for module in criterion.heads.modules]


def heads_of(model: Model) -> list[int]:
    return [id(head) for head in model.heads.values()]


def assert_looks_at(criterion: fairmt.FairMT, model: Model, geometry: str) -> None:
    assert heads_seen(criterion) == heads_of(model)
    if geometry == "full":
        loss = loss_of(criterion, model, BATCH)  # on another encoder's parameters this would raise, or be 0
        assert criterion.last is not None
        assert criterion.last.gram is not None
        assert (criterion.last.gram.K.diagonal() > 0).all()
        loss.backward()


@pytest.mark.parametrize("geometry", ["sample", "full"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_a_copy_of_the_criterion_looks_at_the_same_model(geometry, trained):
    run = Run(geometry=geometry)
    if trained:
        run.train(BATCHES[:2])
    clone = copy.deepcopy(run.criterion)
    assert_looks_at(clone, run.model, geometry)
    before = state_of(run.criterion)
    loss_of(clone, run.model, BATCH)
    assert_same_state(state_of(run.criterion), before)


@pytest.mark.parametrize("geometry", ["sample", "full"])
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "criterion first"])
@pytest.mark.parametrize("by", ["deepcopy", "pickle"])
def test_a_copy_of_both_looks_at_its_own_model(by, model_first, geometry):
    run = Run(geometry=geometry)
    run.train(BATCHES[:2])
    pair = Pair(run.model, run.criterion, model_first=model_first)
    clone = copy.deepcopy(pair) if by == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert not set(heads_of(clone.model)) & set(heads_of(run.model))
    assert_looks_at(clone.criterion, clone.model, geometry)
    assert len(list(clone.parameters())) == len(list(run.model.parameters()))
    assert heads_seen(run.criterion) == heads_of(run.model)


def test_a_copy_goes_on_as_the_original_would():
    run = Run()
    run.train(BATCHES[:3])
    pair = Pair(run.model, run.criterion, model_first=True)
    clone = copy.deepcopy(pair)
    for one in (pair, clone):
        one.zero_grad()
        loss_of(one.criterion, one.model, BATCHES[3]).backward()
    assert_same_state(gradients(clone.model), gradients(pair.model))
    assert_same_state(state_of(clone.criterion), state_of(pair.criterion))


def test_a_pickled_criterion_keeps_its_state():
    run = Run()
    run.train(BATCHES[:2])
    clone = pickle.loads(pickle.dumps(run.criterion))
    assert_same_state(state_of(clone), state_of(run.criterion))


@pytest.mark.parametrize("convert", [
    lambda module: module.half(),
    lambda module: module.float(),
    lambda module: module.bfloat16(),
    lambda module: module.to(torch.bfloat16),
    lambda module: module.to("cpu", torch.float16),
    lambda module: nn.Sequential(module).half()[0],
], ids=["half", "float", "bfloat16", "to bfloat16", "to cpu, float16", "inside another"])  # fmt: skip
def test_a_change_of_precision_leaves_the_state_as_it_is(convert):
    run = Run(max_utility_loss=0.1)
    run.train(BATCHES[:3])
    before = {name: buffer.clone() for name, buffer in run.criterion.named_buffers() if not name.endswith("met")}
    assert convert(run.criterion) is run.criterion
    after = {name: buffer for name, buffer in run.criterion.named_buffers() if not name.endswith("met")}
    assert_identical(after, before)
    for name, value in tensors_of(run.criterion).items():
        assert value.dtype in (torch.float64, torch.long), name


@pytest.mark.parametrize("linear", [True, False], ids=["linear heads", "other heads"])
@pytest.mark.parametrize("how", ["eval", "no_grad", "inference_mode", "eval, no_grad"])
def test_looking_moves_nothing(how, linear):
    run = Run(linear=linear, max_utility_loss=0.1)
    run.train(BATCHES[:2])
    before = state_of(run.criterion)
    if "eval" in how:
        run.criterion.eval()
    with torch.inference_mode(how == "inference_mode"), torch.set_grad_enabled(how == "eval"):
        loss = loss_of(run.criterion, run.model, BATCHES[2])
    assert torch.isfinite(loss)
    assert loss.requires_grad == (how == "eval")
    assert_same_state(state_of(run.criterion), before)
    run.criterion.train()
    if linear or how == "eval":  # without autograd the last α serves other heads
        assert torch.equal(loss_of(run.criterion, run.model, BATCHES[2]).detach(), loss.detach())


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_looking_at_a_bad_batch_moves_nothing_either(how):
    run = Run(nonfinite="skip")
    run.train(BATCHES[:2])
    before = state_of(run.criterion)
    run.criterion.train(how != "eval")
    with torch.set_grad_enabled(how == "eval"):
        features, logits = run.model(BATCH.inputs)
        run.criterion(features, {**logits, "ill": logits["ill"] * torch.nan}, BATCH.labels, BATCH.members)
    assert_same_state(state_of(run.criterion), before)


def test_under_eval_gradients_are_those_of_a_training_step():
    run = Run()
    run.train(BATCHES[:3])
    found = []
    for training in (False, True):
        run.criterion.train(training)
        run.model.zero_grad()
        loss_of(run.criterion, run.model, BATCHES[3]).backward()
        found.append(gradients(run.model))
    assert_same_state(*found)


def test_the_record_of_a_step_is_frozen():
    run = Run()
    run.train(BATCHES[:2])
    last = run.criterion.last
    assert last is not None
    with pytest.raises(FrozenInstanceError):
        last.eta = torch.zeros(())  # type: ignore[misc]
    tensors = {
        "eta": last.eta,
        "phi": last.phi,
        **{f"{field}/{name}": value for field in ("losses", "psi", "psi_hard", "weights", "alpha")
           for name, value in getattr(last, field).items()},
    }  # fmt: skip
    assert not any(value.requires_grad for value in tensors.values())
    kept = {name: value.clone() for name, value in tensors.items()}
    run.train(BATCHES[2:])
    assert run.criterion.last is not last
    assert_identical(tensors, kept)


def test_a_record_names_what_there_is():
    run = Run()
    (step,) = run.train([BATCH])
    names = ["ill", "traits/tall", "traits/calm", "health", "pressure"]
    assert list(step.losses) == list(step.alpha) == list(step.active) == names
    columns = ["ill", "traits/tall", "traits/calm", "health=0", "health=1", "health=2", "pressure"]
    attributes = ["gender", "race", "gender*race"]
    assert list(step.psi) == [f"{attribute}/{column}" for attribute in attributes for column in columns]
    assert step.psi.keys() == step.psi_hard.keys() == step.weights.keys()
    assert float(sum(step.weights.values())) == pytest.approx(1)
    assert float(step.phi) == pytest.approx(float(sum(step.weights[name] * step.psi[name] for name in step.psi)))
