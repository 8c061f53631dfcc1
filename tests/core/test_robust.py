"""Numbers that must not go wrong silently: large labels, values that do not count, copies, states of other problems."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import fairmt
from fairmt.functional import aep, ahfda, group_rates, project_simplex
from fairmt.geometry import Forward

ROWS = 60


def scene(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, generator=g), torch.randn(ROWS, generator=g), torch.arange(ROWS) % 2


@pytest.mark.parametrize(("centre", "spread"), [(1e7, 5.0), (1e6, 0.5), (1.6e9, 1e3), (0.0, 1e-3), (-250.0, 2.0)])
def test_the_running_scale_does_not_mind_where_labels_lie(centre, spread):
    found = []
    for shift, size in ((centre, spread), (0.0, 1.0)):
        criterion = fairmt.FairMT({"y": fairmt.Regression()}, {"sex": 2})
        for seed in range(3):
            _, noise, sex = scene(seed)
            labels = shift + size * noise.double()
            prediction = (labels + size * (0.5 + sex) * torch.ones(ROWS, dtype=torch.double)).requires_grad_()
            criterion(torch.zeros(ROWS, 2, dtype=torch.double), {"y": prediction}, {"y": labels}, {"sex": sex})
        found.append(float(criterion.last.psi["sex/y"]))
    assert found[0] == pytest.approx(found[1], rel=2e-3)


@pytest.mark.parametrize("size", [1e-36, 1e-20, 1e20])
def test_sample_weights_of_any_size_are_the_same_weights(size):
    x, noise, sex = scene()
    found = []
    for scale in (1.0, size):
        logits = {"ill": x[:, 0].clone().requires_grad_(), "y": x[:, 1].clone().requires_grad_()}
        labels = {"ill": (noise > 0).float(), "y": 100 + noise}
        criterion = fairmt.FairMT({"ill": fairmt.Detection(), "y": fairmt.Regression()}, {"sex": 2})
        weight = scale * (1 + sex.float())
        loss = criterion(torch.zeros(ROWS, 2), logits, labels, {"sex": sex}, weight)
        loss.backward()
        found.append([loss.detach(), *(z.grad for z in logits.values()), criterion.last.psi["sex/y"].float()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)


def test_a_constant_label_has_no_scale():
    criterion = fairmt.FairMT({"y": fairmt.Regression()}, {"sex": 2})
    for _ in range(3):
        prediction = torch.ones(4, dtype=torch.double).requires_grad_()
        criterion(
            torch.zeros(4, 2), {"y": prediction}, {"y": torch.full((4,), 0.1)}, {"sex": torch.tensor([0, 0, 1, 1])}
        )
    assert float(criterion.last.psi["sex/y"]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e30])
def test_what_an_unlabelled_row_predicts_counts_for_nothing(bad):
    tasks = {"ill": fairmt.Detection(), "y": fairmt.Regression(), "kind": fairmt.Classification(3)}
    found = []
    for value in (0.0, bad):
        torch.manual_seed(0)
        logits = {"ill": torch.randn(8), "y": torch.randn(8), "kind": torch.randn(8, 3)}
        for z in logits.values():
            z[2] = value
            z.requires_grad_()
        labels = {"ill": torch.ones(8), "y": torch.randn(8), "kind": torch.randint(0, 3, (8,)).float()}
        for y in labels.values():
            y[2] = math.nan
        criterion = fairmt.FairMT(tasks, {"sex": 2})
        loss = criterion(torch.zeros(8, 2), logits, labels, {"sex": torch.arange(8) % 2})
        loss.backward()
        found.append([loss.detach(), *(z.grad for z in logits.values())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_class_that_is_ruled_out_is_no_infinite_loss():
    logits = torch.randn(6, 3)
    logits[:, 2] = -math.inf
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    criterion = fairmt.FairMT({"kind": fairmt.Classification(3)}, {"sex": 2})
    criterion(torch.zeros(6, 2), {"kind": logits.requires_grad_()}, {"kind": labels}, {"sex": torch.arange(6) % 2})
    wanted = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(criterion.last.losses["kind"].float(), wanted.detach())


class Dropped(nn.Module):
    """A model whose dropout stands between the features and a linear head."""

    def __init__(self, share=0.5):
        super().__init__()
        self.encoder, self.head, self.dropout = nn.Linear(6, 5), nn.Linear(5, 1), nn.Dropout(share)
        self.criterion = fairmt.FairMT({"ill": fairmt.Detection()}, {"sex": 2}, heads={"ill": self.head})

    def loss(self, seed=0):
        x, noise, sex = scene(seed)
        features = self.encoder(x)
        logits = {"ill": self.head(self.dropout(features))}
        return self.criterion(features, logits, {"ill": (noise > 0).float()}, {"sex": sex})


def test_dropout_before_a_head_is_found_after_an_evaluation_too():
    model = Dropped()
    model.eval()
    model.loss()
    model.train()
    with pytest.raises(fairmt.FairMTError, match=r"heads\['ill'\]: its output on the features is"):
        model.loss()


@pytest.mark.parametrize("copied", [lambda c: pickle.loads(pickle.dumps(c)), lambda c: copy.deepcopy({"c": c})["c"]])
def test_a_copy_whose_heads_are_left_behind_is_found_soon(copied):
    model = Dropped(share=0.0)
    model.criterion = copied(model.criterion)
    optimizer = torch.optim.SGD([*model.encoder.parameters(), *model.head.parameters()], lr=0.5)

    def train():
        for seed in range(70):
            optimizer.zero_grad()
            model.loss(seed).backward()
            optimizer.step()

    with pytest.raises(fairmt.FairMTError, match=r"heads\['ill'\]: .* with these very weights"):
        train()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"sex": 2, "site": 2}, {"site": 2, "sex": 2}),
        ({"a": 2, "b": 3}, {"b": 3, "a": 2}),
        (
            {"a": 2, "b": 3, "both": fairmt.cross("a", "b")},
            {"a": 2, "b": 3, "both": fairmt.cross("b", "a")},
        ),
    ],
)
def test_a_state_of_attributes_in_another_order_is_refused(one, other):
    tasks = {"ill": fairmt.Detection()}
    with pytest.raises(fairmt.FairMTError, match="state: met groups"):
        fairmt.FairMT(tasks, one).load_state_dict(fairmt.FairMT(tasks, other).state_dict())


def test_small_gradients_pass_through_half_precision_heads():
    """One row's share of a mean over many is below what half precision can hold."""
    torch.manual_seed(0)
    features = torch.randn(5, 4).half().requires_grad_()
    first, last = nn.Linear(4, 4).half(), nn.Linear(4, 2).half()
    logits = last(first(features))
    delta = 1e-9 * torch.randn(5, 2)
    forward = Forward(features, [logits], None, delta, None, torch.ones(2), None, [(slice(0, 2), slice(0, 2))], None)
    wanted = delta @ last.weight.detach().float() @ first.weight.detach().float()
    torch.testing.assert_close(forward.at_features(delta), wanted, rtol=0.02, atol=1e-11)


