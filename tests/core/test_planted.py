"""The planted problem keeps what it promises: its shapes, its shares, and a minority that could be served."""

import math

import pytest
import torch
from torch import Tensor

from fairmt.data.planted import MAJORITY, MINORITY, Planted, planted
from fairmt.errors import FairMTError

ROWS = 20_000


@pytest.fixture(scope="module")
def train() -> Planted:
    return planted(ROWS, seed=0, dtype=torch.float64)


@pytest.fixture(scope="module")
def test() -> Planted:
    return planted(ROWS, seed=1, dtype=torch.float64)


def of_group(data: Planted, group: int) -> Planted:
    return data.take(data.members["group"] == group)


def everything(data: Planted) -> list[Tensor]:
    return [data.inputs, *data.labels.values(), *data.members.values()]


def same(first: Planted, second: Planted) -> bool:
    pairs = zip(everything(first), everything(second), strict=True)
    return all(torch.allclose(a, b, equal_nan=True) for a, b in pairs)


def targets(data: Planted) -> Tensor:
    """What a least-squares fit can be asked for: signs and kinds as −1 and 1, and the numbers. `(N, 9)`."""
    kinds = torch.nn.functional.one_hot(data.labels["kind"], 4).to(data.inputs.dtype)
    numbers = torch.stack([data.labels["level"], data.labels["pace"]], dim=1)
    return torch.cat([2 * data.labels["signs"] - 1, 2 * kinds - 1, numbers], dim=1)


def with_constant(inputs: Tensor) -> Tensor:
    return torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], dim=1)


def fit(data: Planted) -> Tensor:
    """The least-squares fit of all tasks, with an intercept, in closed form."""
    design = with_constant(data.inputs)
    return torch.linalg.solve(design.T @ design, design.T @ targets(data))


def quality(coefficients: Tensor, data: Planted) -> tuple[float, float, float]:
    """Of a fit on some rows: accuracies of the signs and of the kinds, explained variance of the numbers."""
    guess = with_constant(data.inputs) @ coefficients
    signs = ((guess[:, :3] > 0) == (data.labels["signs"] == 1)).double().mean().item()
    kinds = (guess[:, 3:7].argmax(dim=1) == data.labels["kind"]).double().mean().item()
    truth = targets(data)[:, 7:]
    explained = 1 - ((guess[:, 7:] - truth).square().mean() / truth.var()).item()
    return signs, kinds, explained


