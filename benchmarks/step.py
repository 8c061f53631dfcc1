"""What a step costs: FairMT and MGDA over a plain step, side by side in one process.

    python benchmarks/step.py                        # on the CPU, one thread: table MLP, convolution, transformer
    python benchmarks/step.py --methods FairMT,TorchJD --tasks 40   # beside a peer (pip install torchjd)
    python benchmarks/step.py --profile              # where the criterion's time goes
    python benchmarks/step.py --problem wide         # one head of T columns in place of T heads: a cheaper plain step
    python benchmarks/step.py --problem full         # all kinds of task, two attributes, a fifth of labels missing
    python benchmarks/step.py --device cuda          # bf16, ResNet-50, ResNet-18, BERT-base-like; eager and captured

The plain step has vectorised losses (one binary cross-entropy over all columns). A step is forward, loss, backward
and AdamW. Steps of all methods are interleaved; the figures are medians of the ratio to the plain step of the same
round, and `control` is a second plain model, which shows the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from networks import build

import fairmt
from fairmt.geometry import Feature, Full, Sample
from fairmt.groups import Groups
from fairmt.layout import Layout
from fairmt.methods import Criterion
from fairmt.weighting import MinimumNorm

Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


class Problem:
    """Tasks, groups, and one fixed batch of labels and members.

    "heads": T detections, each with a head of its own; one attribute of two groups, all labels there. "wide": the
    same with one head of T columns. "full": T columns of all kinds in six heads, attributes of 2 and 6 groups, a
    fifth of the labels and a tenth of the memberships missing.
    """

    def __init__(self, name: str, count: int, rows: int, device: torch.device) -> None:
        full = name == "full" and count >= 12
        self.tasks: dict[str, Any] = {"attributes": fairmt.Detection(count)}
        if name == "heads":
            self.tasks = {f"attribute {i}": fairmt.Detection() for i in range(count)}
        self.groups = {"gender": 2}
        if full:
            self.tasks = {
                "attributes": fairmt.Detection(count - 9, weight="balanced"),
                "ill": fairmt.Detection(weight="balanced"),
                "health": fairmt.Classification(5),
                "band": fairmt.Classification(3),
                "pressure": fairmt.Regression(2),
                "age": fairmt.Regression(4, loss="huber"),
            }
            self.groups = {"gender": 2, "race": 6}
        self.labels, self.members = {}, {}
        for task_name, task in self.tasks.items():
            n = task.width
            if isinstance(task, fairmt.Classification):
                y = torch.randint(0, n, (rows, 1)).float()
            elif isinstance(task, fairmt.Regression):
                y = torch.randn(rows, n)
            else:
                y = torch.randint(0, 2, (rows, n)).float()
            if full:
                y[torch.rand_like(y) < 0.2] = torch.nan
            self.labels[task_name] = y.to(device)
        for attribute, size in self.groups.items():
            codes = torch.randint(0, size, (rows,))
            if full:
                codes[torch.rand(rows) < 0.1] = -1
            self.members[attribute] = codes.to(device)

    def plain_loss(self) -> Loss:
        """The sum of the tasks' mean losses, as one would write it without a library."""

        if all(isinstance(task, fairmt.Detection) for task in self.tasks.values()):
            together = torch.cat(list(self.labels.values()), dim=1)

            def vectorised(features: Tensor, logits: dict[str, Tensor]) -> Tensor:
                z = torch.cat([logits[name] for name in self.tasks], dim=1).float()
                return nn.functional.binary_cross_entropy_with_logits(z, together) * together.shape[1]

            return vectorised

        def loss(features: Tensor, logits: dict[str, Tensor]) -> Tensor:
            total = features.new_zeros((), dtype=torch.float32)
            for name, task in self.tasks.items():
                z, y = logits[name].float(), self.labels[name]
                known = y == y
                y = torch.where(known, y, 0)
                if isinstance(task, fairmt.Detection):
                    each = nn.functional.binary_cross_entropy_with_logits(z, y, reduction="none")
                elif isinstance(task, fairmt.Classification):
                    each = nn.functional.cross_entropy(z, y[:, 0].long(), reduction="none").unsqueeze(1)
                elif task.loss == "huber":
                    each = nn.functional.huber_loss(z, y, reduction="none")
                else:
                    each = nn.functional.mse_loss(z, y, reduction="none")
                total = total + ((each * known).sum(0) / known.sum(0).clamp(min=1)).sum()
            return total

        return loss


