"""What must not matter to the criterion: orders, names' places, encodings, shapes, and rows that say nothing."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fairmt
from tests.core.problems import GROUPS, INPUTS, TASKS, Data, Model, data

EXACT = 1e-9
SEEDS = (31, 32, 33)
RHO = 0.05

Numbers = dict[str, float]


@dataclass
class Trace:
    """One step as numbers by name, and its gradients."""

    value: float
    losses: Numbers
    psi: Numbers
    psi_hard: Numbers
    weights: Numbers
    alpha: Numbers
    phi: float
    eta: float
    encoder: Tensor
    heads: dict[str, list[Tensor]]


def batches(**options: Any) -> list[Data]:
    return [data(seed, **options) for seed in SEEDS]


def run(
    steps: Sequence[Data], model: Model | None = None, *, tasks: Any = TASKS, groups: Any = GROUPS, **options: Any
) -> list[Trace]:
    """A fresh criterion over some batches, at a fixed model; η is above 0 from the second batch on."""
    model = model or Model()
    shared = list(model.encoder.parameters()) if options.get("geometry") == "full" else None
    criterion = fairmt.FairMT(tasks, groups, model.heads, shared=shared, **{"eta_step": RHO, **options})
    traces = []
    for batch in steps:
        features, logits = model(batch.inputs)
        loss = criterion(features, logits, batch.labels, batch.members, batch.sample_weight)
        traces.append(record(criterion, model, loss))
    assert traces[-1].eta > 0.5
    return traces


def record(criterion: fairmt.Criterion, model: Model, loss: Tensor) -> Trace:
    last = criterion.last
    assert last is not None
    parameters = list(model.parameters())
    found = dict(
        zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True), strict=True)
    )

    def numbers(values: dict[str, Tensor]) -> Numbers:
        return {name: float(value) for name, value in values.items()}

    return Trace(
        value=float(loss.detach()),
        losses=numbers(last.losses),
        psi=numbers(last.psi),
        psi_hard=numbers(last.psi_hard),
        weights=numbers(last.weights),
        alpha=numbers(last.alpha),
        phi=float(last.phi),
        eta=float(last.eta),
        encoder=torch.cat([found[parameter].flatten() for parameter in model.encoder.parameters()]),
        heads={name: [found[parameter] for parameter in head.parameters()] for name, head in model.heads.items()},
    )


def near(one: Tensor, other: Tensor, tolerance: float = EXACT) -> bool:
    return bool((one - other).norm() <= tolerance * other.norm() + 1e-300)


FAIRNESS = ("psi", "psi_hard", "weights", "phi")
RECORD = ("value", "losses", "alpha", "eta", *FAIRNESS)


def same(one: Sequence[Trace], other: Sequence[Trace], *, heads: bool = True, tolerance: float = EXACT) -> None:
    """All of the record by name, and the gradients."""
    for first, second in zip(one, other, strict=True):
        for name in RECORD:
            wanted = getattr(second, name)
            if isinstance(wanted, dict):
                assert set(getattr(first, name)) == set(wanted), name
            assert getattr(first, name) == pytest.approx(wanted, rel=tolerance, abs=tolerance / 100), name
        assert near(first.encoder, second.encoder, tolerance)
        assert first.heads.keys() == second.heads.keys()
        if heads:
            for name, parts in first.heads.items():
                assert all(near(a, b, tolerance) for a, b in zip(parts, second.heads[name], strict=True)), name


def change(steps: Sequence[Data], how: Callable[[Data], Data]) -> list[Data]:
    return [how(batch) for batch in steps]


# Orders and places


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("geometry", ["sample", "mean", "feature", "full"])
def test_the_order_of_rows(geometry: str, weighted: bool) -> None:
    steps = batches(weighted=weighted)
    generator = torch.Generator().manual_seed(1)
    shuffled = change(steps, lambda batch: batch.take(torch.randperm(batch.rows, generator=generator)))
    same(run(shuffled, geometry=geometry), run(steps, geometry=geometry))


@pytest.mark.parametrize("race", [[1, 2, 0], [0, 2, 1]])
@pytest.mark.parametrize("asymmetric", [True, False])
def test_the_numbers_of_groups(asymmetric: bool, race: list[int]) -> None:
    names = {"sex": [1, 0], "race": race}

    def rename(batch: Data) -> Data:
        codes = {name: torch.tensor([*new, -1])[batch.members[name].long()] for name, new in names.items()}
        return replace(batch, members=codes)

    steps = batches()
    same(run(change(steps, rename), asymmetric=asymmetric), run(steps, asymmetric=asymmetric))


@pytest.mark.parametrize("geometry", ["sample", "mean", "feature", "full"])
def test_the_order_in_which_tasks_and_attributes_are_given(geometry: str) -> None:
    steps, model = batches(), Model()
    backwards: dict[str, Any] = dict(reversed(TASKS.items()))
    groups: dict[str, Any] = {"race": 3, "sex": 2} | fairmt.cross("sex", "race")

    def turn(batch: Data) -> Data:
        return replace(batch, members=dict(reversed(batch.members.items())))

    turned = run(change(steps, turn), model, tasks=backwards, groups=groups, geometry=geometry)
    plain = run(steps, model, geometry=geometry)
    same(turned, plain)
    assert list(plain[0].alpha) == list(reversed_by_head(turned[0].alpha)), "alpha is in the user's order"


def reversed_by_head(alpha: Numbers) -> list[str]:
    heads = list(dict.fromkeys(name.split("/")[0] for name in alpha))
    return [name for head in reversed(heads) for name in alpha if name.split("/")[0] == head]


def test_the_order_of_columns_and_classes() -> None:
    """Columns and classes at other places, with their names, labels and weights at the heads."""
    new = {"signs": [2, 0, 1], "load": [1, 0], "pair": [1, 0], "kind": [3, 1, 0, 2]}
    tasks = {
        **TASKS,
        "signs": replace(TASKS["signs"], names=["c", "a", "b"]),
        "load": replace(TASKS["load"], names=["y", "x"], scale=[7.0, 4.0]),
        "pair": replace(TASKS["pair"], weight=[3.0, 0.5]),
    }
    model, moved = Model(), Model()
    for name, order in new.items():
        head = moved.heads[name]
        assert isinstance(head, torch.nn.Linear)
        head.weight.data, head.bias.data = head.weight.data[order], head.bias.data[order]

    def move(batch: Data) -> Data:
        labels = {name: y[:, new[name]] if name in new and name != "kind" else y for name, y in batch.labels.items()}
        place = torch.tensor([new["kind"].index(k) for k in range(4)])
        kind = labels["kind"]
        labels["kind"] = torch.where(kind >= 0, place[kind.clamp(min=0)], kind)
        return replace(batch, labels=labels)

    def rename(values: Numbers) -> Numbers:
        """From the moved problem's names to the original's, where a name is a place."""
        table = {f"pair/{i}": f"pair/{old}" for i, old in enumerate(new["pair"])}
        table |= {f"kind={i}": f"kind={old}" for i, old in enumerate(new["kind"])}
        found = {}
        for name, value in values.items():
            attribute, slash, column = name.partition("/")
            entry = f"{attribute}{slash}{table.get(column, column)}"
            found[table.get(name, entry)] = value
        return found

    steps = batches()
    plain, after = run(steps, model), run(change(steps, move), moved, tasks=tasks)
    for trace in after:
        for name in ("losses", "psi", "psi_hard", "weights", "alpha"):
            setattr(trace, name, rename(getattr(trace, name)))
    same(after, plain, heads=False)
    for first, second in zip(after, plain, strict=True):
        for name, parts in second.heads.items():
            order = new.get(name, list(range(len(parts[0]))))
            assert all(near(a, b[order]) for a, b in zip(first.heads[name], parts, strict=True)), name


# Rows that say nothing


def blank(rows: int, seed: int) -> Data:
    """Rows with inputs and groups and no label."""
    full = data(seed, rows=rows, missing=0.0)
    full.labels["seen"] = full.labels["seen"].to(torch.int8)  # a boolean can't be missing
    return full.without(*TASKS)


def joined(one: Data, other: Data) -> Data:
    def both(name: str) -> Tensor:
        first, second = one.labels[name], other.labels[name]
        return torch.cat((first.to(second.dtype), second))

    weight = None
    if one.sample_weight is not None and other.sample_weight is not None:
        weight = torch.cat((one.sample_weight, other.sample_weight))
    return Data(
        torch.cat((one.inputs, other.inputs)),
        {name: both(name) for name in one.labels},
        {name: torch.cat((one.members[name], other.members[name])) for name in one.members},
        weight,
    )


@pytest.mark.parametrize("gradient_norm", ["loss+", "none"])
@pytest.mark.parametrize(("geometry", "linear"), [("sample", True), ("mean", True), ("feature", False), ("full", True)])
def test_rows_without_a_label(geometry: str, linear: bool, gradient_norm: str) -> None:
    steps, options = batches(), {"geometry": geometry, "gradient_norm": gradient_norm}
    more = change(steps, lambda batch: joined(batch, blank(7, 90)))
    model = Model(linear=linear)
    same(run(more, model, **options), run(steps, model, **options))


def test_rows_of_weight_zero() -> None:
    def heavier(batch: Data, extra: float) -> Data:
        weighted = replace(batch, sample_weight=torch.ones(batch.rows, dtype=torch.float64))
        idle = data(91, rows=9)
        return joined(weighted, replace(idle, sample_weight=torch.full((idle.rows,), extra, dtype=torch.float64)))

    steps = batches()
    same(run(change(steps, lambda batch: heavier(batch, 0.0))), run(steps))
    with pytest.raises(AssertionError):
        same(run(change(steps, lambda batch: heavier(batch, 0.1))), run(steps))


def test_people_of_unknown_groups_say_nothing_of_fairness() -> None:
    """They count in the losses, and in the running scale of a regression, but in no rate."""
    tasks = {**TASKS, "level": fairmt.Regression(2, scale=3.0), "pace": fairmt.Regression(loss="mae", scale=1.0)}

    def more(batch: Data) -> Data:
        strangers = data(92, rows=8)
        unknown = {name: torch.full_like(code, -1) for name, code in strangers.members.items()}
        return joined(batch, replace(strangers, members=unknown))

    steps = batches()
    with_them, without = run(change(steps, more), tasks=tasks), run(steps, tasks=tasks)
    for first, second in zip(with_them, without, strict=True):
        for name in ("psi", "psi_hard", "weights", "phi", "eta"):
            assert getattr(first, name) == pytest.approx(getattr(second, name), rel=EXACT)
        assert all(abs(first.losses[name] - second.losses[name]) > 1e-6 for name in second.losses)


def test_a_person_unknown_in_one_attribute_counts_in_the_other() -> None:
    steps = batches()
    plain = run(steps)

    def unknown(batch: Data) -> Data:
        return replace(batch, members={**batch.members, "race": torch.full_like(batch.members["race"], -1)})

    partly = run(change(steps, unknown))
    for first, second in zip(partly, plain, strict=True):
        assert first.losses == second.losses
        assert first.psi == pytest.approx({n: v for n, v in second.psi.items() if n.startswith("sex/")}, rel=EXACT)


@pytest.mark.parametrize("geometry", ["sample", "mean", "full"])
def test_the_size_of_sample_weights(geometry: str) -> None:
    steps = batches(weighted=True)

    def times(factor: float) -> list[Data]:
        return [replace(b, sample_weight=None if b.sample_weight is None else factor * b.sample_weight) for b in steps]

    plain = run(steps, geometry=geometry)
    same(run(times(1e4), geometry=geometry), plain)
    same(run(times(1e-4), geometry=geometry), plain)


def test_weights_of_one() -> None:
    steps = batches()
    ones = change(steps, lambda b: replace(b, sample_weight=torch.ones(b.rows, dtype=torch.float32)))
    same(run(ones), run(steps))


def test_a_whole_weight_is_that_many_rows() -> None:
    """At the encoder's parameters; at the features, rows apart meet otherwise than one heavy row."""
    steps = batches()
    counts = [torch.randint(1, 4, (b.rows,), generator=torch.Generator().manual_seed(i)) for i, b in enumerate(steps)]
    heavy = [replace(b, sample_weight=c.double()) for b, c in zip(steps, counts, strict=True)]
    copied = [b.take(torch.arange(b.rows).repeat_interleave(c)) for b, c in zip(steps, counts, strict=True)]
    for geometry in ("mean", "full"):
        same(run(heavy, memory=1, geometry=geometry), run(copied, memory=1, geometry=geometry))