def test_a_seed_always_draws_the_same_rows() -> None:
    first = planted(500, seed=3, missing=0.2, unknown=0.2)
    torch.manual_seed(99)  # the global generator has no say
    assert same(first, planted(500, seed=3, missing=0.2, unknown=0.2))


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    planted(50, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_another_seed_draws_other_rows_and_another_world_other_laws() -> None:
    data = planted(500, seed=3)
    assert not torch.allclose(data.inputs, planted(500, seed=4).inputs)
    elsewhere = planted(500, seed=3, world=1)
    assert torch.equal(data.inputs, elsewhere.inputs)
    assert not torch.allclose(data.labels["level"], elsewhere.labels["level"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_types(dtype: torch.dtype) -> None:
    data = planted(64, seed=0, missing=0.3, unknown=0.3, dtype=dtype)
    assert len(data) == 64
    assert data.inputs.shape == (64, 22)
    assert data.inputs.dtype == dtype
    assert {name: tuple(values.shape) for name, values in data.labels.items()} == {
        "signs": (64, 3), "kind": (64,), "level": (64,), "pace": (64,)
    }  # fmt: skip
    assert data.labels["kind"].dtype == torch.int64
    assert {data.labels[name].dtype for name in ("signs", "level", "pace")} == {dtype}
    assert all(values.dtype == torch.int64 and values.shape == (64,) for values in data.members.values())
    assert data.tasks.keys() == data.labels.keys()
    assert data.groups.keys() == data.members.keys()


def test_label_and_member_ranges(train: Planted) -> None:
    assert train.labels["signs"].unique().tolist() == [0, 1]
    assert train.labels["kind"].unique().tolist() == [0, 1, 2, 3]
    assert train.labels["level"].isfinite().all()
    assert train.labels["pace"].isfinite().all()
    assert {name: len(values.unique()) for name, values in train.members.items()} == dict(train.groups)
    assert train.members["group"].unique().tolist() == [MAJORITY, MINORITY]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_missing_and_unknown_shares(share: float) -> None:
    data = planted(ROWS, seed=0, missing=share, unknown=share)
    columns = [*data.labels["signs"].isnan().unbind(1), data.labels["kind"] == -100]
    columns += [data.labels["level"].isnan(), data.labels["pace"].isnan()]
    columns += [values == -1 for values in data.members.values()]
    together = torch.stack(columns).double()
    error = 4 * math.sqrt(share * (1 - share) / ROWS)
    assert (together.mean(dim=1) - share).abs().max() <= error
    joint = (together @ together.T / ROWS).fill_diagonal_(share**2)  # hidden independently of one another
    assert (joint - share**2).abs().max() <= error


def test_hiding_changes_nothing_else() -> None:
    whole, part = planted(300, seed=5), planted(300, seed=5, missing=0.4, unknown=0.4)
    assert torch.equal(whole.inputs, part.inputs)
    for name, values in part.labels.items():
        shown = values != -100 if name == "kind" else ~values.isnan()
        assert torch.equal(values[shown], whole.labels[name][shown])
    for name, values in part.members.items():
        assert torch.equal(values[values >= 0], whole.members[name][values >= 0])


def test_the_type_does_not_change_the_draw() -> None:
    single, double = planted(300, seed=5), planted(300, seed=5, dtype=torch.float64)
    assert torch.equal(single.inputs, double.inputs.float())
    assert torch.equal(single.labels["signs"], double.labels["signs"].float())


@pytest.mark.parametrize("share", [0.0, 0.05, 0.15, 0.5])
def test_minority_share(share: float) -> None:
    met = (planted(ROWS, seed=2, minority=share).members["group"] == MINORITY).double().mean()
    assert abs(met - share) <= 4 * math.sqrt(share * (1 - share) / ROWS)


def test_the_second_attribute_is_innocent(train: Planted) -> None:
    sites = torch.nn.functional.one_hot(train.members["site"], 3).double()
    others = torch.cat([train.inputs, targets(train), train.members["group"].double().unsqueeze(1)], dim=1)
    correlations = torch.corrcoef(torch.cat([sites, others], dim=1).T)[:3, 3:]
    assert (sites.mean(dim=0) - 1 / 3).abs().max() < 4 * math.sqrt(2 / 9 / ROWS)
    assert correlations.abs().max() < 4.5 / math.sqrt(ROWS)  # of 96 chance correlations


@pytest.mark.parametrize("world", [0, 1, 2])
def test_labels_follow_one_law_in_both_groups(world: int) -> None:
    data = planted(ROWS, seed=0, world=world, minority=0.5, dtype=torch.float64)
    majority, minority = of_group(data, MAJORITY), of_group(data, MINORITY)
    difference = targets(majority).mean(dim=0) - targets(minority).mean(dim=0)
    assert difference.abs().max() < 0.06  # four standard errors and a half: base rates are equal
    classes = torch.bincount(data.labels["kind"], minlength=4) / ROWS
    assert (classes - 0.25).abs().max() < 0.02
    positives = data.labels["signs"].mean(dim=0)
    assert torch.allclose(positives, torch.tensor([0.5, 0.401, 0.309], dtype=torch.float64), atol=0.015)


@pytest.mark.parametrize("world", [0, 1, 2])
def test_the_majority_law_fails_the_minority_and_its_own_serves_it(world: int) -> None:
    train = planted(ROWS, seed=0, world=world, dtype=torch.float64)
    test = planted(ROWS, seed=1, world=world, dtype=torch.float64)
    majority, minority = of_group(test, MAJORITY), of_group(test, MINORITY)

    of_majority = fit(of_group(train, MAJORITY))
    full = quality(of_majority, majority)
    neglected = quality(of_majority, minority)
    assert full[0] > 0.88
    assert full[1] > 0.76
    assert full[2] > 0.88
    assert neglected[0] < 0.65  # near a coin's throw
    assert neglected[1] < 0.45  # a throw among four gives 0.25
    assert neglected[2] < 0.0  # worse than knowing nothing

    own = quality(fit(of_group(train, MINORITY)), minority)
    assert all(a > b - 0.03 for a, b in zip(own, full, strict=True))


@pytest.mark.parametrize("world", [0, 1, 2])
def test_one_function_without_membership_serves_both_fully(world: int) -> None:
    train = planted(ROWS, seed=0, world=world, dtype=torch.float64)
    test = planted(ROWS, seed=1, world=world, dtype=torch.float64)
    best = [quality(fit(of_group(train, group)), of_group(test, group)) for group in (MAJORITY, MINORITY)]

    equal_shares = fit(planted(ROWS, seed=2, world=world, minority=0.5, dtype=torch.float64))
    served = [quality(equal_shares, of_group(test, group)) for group in (MAJORITY, MINORITY)]
    for mine, ideal in zip(served, best, strict=True):
        assert all(a > b - 0.02 for a, b in zip(mine, ideal, strict=True))
    assert all(abs(a - b) < 0.03 for a, b in zip(*served, strict=True))


def test_standardising_keeps_the_plant(train: Planted) -> None:
    spread = train.inputs.std(dim=0)
    assert spread.min() > 0.9  # no column is small: what is hidden is a direction
    pairs = train.inputs[:, 6:18]
    variances = torch.linalg.eigvalsh(torch.cov((pairs / pairs.std(dim=0)).T))
    assert variances[:6].max() < 0.1
    assert variances[6:].min() > 1.8


def test_take_and_to(train: Planted) -> None:
    mask = train.members["group"] == MINORITY
    part = train.take(mask)
    assert len(part) == int(mask.sum())
    assert same(part, train.take(mask.nonzero().squeeze(1)))
    assert same(train.take(slice(0, 10)), train.take(torch.arange(10)))
    assert same(part.to("cpu"), part)
    assert part.tasks == train.tasks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", 0), ("rows", 2.5), ("rows", True), ("minority", 1.5), ("missing", -0.1),
        ("unknown", math.nan), ("contrast", 0.0), ("contrast", 1.1), ("marker", -1.0), ("noise", math.inf),
        ("dtype", torch.int64),
    ],
)  # fmt: skip
def test_wrong_options_are_named(name: str, value: object) -> None:
    options = {"rows": 10, "seed": 0, name: value}
    with pytest.raises(FairMTError, match=rf"^planted: {name}: met .*expected"):
        planted(**options)  # type: ignore[arg-type]