class Method:
    """A model, its optimizer and its loss: one thing to be timed."""

    def __init__(self, name: str, encoder: str, problem: Problem, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.name, self.args = name, args
        self.device = torch.device(args.device)
        module, size, shape = build(encoder)
        self.encoder = module.to(self.device)
        self.heads = nn.ModuleDict({n: nn.Linear(size, t.width) for n, t in problem.tasks.items()})
        self.heads.to(self.device)
        self.problem = problem
        rows = args.batch or shape[0]
        tokens = len(shape) == 2 and encoder != "mlp"
        inputs = torch.randint(0, 30_000, (rows, *shape[1:])) if tokens else torch.randn(rows, *shape[1:])
        self.inputs = inputs.to(self.device)
        if self.device.type == "cuda" and self.inputs.ndim == 4:
            self.encoder.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        self.loss = self._loss(name)
        parameters = [*self.encoder.parameters(), *self.heads.parameters()]
        cuda = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=cuda, capturable=cuda)
        self.graph: Any = None

    def _loss(self, name: str) -> Loss:
        problem, heads = self.problem, dict(self.heads.items())
        if name == "TorchJD" and self.args.problem != "heads":
            raise SystemExit("--methods: met TorchJD, expected it with --problem heads only")
        if name in ("plain", "control", "TorchJD"):
            return problem.plain_loss()
        layout = Layout.of(problem.tasks, Groups.of(problem.groups))
        criterion: nn.Module
        if name == "FairMT":
            criterion = fairmt.FairMT(problem.tasks, problem.groups, heads)
        elif name == "MGDA":
            criterion = Criterion(layout, heads, weighting=MinimumNorm(layout.tasks, Sample()))
        elif name == "MGDA (autograd)":
            criterion = Criterion(layout, None, weighting=MinimumNorm(layout.tasks, Feature()))
        elif name == "MGDA-full":
            full = Full(self.encoder.parameters())
            criterion = Criterion(layout, heads, weighting=MinimumNorm(layout.tasks, full))
        else:
            known = "FairMT, MGDA, MGDA (autograd), MGDA-full or TorchJD"
            raise SystemExit(f"--methods: met {name!r}, expected {known}")
        self.criterion = criterion.to(self.device)
        return lambda features, logits: criterion(features, logits, problem.labels, problem.members)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.graph is None)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            features = self.encoder(self.inputs)
            logits = {name: head(features) for name, head in self.heads.items()}
        if self.name == "TorchJD":
            self._peer(features, logits)
        else:
            self.loss(features, logits).backward()
        self.optimizer.step()

    def _peer(self, features: Tensor, logits: dict[str, Tensor]) -> None:
        """MGDA at the encoder's parameters as TorchJD does it, with its defaults (`pip install torchjd`)."""
        from torchjd.aggregation import MGDA
        from torchjd.autojac import jac_to_grad, mtl_backward

        entropy = nn.functional.binary_cross_entropy_with_logits
        losses = [entropy(logits[name].float(), self.problem.labels[name]) for name in self.problem.tasks]
        mtl_backward(losses, features=features)
        jac_to_grad(self.encoder.parameters(), MGDA())

    def capture(self) -> None:
        """Records the step as a CUDA graph, to be replayed."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.graph = graph

    def time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def ratios(methods: list[Method], rounds: int, warm: int = 5) -> tuple[float, dict[str, float]]:
    """The plain step's median seconds, and each method's median ratio to it."""
    for method in methods:
        for _ in range(warm):
            method.time()
    times: dict[str, list[float]] = {method.name: [] for method in methods}
    order = list(methods)
    for _ in range(rounds):
        random.shuffle(order)
        for method in order:
            times[method.name].append(method.time())
    plain = times["plain"]
    found = {
        name: statistics.median(t / p for t, p in zip(own, plain, strict=True))
        for name, own in times.items()
        if name != "plain"
    }
    return statistics.median(plain), found


def peak(method: Method) -> int:
    """Peak bytes of a step beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    method.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


STAGES = {
    "read and check": ("fairmt.batch", "Reader", "forward"),
    "losses and rest of measuring": ("fairmt.methods.measure", "Measure", "forward"),
    "detection block": ("fairmt.blocks.detection", "DetectionBlock", "terms"),
    "classification block": ("fairmt.blocks.classification", "ClassificationBlock", "terms"),
    "regression block": ("fairmt.blocks.regression", "RegressionBlock", "terms"),
    "rows of sides": ("fairmt.disparity.sides", "SidePlan", "rows"),
    "group sums": ("fairmt.constraint", "GroupConstraint", "sums"),
    "gaps, weights, cells": ("fairmt.constraint", "GroupConstraint", "assess"),
    "violation at the logits": ("fairmt.constraint", "GroupConstraint", "at_logits"),
    "Gram matrix": ("fairmt.geometry.closed", "Sample", "gram"),
    "minimum norm": ("fairmt.weighting.minimum_norm", "MinimumNorm", "weights"),
    "at the features": ("fairmt.geometry.forward", "Forward", "at_features"),
    "state": ("fairmt.methods.criterion", "Criterion", "_move"),
    "whole forward of the criterion": ("fairmt.methods.criterion", "Criterion", "forward"),
}