# Encodings and shapes


def encoded(how: str) -> Callable[[Data], Data]:
    def detection(y: Tensor) -> Tensor:
        missing = y.isnan() if y.is_floating_point() else y < 0 if y.dtype != torch.bool else torch.zeros_like(y)
        value = torch.where(missing, 0, y)
        if how == "floats":
            return value.float().masked_fill(missing, torch.nan)
        if how == "halves":
            return value.bfloat16().masked_fill(missing, torch.nan)
        if how == "small":
            return value.to(torch.int8).masked_fill(missing, -100)
        return value.long().masked_fill(missing, -1)

    def regression(y: Tensor) -> Tensor:
        return y.double()

    def apply(batch: Data) -> Data:
        labels = {
            name: regression(y) if isinstance(TASKS[name], fairmt.Regression) else detection(y)
            for name, y in batch.labels.items()
        }
        return replace(batch, labels=labels)

    return apply


@pytest.mark.parametrize("how", ["floats", "halves", "ints", "small"])
def test_the_encoding_of_labels(how: str) -> None:
    steps = batches()
    same(run(change(steps, encoded(how))), run(steps), tolerance=1e-14)


def test_complete_labels_as_booleans_and_unsigned_integers() -> None:
    steps = batches(missing=0.0)

    def tight(batch: Data) -> Data:
        own = dict(batch.labels)
        for name in ("signs", "ill", "pair", "seen"):
            own[name] = own[name].bool()
        for name in ("kind", "mood"):
            own[name] = own[name].to(torch.uint8)
        own["load"] = own["load"].to(torch.int16)
        return replace(batch, labels=own)

    same(run(change(steps, tight)), run(steps), tolerance=1e-14)


