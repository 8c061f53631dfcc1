"""On an accelerator: the same numbers, no wait of the host for the device, and a step that a CUDA graph can hold.

python -m tests.core.test_gpu      # without pytest, where there is only torch
"""

import copy

import torch
from torch import nn

import fairmt
from fairmt import simplex

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
    ]
except ModuleNotFoundError:  # the tests below need none of it
    pass

ROWS = 64
TASKS = {
    "ill": fairmt.Detection(weight="balanced"),
    "signs": fairmt.Detection(5, threshold=0.4),
    "health": fairmt.Classification(4, weight="balanced"),
    "band": fairmt.Classification(3),
    "numbers": fairmt.Regression(3, loss="huber"),
}
GROUPS = {"gender": 2, "race": 4} | fairmt.cross("gender", "race")


def make(dtype=torch.float64, **options):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh()).to(dtype)
    heads = nn.ModuleDict({name: nn.Linear(16, task.width) for name, task in TASKS.items()}).to(dtype)
    return nn.ModuleDict({"encoder": encoder, "heads": heads}), fairmt.FairMT(TASKS, GROUPS, heads, **options)


def batch(seed, device, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    labels = {}
    for name, task in TASKS.items():
        n = task.width
        if isinstance(task, fairmt.Classification):
            y = torch.randint(0, n, (ROWS, 1), generator=g).to(dtype)
        elif isinstance(task, fairmt.Regression):
            y = torch.randn(ROWS, n, generator=g, dtype=dtype)
        else:
            y = torch.randint(0, 2, (ROWS, n), generator=g).to(dtype)
        y[torch.rand(y.shape, generator=g) < 0.3] = torch.nan
        labels[name] = y.to(device)
    members = {
        "gender": torch.randint(-1, 2, (ROWS,), generator=g).to(device),
        "race": torch.randint(-1, 4, (ROWS,), generator=g).to(device),
    }
    return torch.randn(ROWS, 12, generator=g, dtype=dtype).to(device), labels, members


def step(model, criterion, optimizer, own):
    x, labels, members = own
    features = model["encoder"](x)
    logits = {name: head(features) for name, head in model["heads"].items()}
    optimizer.zero_grad(set_to_none=False)
    loss = criterion(features, logits, labels, members)
    loss.backward()
    optimizer.step()
    return loss


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4, **options)


def told(criterion):
    """What `check` has to say, if anything."""
    try:
        criterion.check()
    except fairmt.FairMTError as error:
        return str(error)
    return ""


def on_gpu(model, criterion):
    """Both moved, the criterion looking at the moved heads."""
    model.cuda()
    return model, criterion.cuda()


def test_same_numbers_as_on_the_cpu():
    for geometry in ("sample", "mean", "feature"):
        here = make(geometry=geometry, eta_step=0.5)
        there = on_gpu(*make(geometry=geometry, eta_step=0.5))
        optimizers = [adam(here[0]), adam(there[0])]
        for seed in range(6):
            a = step(here[0], here[1], optimizers[0], batch(seed, "cpu"))
            b = step(there[0], there[1], optimizers[1], batch(seed, "cuda"))
            torch.testing.assert_close(b.cpu(), a, rtol=1e-5, atol=1e-6)
        for p, q in zip(here[0].parameters(), there[0].parameters(), strict=True):
            torch.testing.assert_close(q.cpu(), p, rtol=1e-4, atol=1e-5)
        assert here[1].last.alpha.keys() == there[1].last.alpha.keys()
        there[1].check()


def test_no_synchronisation_from_the_second_step_on():
    model, criterion = on_gpu(*make(torch.float32))
    optimizer = adam(model, fused=True, capturable=True)
    data = [batch(seed, "cuda", torch.float32) for seed in range(3)]
    step(model, criterion, optimizer, data[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for own in data:
            step(model, criterion, optimizer, own)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_of_the_step_replays_it():
    model, criterion = on_gpu(*make(torch.float32))
    optimizer = adam(model, capturable=True)
    static = batch(0, "cuda", torch.float32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(model, criterion, optimizer, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, criterion, optimizer, static)
    twin = copy.deepcopy(nn.ModuleDict({"model": model, "criterion": criterion}))
    twin_optimizer = adam(twin["model"], capturable=True)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(1, 5):
        fresh = batch(seed, "cuda", torch.float32)
        static[0].copy_(fresh[0])
        for kind in (1, 2):
            for name, tensor in static[kind].items():
                tensor.copy_(fresh[kind][name])
        graph.replay()
        eager = step(twin["model"], twin["criterion"], twin_optimizer, fresh)
        torch.testing.assert_close(loss, eager, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(criterion.eta, twin["criterion"].eta)


def test_bad_values_are_masked_and_told_later():
    model, criterion = on_gpu(*make())
    optimizer = adam(model)
    data = batch(0, "cuda")
    data[1]["signs"][3, 2] = 2.0
    data[2]["race"][5] = 9
    loss = step(model, criterion, optimizer, data)
    assert torch.isfinite(loss)
    message = told(criterion)
    for part in ("labels['signs']", "met 2", "members['race']", "met 9"):
        assert part in message
    assert not told(criterion)


def test_a_loss_that_is_not_finite_changes_nothing():
    for nonfinite in ("skip", "raise"):
        model, criterion = on_gpu(*make(nonfinite=nonfinite))
        optimizer = adam(model)
        step(model, criterion, optimizer, batch(0, "cuda"))
        before = {name: value.clone() for name, value in criterion.state_dict().items() if name != "_extra_state"}
        x, labels, members = batch(1, "cuda")
        features = model["encoder"](x)
        logits = {name: head(features) for name, head in model["heads"].items()}
        logits["ill"] = logits["ill"] + torch.inf
        loss = criterion(features, logits, labels, members)
        loss.backward()
        assert loss.item() == 0
        assert all((p.grad == 0).all() or torch.isfinite(p.grad).all() for p in model.parameters())
        assert criterion.skipped.item() == 1
        for name, value in criterion.state_dict().items():
            if name not in ("_extra_state", "skipped"):
                torch.testing.assert_close(value, before[name])
        assert ("finite" in told(criterion)) == (nonfinite == "raise")


def test_the_minimum_norm_on_the_device_is_the_exact_one():
    for count in (1, 2, 9, 40, 128):
        for rank in (3, 200):
            g = torch.randn(count, rank, dtype=torch.float64)
            K, b = g @ g.T, 0.1 * torch.randn(count, dtype=torch.float64)
            alpha = simplex.min_norm(K.cuda(), b.cuda()).cpu()
            slope = K @ alpha + b
            scale = max(K.abs().max(), b.abs().max())
            assert (alpha >= 0).all()
            assert abs(alpha.sum() - 1) < 1e-12
            assert (alpha @ slope - slope.min()) / scale < 1e-6


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("passed", name, flush=True)
