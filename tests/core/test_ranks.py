"""Several processes on shards of a batch are one process on the whole batch.

The processes are started once and run all cases; each test then looks at what came of one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fairmt
from tests.core.models import Problem, criterion_for, gradients, loss_of, model_for, problem, state_of

pytestmark = pytest.mark.distributed

WORLD = 2
ROWS = 26

Shard = Callable[[Problem], Tensor]
"""Which rows are the second process's; the first has the others."""

SHARDS: dict[str, Shard] = {
    "uneven": lambda batch: torch.arange(len(batch)) >= 17,
    "one row": lambda batch: torch.arange(len(batch)) == 0,
    "empty": lambda batch: torch.zeros(len(batch), dtype=torch.bool),
    "all": lambda batch: torch.ones(len(batch), dtype=torch.bool),
    "without a task": lambda batch: batch.labels["ill"].isnan() | (batch.labels["health"] < 0),
    "without a group": lambda batch: batch.members["gender"] == 0,
    "without a label": lambda batch: torch.arange(len(batch)) % 4 == 0,  # and those rows lose theirs
}


@dataclass(frozen=True)
class Case:
    """One way to train, and how the rows are dealt out."""

    shard: str = "uneven"
    linear: bool = True
    weighted: bool = False
    paper: bool = False
    adam: bool = False
    steps: int = 4
    poison: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def batches(self) -> Iterator[Problem]:
        for step in range(self.steps):
            batch = problem(ROWS, seed=step)
            if self.shard == "without a label":
                batch = batch.unlabelled(self.second(batch))
            if self.weighted:
                draw = torch.Generator().manual_seed(step)
                weight = torch.rand(ROWS, generator=draw, dtype=torch.float64)
                batch = replace(batch, sample_weight=weight * (weight > 0.2))
            yield batch

    def second(self, batch: Problem) -> Tensor:
        return SHARDS[self.shard](batch)

    def shard_of(self, batch: Problem, rank: int | None) -> Problem:
        if rank is None:
            return batch
        second = self.second(batch)
        return batch.rows(second if rank == 1 else ~second)


CASES = {
    "sample": Case(),
    "mean": Case(options={"geometry": "mean"}),
    "feature": Case(options={"geometry": "feature"}),
    "full": Case(options={"geometry": "full"}),
    "sample, other heads": Case(linear=False),
    "feature, other heads": Case(linear=False, options={"geometry": "feature"}),
    "full, other heads": Case(linear=False, options={"geometry": "full"}),
    **{f"sample, {shard}": Case(shard) for shard in SHARDS if shard != "uneven"},
    **{f"other heads, {shard}": Case(shard, linear=False) for shard in SHARDS if shard != "uneven"},
    **{f"mean, {shard}": Case(shard, options={"geometry": "mean"}) for shard in ("empty", "without a label")},
    "full, empty": Case("empty", linear=False, options={"geometry": "full"}),
    "sample weights": Case(weighted=True),
    "sample weights, mean": Case(weighted=True, options={"geometry": "mean"}),
    "symmetric": Case(options={"asymmetric": False, "beta": 0.3}),
    "budget": Case(options={"max_utility_loss": 0.05, "memory": 2}),
    "alpha every 2": Case(linear=False, options={"alpha_every": 2}),
    "sum": Case(options={"encoder_scale": "sum", "gradient_norm": "l2"}),
    "uniform": Case(linear=False, options={"weighting": "uniform", "aggregation": "max", "dual_on": "soft"}),
    "no moments": Case(paper=True),
    "adam": Case(adam=True, steps=6),
    "not finite": Case(poison=2, options={"nonfinite": "skip"}),
    "not finite, other heads": Case(linear=False, poison=2, options={"nonfinite": "skip"}),
}