def test_nothing_given_is_nothing_known() -> None:
    """None for a head's labels or an attribute's members is a whole batch without."""
    steps, model = batches(), Model()
    absent = [b.without("signs", "kind", "dose") for b in steps]
    absent = [replace(b, members={**b.members, "sex": torch.full_like(b.members["sex"], -1)}) for b in absent]

    def none(batch: Data) -> Data:
        labels: dict[str, Any] = {**batch.labels, "signs": None, "kind": None, "dose": None}
        members: dict[str, Any] = {**batch.members, "sex": None}
        return replace(batch, labels=labels, members=members)

    same(run(change(absent, none), model), run(absent, model), tolerance=1e-14)


@pytest.mark.parametrize("linear", [True, False])
def test_one_column_with_or_without_its_axis(linear: bool) -> None:
    model = Model(linear=linear)
    narrow = [name for name, head in TASKS.items() if not isinstance(head, fairmt.Classification) and head.n == 1]
    assert len(narrow) == 4
    found = []
    for flat in (True, False):
        criterion = fairmt.FairMT(TASKS, GROUPS, model.heads, eta_step=RHO)
        traces = []
        for batch in batches():
            features, logits = model(batch.inputs)
            shape = (batch.rows,) if flat else (batch.rows, 1)
            logits = {name: z.reshape(shape) if name in narrow else z for name, z in logits.items()}
            single = [*narrow, "kind", "mood"]
            labels = {name: y.reshape(shape) if name in single else y for name, y in batch.labels.items()}
            members = {name: code.reshape(shape) for name, code in batch.members.items()}
            traces.append(record(criterion, model, criterion(features, logits, labels, members)))
        found.append(traces)
    same(*found, tolerance=1e-14)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_the_integers_of_members(dtype: torch.dtype) -> None:
    steps = batches()
    cast = change(steps, lambda b: replace(b, members={name: code.to(dtype) for name, code in b.members.items()}))
    same(run(cast), run(steps), tolerance=1e-14)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2), (torch.float16, 0.03)], ids=str
)
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Features and logits in another precision than labels: the values are those of float64, rounded."""
    batch, model = data(31), Model()
    plain = run([batch, batch], model)[0]
    features, logits = model(batch.inputs)
    leaf = features.detach().to(dtype).requires_grad_()
    heads = {name: z.detach().to(dtype).requires_grad_() for name, z in logits.items()}
    labels = {name: y.float() if y.dtype == torch.float64 else y for name, y in batch.labels.items()}
    criterion = fairmt.FairMT(TASKS, GROUPS, model.heads, eta_step=RHO)
    loss = criterion(leaf, heads, labels, batch.members)
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    assert all(z.grad is not None and z.grad.dtype == dtype and bool(z.grad.isfinite().all()) for z in heads.values())
    assert criterion.last is not None
    losses = {name: float(value) for name, value in criterion.last.losses.items()}
    assert losses == pytest.approx(plain.losses, rel=tolerance, abs=tolerance)
    assert float(criterion.last.phi) == pytest.approx(plain.phi, rel=tolerance)


@pytest.mark.parametrize("deviation", [1e-9, 1e-5, 1.0, 1e5])
def test_labels_of_any_size_in_single_precision(deviation: float) -> None:
    """Small numbers in a label's own unit are no small gaps; and a group may be absent from a batch."""
    tasks: dict[str, Any] = {"pace": fairmt.Regression(), "ill": fairmt.Detection()}

    def steps(size: float) -> list[tuple[dict[str, float], Tensor]]:
        generator = torch.Generator().manual_seed(3)
        criterion, found = fairmt.FairMT(tasks, {"sex": 2}, eta_step=RHO), []
        for absent in (None, 0, 1):
            features = torch.randn(12, 4, generator=generator).requires_grad_()
            pace, sex = torch.randn(12, generator=generator), torch.arange(12) % 2
            labels = {
                "pace": (size * pace).masked_fill(sex == (-1 if absent is None else absent), torch.nan),
                "ill": torch.arange(12) % 3 > 0,
            }
            logits = {"pace": size * features[:, 0], "ill": features[:, 1:].sum(1)}
            (gradient,) = torch.autograd.grad(criterion(features, logits, labels, {"sex": sex}), features)
            assert criterion.last is not None
            found.append(({name: float(psi) for name, psi in criterion.last.psi.items()}, gradient))
        return found

    for (psi, gradient), (wanted, _) in zip(steps(deviation), steps(1.0), strict=True):
        assert psi == pytest.approx(wanted, rel=1e-3)
        assert bool(gradient.isfinite().all())
        assert bool(gradient.any())