@contextmanager
def stopwatches(spent: dict[str, float]) -> Iterator[None]:
    """Adds up each stage's own time, less that of the stages inside it."""
    import importlib

    stack: list[float] = []
    originals = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            stack.append(0.0)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            whole = time.perf_counter() - start
            spent[name] = spent.get(name, 0.0) + whole - stack.pop()
            if stack:
                stack[-1] += whole
            return result

        return run

    for name, (module, owner, attribute) in STAGES.items():
        cls = getattr(importlib.import_module(module), owner)
        originals.append((cls, attribute, getattr(cls, attribute)))
        setattr(cls, attribute, timed(name, getattr(cls, attribute)))
    try:
        yield
    finally:
        for cls, attribute, function in originals:
            setattr(cls, attribute, function)


def profile(method: Method, rounds: int) -> None:
    for _ in range(10):
        method.step()
    spent: dict[str, float] = {}
    with stopwatches(spent):
        for _ in range(rounds):
            method.step()
    print(f"{'stage':34}{'µs':>8}")
    for name in STAGES:
        if name in spent:
            print(f"{name:34}{spent[name] / rounds * 1e6:8.0f}")
    print(f"{'sum':34}{sum(spent.values()) / rounds * 1e6:8.0f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--encoder", help="one of them, or several separated by commas")
    parser.add_argument("--tasks", default="2,9,17,29,40,128")
    parser.add_argument("--methods", default="FairMT,MGDA")
    parser.add_argument("--problem", default="heads", choices=["heads", "wide", "full"])
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-eager", action="store_true", help="on a GPU, time captured steps only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    cuda = args.device == "cuda"
    if cuda:
        print(torch.cuda.get_device_name(), "torch", torch.__version__, "bf16", flush=True)
    encoders = (args.encoder or ("resnet50,resnet18,bert" if cuda else "mlp,conv,transformer")).split(",")
    names = ["plain", "control", *args.methods.split(",")]
    for encoder in encoders:
        rounds = args.rounds or {"mlp": 300, "conv": 15, "transformer": 15}.get(encoder, 20)
        for count in (int(n) for n in args.tasks.split(",")):
            torch.manual_seed(0)
            rows = args.batch or build(encoder)[2][0]
            problem = Problem(args.problem, count, rows, torch.device(args.device))
            methods = [Method(name, encoder, problem, args) for name in names]
            if args.profile:
                print(f"{encoder}, T = {count}, {args.problem} problem")
                profile(methods[2], rounds)
                continue
            for mode in ("eager", "captured") if cuda else ("eager",):
                if mode == "eager" and args.no_eager:
                    continue
                if mode == "captured":
                    methods = [method for method in methods if method.name in ("plain", "control", "FairMT", "MGDA")]
                    for method in methods:
                        method.capture()
                elif cuda:
                    sync_free(methods)
                plain, found = ratios(methods, rounds)
                row = "  ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
                print(f"{encoder:12} T={count:<4} {mode:9} plain {plain * 1e3:8.2f} ms   {row}", flush=True)
            if cuda:
                print(f"{'':12} peak memory over plain's: {memory(names, encoder, problem, args)}", flush=True)
            del methods


def sync_free(methods: list[Method]) -> None:
    """A step in which any wait of the host for the device is an error."""
    for method in methods:
        for _ in range(2):
            method.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            method.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    print(f"{'':12} no synchronisation in a step of: {', '.join(method.name for method in methods)}", flush=True)


def memory(names: list[str], encoder: str, problem: Problem, args: argparse.Namespace) -> str:
    peaks = {}
    for name in names:
        method = Method(name, encoder, problem, args)
        for _ in range(2):
            method.step()
        peaks[name] = peak(method)
        del method
        torch.cuda.empty_cache()
    return "  ".join(f"{name} {bytes_ / peaks['plain']:.4f}" for name, bytes_ in peaks.items() if name != "plain")


if __name__ == "__main__":
    main()