def trained(case: Case, rank: int | None) -> list[dict[str, Any]]:
    """What each step leaves behind, on one process (None) or as one of several."""
    batches = list(case.batches())
    model = model_for(batches[0], linear=case.linear)
    if case.paper:
        criterion = fairmt.FairMT.paper(batches[0].tasks, batches[0].groups, model.heads, eta_step=5.0)
    else:
        criterion = criterion_for(batches[0], model, **case.options)
    wrapped: nn.Module = model if rank is None else DistributedDataParallel(model)
    optimiser: torch.optim.Optimizer
    if case.adam:
        optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    else:
        # A skipped batch gives no gradient, which DistributedDataParallel turns into zeros: momentum tells these apart.
        momentum = 0.9 if case.poison is None else 0.0
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    record = []
    for step, batch in enumerate(batches):
        shard = case.shard_of(batch, rank)
        optimiser.zero_grad()
        features, logits = wrapped(shard.inputs)
        if step == case.poison and rank != 0:  # in one row of one process
            last_row = torch.arange(len(shard)) == len(shard) - 1
            logits["ill"] = logits["ill"] + torch.where(last_row, torch.inf, 0).unsqueeze(1)
        loss = criterion(features, logits, shard.labels, shard.members, shard.sample_weight)
        loss.backward()
        optimiser.step()
        last = criterion.last
        assert last is not None
        kkt = criterion.kkt()
        record.append(
            {
                "loss": loss.detach(),
                "gradients": gradients(model, none_is_zero=True),  # a skipped batch gives none
                "parameters": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
                "state": state_of(criterion),
                "eta": last.eta,
                "phi": last.phi,
                "active": last.active,
                "kkt": torch.tensor([kkt.violation, kkt.slackness, kkt.stationarity]),
                "above": [(entry.entry, entry.worst_group, entry.best_group) for entry in kkt.above],
                **{name: copy.copy(getattr(last, name)) for name in ("losses", "psi", "psi_hard", "weights", "alpha")},
            }
        )
    return record


def refused(change: Callable[[Problem], None], rank: int) -> dict[str, Any]:
    """A shard that is bad on the second process only, then a good one."""
    batch = problem(ROWS)
    model = model_for(batch)
    criterion = criterion_for(batch, model)
    before = state_of(criterion)
    shard = Case().shard_of(batch, rank)
    bad = copy.deepcopy(replace(shard, sample_weight=torch.ones(len(shard), dtype=torch.float64)))
    if rank == 1:
        change(bad)
    try:
        loss_of(criterion, model, bad)
        error = None
    except fairmt.FairMTError as met:
        error = str(met)
    same = all(torch.equal(a, b) for a, b in zip(_tensors(before), _tensors(state_of(criterion)), strict=True))
    loss = loss_of(criterion, model, shard)
    return {"error": error, "same": same, "then": loss.detach()}


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def _bad_label(batch: Problem) -> None:
    batch.labels["ill"][2] = 2


def _bad_class(batch: Problem) -> None:
    batch.labels["health"][3] = 7


def _bad_member(batch: Problem) -> None:
    batch.members["race"][0] = 3


def _bad_weight(batch: Problem) -> None:
    assert batch.sample_weight is not None
    batch.sample_weight[1] = -1


def _not_finite(batch: Problem) -> None:
    batch.inputs[4, 0] = torch.nan


REFUSED = {
    "label": (_bad_label, r"labels['ill']: met 2 in row 2"),
    "class": (_bad_class, r"labels['health']: met 7 in row 3"),
    "member": (_bad_member, r"members['race']: met 3 in row 0"),
    "weight": (_bad_weight, r"sample_weight: met -1 in row 1"),
    "not finite": (_not_finite, "loss: met a value or a gradient that is not finite"),
}


def alone(how: str, rank: int) -> list[Tensor]:
    """Looking at a batch on the first process only, whatever the other does; then a step of both."""
    batch = problem(ROWS)
    model = model_for(batch, linear=False)
    criterion = criterion_for(batch, model)
    found = []
    loss_of(criterion, model, Case().shard_of(batch, rank))
    if rank == 0:
        if how == "eval":
            criterion.eval()
        with torch.no_grad() if how == "no_grad" else nullcontext():
            found.append(loss_of(criterion, model, batch).detach())
        criterion.train()
    loss_of(criterion, model, Case().shard_of(batch, rank))
    return [*found, criterion.eta.clone()]