@pytest.mark.parametrize(("dtype", "classes"), [(torch.int8, 200), (torch.uint8, 300)], ids=str)
def test_more_classes_than_the_labels_dtype_has_numbers(dtype: torch.dtype, classes: int) -> None:
    labels = torch.tensor([100, 0, 3, 100], dtype=dtype)
    found = []
    for y in (labels, labels.long()):
        features = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_()
        logits = features @ torch.linspace(-1, 1, 3 * classes).sin().view(3, classes)
        criterion = fairmt.FairMT({"kind": fairmt.Classification(classes)}, {"sex": 2})
        loss = criterion(features, {"kind": logits}, {"kind": y}, {"sex": torch.tensor([0, 1, 0, 1])})
        found.append(torch.autograd.grad(loss, features)[0])
    assert torch.equal(*found)


# What the record holds


def simple(members: list[int], labels: list[int]) -> Data:
    inputs = torch.linspace(-1, 1, len(members) * INPUTS, dtype=torch.float64).view(-1, INPUTS)
    answers = torch.tensor(labels)
    return Data(inputs, {"ill": answers, "pace": answers.double()}, {"sex": torch.tensor(members)})


SIMPLE: dict[str, Any] = {"ill": fairmt.Detection(), "pace": fairmt.Regression()}