def test_a_score_of_an_unknown_member_counts_for_nothing():
    scores = torch.tensor([0.2, math.nan, 0.9])
    rates, counts = group_rates(scores, torch.ones(3), torch.tensor([0, -1, 1]), 2)
    torch.testing.assert_close(rates.squeeze(1), torch.tensor([0.2, 0.9]))
    assert counts.squeeze(1).tolist() == [1, 1]


def test_half_precision_squares_do_not_overflow_on_the_way():
    predictions = torch.tensor([400.0, 0.5, 400.0, 0.5], dtype=torch.float16)
    errors = aep(predictions, torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([0, 1, 0, 1]), 2, loss="mae")
    assert float(errors) == math.inf  # beyond half precision's range, and no sign of "not measured"
    errors = aep(predictions / 64, torch.zeros(4), torch.tensor([0, 1, 0, 1]), 2)
    assert errors.isfinite()


@pytest.mark.parametrize("size", [1000, 20_000])
def test_a_projection_in_half_precision_sums_to_one(size):
    w = project_simplex(1e-3 * torch.randn(size, dtype=torch.bfloat16))
    assert float(w.double().sum()) == pytest.approx(1, abs=5e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_violations_that_are_not_finite_are_refused(bad):
    for call in (project_simplex, lambda psi: ahfda(psi, 1.0)):
        with pytest.raises(fairmt.FairMTError, match="finite"):
            call(torch.tensor([0.1, bad]))


def test_a_tiny_mu_is_the_maximum():
    _, w = ahfda(torch.tensor([0.1, 0.3, 0.2]), 1e-40)
    assert w.tolist() == [0, 1, 0]