ALONE = ("eval", "no_grad")


def work(rank: int, folder: str) -> None:
    """One process: runs all cases and stores what came of them, errors included."""
    torch.set_num_threads(1)
    start = f"file://{folder}/start"
    dist.init_process_group("gloo", start, timedelta(seconds=60), rank=rank, world_size=WORLD)
    jobs: dict[str, Callable[[], Any]] = {}
    jobs |= {f"train {name}": partial(trained, case, rank) for name, case in CASES.items()}
    jobs |= {f"refuse {name}": partial(refused, change, rank) for name, (change, _) in REFUSED.items()}
    jobs |= {f"alone {how}": partial(alone, how, rank) for how in ALONE}
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            found[name] = job()
        except Exception as error:  # the others go on; the case's own test shows it
            found[name] = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By process, what came of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def assert_close(one: Any, other: Any, where: str) -> None:
    """To 1e-9 of the size of what is compared."""
    if isinstance(other, Tensor):
        assert one.shape == other.shape, where
        size = 1 + other.double().abs().max() if other.numel() else 1
        torch.testing.assert_close(
            one.double() / size, other.double() / size, rtol=0, atol=1e-9, equal_nan=True, msg=where
        )
    elif isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in other:
            assert_close(one[key], other[key], f"{where}, {key}")
    else:
        assert one == other, where


@pytest.mark.parametrize("name", CASES)
def test_shards_of_a_batch_on_several_processes_equal_the_whole_on_one(name, found):
    whole = trained(CASES[name], None)
    for rank in range(WORLD):
        record = found[rank][f"train {name}"]
        assert not isinstance(record, str), record
        for step, (one, other) in enumerate(zip(record, whole, strict=True)):
            for what in other:
                assert_close(one[what], other[what], f"process {rank}, step {step}, {what}")


def test_the_cases_are_no_empty_show():
    """The multiplier and the memory have a say, and shards lack what they are to lack."""
    assert any(float(step["eta"]) > 0 for step in trained(CASES["sample"], None))
    for shard, lacking in (
        ("without a task", lambda batch: batch.labels["ill"].isnan().all() or (batch.labels["health"] < 0).all()),
        ("without a group", lambda batch: (batch.members["gender"] == 0).all()),
        ("without a label", lambda batch: all((y.isnan() | (y < 0)).all() for y in batch.labels.values())),
        ("empty", lambda batch: len(batch) == 0),
    ):
        case = Case(shard)
        shards = [case.shard_of(batch, rank) for batch in case.batches() for rank in range(WORLD)]
        assert any(lacking(one) for one in shards if shard == "empty" or len(one)), shard


def test_a_step_is_skipped_by_all_if_it_is_not_finite_on_one(found):
    for rank in range(WORLD):
        record = found[rank]["train not finite"]
        skipped, before = record[2], record[1]
        assert float(skipped["loss"]) == 0
        assert all(not gradient.any() for gradient in skipped["gradients"].values())
        assert int(skipped["state"]["skipped"]) == 1
        assert torch.equal(skipped["state"]["strength.eta"], before["state"]["strength.eta"])


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_value_on_one_process_is_refused_by_all(name, found):
    records = [found[rank][f"refuse {name}"] for rank in range(WORLD)]
    for record in records:
        assert not isinstance(record, str), record
        assert record["error"] is not None
        assert record["same"]
        assert torch.isfinite(record["then"])
    assert torch.equal(records[0]["then"], records[1]["then"])
    assert REFUSED[name][1] in records[1]["error"]
    if name != "not finite":
        assert "another rank met a bad value" in records[0]["error"]


@pytest.mark.parametrize("how", ALONE)
def test_looking_on_one_process_does_not_wait_for_the_others(how, found):
    first, second = (found[rank][f"alone {how}"] for rank in range(WORLD))
    assert not isinstance(first, str), first
    assert torch.isfinite(first[0])
    assert torch.equal(first[1], second[0])