def test_the_record_holds_active_tasks_and_measured_entries_only() -> None:
    batch = data(31).without("kind", "signs")
    members = {**batch.members, "race": torch.where(batch.members["race"] == 0, 0, -1)}
    model = Model()
    criterion = fairmt.FairMT(TASKS, GROUPS, model.heads)
    features, logits = model(batch.inputs)
    criterion(features, logits, batch.labels, members)
    last = criterion.last
    assert last is not None
    gone = {"signs/a", "signs/b", "signs/c", "kind"}
    everything = set(criterion.layout.task_names)
    assert set(last.active) == set(last.losses) == everything - gone
    assert set(last.alpha) == everything
    assert all(float(last.alpha[name]) == 0 for name in gone)
    columns = {"level/0", "level/1", "ill", "pace", "pair/0", "pair/1", "mood=0", "mood=1", "mood=2"}
    columns |= {"dose", "load/x", "load/y", "seen"}
    # One group of race is left: nothing to compare there. In the intersection there are two groups.
    assert set(last.psi) == set(last.weights) == {f"{name}/{c}" for name in ("sex", "sex*race") for c in columns}
    for values in (last.losses, last.psi, last.weights, last.alpha):
        assert not any(value.requires_grad for value in values.values())
        assert all(value.ndim == 0 for value in values.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        last.eta = last.phi  # type: ignore[misc]


def test_an_entry_stays_while_two_groups_are_remembered() -> None:
    model = Model(tasks=SIMPLE)
    criterion = fairmt.FairMT(SIMPLE, {"sex": 2}, model.heads, memory=2)

    def entries(members: list[int], labels: list[int]) -> set[str]:
        batch = simple(members, labels)
        features, logits = model(batch.inputs)
        criterion(features, logits, batch.labels, batch.members)
        assert criterion.last is not None
        return set(criterion.last.psi)

    # Two positives of group 0 and three rows of group 1, all negatives: only the regression has two groups.
    assert entries([0, 0, 1, 1, 1], [1, 1, 0, 0, 0]) == {"sex/pace"}
    # Group 1's first positive: group 0's two count half and are one row still.
    assert entries([1], [1]) == {"sex/pace", "sex/ill"}
    # Now they are half a row, and group 0 is no longer measured at all.
    assert entries([1], [1]) == set()
    # Back again; of group 1 three quarters of a positive are left, and more than a row in all.
    assert entries([0], [1]) == {"sex/pace"}
    assert entries([0, 1], [1, 1]) == {"sex/pace", "sex/ill"}


def state(criterion: fairmt.Criterion) -> dict[str, Any]:
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in criterion.state_dict().items()}


