"""The user's head modules, held by reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FairMTError, unknown_name
from ..layout import Layout
from ..watch import Watch


class Heads:
    """The heads of a model: looked at, never owned.

    They are not among the criterion's parameters, buffers or state.
    """

    def __init__(self, modules: Any, layout: Layout) -> None:
        self.modules: list[nn.Module] | None = None
        self.linears: list[nn.Linear] | None = None
        if modules is None:
            return
        if not isinstance(modules, Mapping | nn.ModuleDict):
            raise FairMTError(f"heads: met {type(modules).__name__}, expected a mapping from task name to module")
        given = dict(modules.items())
        names = [head.name for head in layout.heads]
        for name, module in given.items():
            if name not in names:
                raise unknown_name("heads", name, names)
            if not isinstance(module, nn.Module):
                raise FairMTError(f"heads[{name!r}]: met {type(module).__name__}, expected a torch.nn.Module")
        for head in layout.heads:
            if head.name not in given:
                raise FairMTError(f"heads: {head.name!r} is missing, met {', '.join(map(repr, given)) or 'nothing'}")
            module = given[head.name]
            if isinstance(module, nn.Linear) and module.out_features != head.width:
                raise FairMTError(
                    f"heads[{head.name!r}]: met {module.out_features} outputs, expected {head.width}, as the task has"
                )
        self.modules = [given[name] for name in names]
        linears = [inner for inner in map(_unwrapped, self.modules) if type(inner) is nn.Linear]
        self.linears = linears if len(linears) == len(self.modules) else None

    def weight(self, features: Tensor, dtype: torch.dtype) -> Tensor | None:
        """All heads' weights (C, D), if every head is one linear layer on the features; None otherwise."""
        if self.linears is None or features.ndim != 2:
            return None
        weights: list[Tensor] = [linear.weight for linear in self.linears]
        if [weight.shape for weight in weights] != [
            (linear.out_features, features.shape[1]) for linear in self.linears
        ]:
            return None  # sharded over ranks, or not on these features: autograd knows better
        return (weights[0].detach() if len(weights) == 1 else torch.cat(weights)).to(dtype)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of all heads that take a gradient."""
        for module in self.modules or []:
            yield from (parameter for parameter in module.parameters() if parameter.requires_grad)

    def check(self, features: Tensor, logits: Tensor, layout: Layout, watch: Watch) -> None:
        """Raises (or, on an accelerator, marks) if a linear head's output on the features is not its logits.

        The closed form rests on it. It may hold at first and not later: a dropout between features and head does
        nothing in evaluation, and a copy of the heads starts out equal to them.
        """
        if self.linears is None or not len(features):
            return
        coarse = features.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(features.device.type)
        tolerance = 0.1 if coarse else 0.01
        differences = []
        for linear, head in zip(self.linears, layout.heads, strict=True):
            bias = None if linear.bias is None else linear.bias.to(logits.dtype)
            own = nn.functional.linear(features.to(logits.dtype), linear.weight.to(logits.dtype), bias)
            given = logits[:, head.columns]
            differences.append((own - given).abs().amax() / (1 + given.abs().amax()))
        apart = torch.stack(differences)
        if apart.device.type != "cpu":
            watch.note(watch.cells_of("heads"), apart.unsqueeze(0), apart.unsqueeze(0) > tolerance)
            return
        for head, difference in zip(layout.heads, apart.tolist(), strict=True):
            if difference > tolerance:
                raise FairMTError(
                    f"heads[{head.name!r}]: its output on the features is {difference:.0%} off the logits, "
                    "expected logits == head(features), with these very weights; pass heads=None where something "
                    "stands between them"
                )


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's wrapper."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module