def unmoved(criterion: fairmt.Criterion, before: dict[str, Any], *, but: str = "nothing") -> bool:
    after = criterion.state_dict()
    return before.keys() == after.keys() and all(
        torch.equal(value, after[name]) if isinstance(value, Tensor) else value == after[name] or but in name
        for name, value in before.items()
    )


@pytest.mark.parametrize(
    ("geometry", "linear"), [("sample", True), ("mean", True), ("feature", False), ("full", False)]
)
@pytest.mark.parametrize("rows", [0, 7])
def test_a_batch_without_any_label_is_a_loss_of_zero(geometry: str, linear: bool, rows: int) -> None:
    model = Model(linear=linear)
    shared = list(model.encoder.parameters()) if geometry == "full" else None
    criterion = fairmt.FairMT(TASKS, GROUPS, model.heads, geometry=geometry, shared=shared, eta_step=RHO)  # type: ignore[arg-type]
    for batch in batches():
        features, logits = model(batch.inputs)
        criterion(features, logits, batch.labels, batch.members)
    before, empty = state(criterion), blank(7, 93).take(torch.arange(rows))
    features, logits = model(empty.inputs)
    loss = criterion(features, logits, empty.labels, empty.members)
    assert loss.shape == ()
    assert float(loss.detach()) == 0
    loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    assert criterion.last is not None
    assert criterion.last.active == ()
    assert criterion.last.losses == {}
    assert not any(float(value) for value in criterion.last.alpha.values())
    assert unmoved(criterion, before, but="extra_state")


@pytest.mark.parametrize("how", ["eval", "no_grad", "both"])
def test_nothing_moves_outside_of_training(how: str) -> None:
    model = Model()
    criterion = fairmt.FairMT(TASKS, GROUPS, model.heads, eta_step=RHO)
    steps = batches()
    for batch in steps[:2]:
        features, logits = model(batch.inputs)
        criterion(features, logits, batch.labels, batch.members)
    before = state(criterion)
    criterion.train(how == "no_grad")
    with torch.set_grad_enabled(how == "eval"):
        features, logits = model(steps[2].inputs)
        loss = criterion(features, logits, steps[2].labels, steps[2].members)
    assert unmoved(criterion, before)
    assert loss.requires_grad == (how == "eval")
    criterion.train()
    features, logits = model(steps[2].inputs)
    trained = criterion(features, logits, steps[2].labels, steps[2].members)
    assert not unmoved(criterion, before)
    if how == "eval":
        assert float(loss.detach()) == pytest.approx(float(trained.detach()), rel=1e-12)
    assert bool(loss.isfinite())


def test_a_resumed_run_is_the_unbroken_one() -> None:
    steps, model = batches(), Model()
    whole = run(steps, model)
    first = fairmt.FairMT(TASKS, GROUPS, model.heads, eta_step=RHO)
    second = fairmt.FairMT(TASKS, GROUPS, model.heads, eta_step=RHO)
    traces = []
    for number, batch in enumerate(steps):
        if number == 2:
            second.load_state_dict(first.state_dict())
        criterion = first if number < 2 else second
        features, logits = model(batch.inputs)
        loss = criterion(features, logits, batch.labels, batch.members)
        traces.append(record(criterion, model, loss))
    same(traces, whole, tolerance=1e-15)
