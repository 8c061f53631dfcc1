"""FairMT: minimum-norm task weights, an aggregated one-sided constraint, dual ascent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from ..aggregation import Ahfda, Maximum, Mean
from ..aggregation.ahfda import Solver
from ..constraint import Aggregation, GroupConstraint
from ..disparity import choose
from ..errors import FairMTError, check_choice, check_number, describe
from ..geometry import BatchMean, Feature, Full, Geometry, Sample
from ..groups import Groups
from ..layout import Layout
from ..multiplier import DualAscent, UtilityBudget
from ..tasks import Classification, Detection, Regression, Task, check_tasks
from ..weighting import MinimumNorm, Uniform, Weighting
from ..weighting.minimum_norm import GradientNorm
from .criterion import Criterion

GeometryName = Literal["sample", "mean", "feature", "full"]


class FairMT(Criterion):
    """The loss that trains all tasks while no group is to be served worse than the best-served one.

    Args:
        tasks: task name -> `Detection`, `Classification` or `Regression`.
        groups: attribute -> number of groups; `| fairmt.cross(…)` adds an intersection.
        heads: the model's heads by task name. Where each is one `nn.Linear` on the features, no extra backward is
            needed; with others, or None, gradients at the features come by autograd.
        tolerance: the gap that is admitted: the weighted root mean square of the entries' gaps.
        weighting: the tasks' weights in the encoder: "min_norm" or "uniform".
        geometry: where gradients are compared: "sample" (exact, at the features), "mean" (the paper's batch-mean
            proxy), "feature" (by autograd), "full" (at the encoder's parameters, `shared=`).
        shared: the encoder's parameters, for geometry="full".
        aggregation: how violations become one: "ahfda", "mean" or "max".
        smoothing: AHFDA's λ, relative to the sum of violations; `mu` sets an absolute μ in its place.
        solver: AHFDA's: "exact" or "frank_wolfe".
        disparities: what is compared for each kind of task; None switches a kind off, as in `{"regression": None}`.
        beta: weight of the false positive side: 1 is equalized odds, 0 equal opportunity.
        asymmetric: leave the best group's rate alone.
        memory: batches over which group sums are remembered; 1 is the paper's batch estimate.
        dual_on: what drives the multiplier: violations of thresholded ("hard") or of soft predictions.
        eta_step, eta_max: step and ceiling of the dual ascent.
        gradient_norm: what gradients are divided by before α is sought: "loss+", "none", "l2" or "loss".
        encoder_scale: whether α sums to 1 in the encoder ("mean") or to the number of active tasks ("sum").
        alpha_every: solve for α on every so many-th step only.
        max_utility_loss: how much higher, relatively, any task's loss may get than its reference before the
            multiplier stops rising; None: no such bound.
        reference_losses: task name -> loss of a plain run; without, a task's own best running loss.
        nonfinite: "raise", or "skip" batches whose loss is not finite (counted in `skipped`).
        validate: look at values on every call (None: on the CPU only; see `check`).
        process_group: the ranks that share a batch.
        printed: Φ with its −μ/2‖w‖², a dual step that is not relative, and 1/|B_t| in the "mean" geometry; see `paper`.

    >>> import torch
    >>> from fairmt import Detection
    >>> encoder, heads = torch.nn.Linear(4, 8), torch.nn.ModuleDict({"ill": torch.nn.Linear(8, 1)})
    >>> criterion = FairMT({"ill": Detection()}, {"gender": 2}, heads=heads, tolerance=0.05)
    >>> features = encoder(torch.randn(6, 4))
    >>> logits = {name: head(features) for name, head in heads.items()}
    >>> labels = {"ill": torch.tensor([1, 0, 1, 0, -1, 1])}
    >>> members = {"gender": torch.tensor([0, 0, 1, 1, 1, -1])}
    >>> loss = criterion(features, logits, labels, members)
    >>> loss.backward()
    >>> criterion.last.active, list(criterion.last.psi)
    (('ill',), ['gender/ill'])
    """

    def __init__(
        self,
        tasks: Mapping[str, Task],
        groups: Mapping[str, Any],
        heads: Any = None,
        tolerance: float = 0.05,
        *,
        weighting: Literal["min_norm", "uniform"] = "min_norm",
        geometry: GeometryName = "sample",
        shared: Iterable[Tensor] | None = None,
        aggregation: Literal["ahfda", "mean", "max"] = "ahfda",
        smoothing: float = 10.0,
        mu: float | None = None,
        solver: Solver = "exact",
        disparities: Mapping[str, str | None] | None = None,
        beta: float = 1.0,
        asymmetric: bool = True,
        memory: float = 20,
        dual_on: Literal["hard", "soft"] = "hard",
        eta_step: float = 0.01,
        eta_max: float = 50.0,
        gradient_norm: GradientNorm = "loss+",
        encoder_scale: Literal["mean", "sum"] = "mean",
        alpha_every: int = 1,
        max_utility_loss: float | None = None,
        reference_losses: Mapping[str, float] | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
        validate: bool | None = None,
        process_group: Any = None,
        printed: bool = False,
    ) -> None:
        check_number("tolerance", tolerance, above=0)
        check_choice("asymmetric", asymmetric, (True, False))
        layout = Layout.of(check_tasks(tasks), Groups.of(groups))
        constraint = GroupConstraint(
            layout,
            choose(disparities, beta),
            memory=memory,
            aggregation=_aggregation(aggregation, smoothing, mu, solver),
            asymmetric=asymmetric,
            printed=printed,
        )
        found = _geometry(geometry, shared, heads, printed)
        super().__init__(
            layout,
            heads,
            weighting=_weighting(weighting, layout, found, gradient_norm, alpha_every),
            constraint=constraint,
            strength=DualAscent(tolerance**2, step=eta_step, ceiling=eta_max, relative=not printed),
            dual_on=dual_on,
            budget=_budget(max_utility_loss, reference_losses, memory, layout),
            encoder_scale=encoder_scale,
            nonfinite=nonfinite,
            validate=validate,
            process_group=process_group,
        )

    @classmethod
    def paper(
        cls,
        tasks: Mapping[str, Task],
        groups: Mapping[str, Any],
        heads: Any = None,
        epsilon: float = 0.05,
        mu: float = 1.0,
        eta_step: float = 0.01,
        **options: Any,
    ) -> FairMT:
        """The method as printed, wherever that is well defined.

        Batch estimates (no memory), soft rates at temperature 1, AHFDA with an absolute μ by Frank–Wolfe, Φ with its
        −μ/2‖w‖², dual ascent on Φ − ε without a relative step or a ceiling, the batch-mean geometry with the printed
        1/|B_t|, plain gradients, unscaled errors.
        """
        check_number("epsilon", epsilon, above=0)
        check_number("mu", mu, above=0)
        if "tolerance" in options:
            raise FairMTError(
                "tolerance: met one for the printed method, expected epsilon= (the bound on Φ) in its place"
            )
        printed: dict[str, Any] = {
            "geometry": "mean",
            "memory": 1,
            "mu": mu,
            "solver": "frank_wolfe",
            "dual_on": "soft",
            "eta_step": eta_step,
            "eta_max": float("inf"),
            "gradient_norm": "none",
            "printed": True,
        }
        plain = {name: _as_printed(task) for name, task in check_tasks(tasks).items()}
        return cls(plain, groups, heads, tolerance=epsilon**0.5, **{**printed, **options})


def _as_printed(task: Task) -> Task:
    if isinstance(task, Regression):
        return replace(task, scale=1.0) if task.scale is None else task
    assert isinstance(task, Detection | Classification)
    return replace(task, temperature=1.0)


def _aggregation(name: str, smoothing: float, mu: float | None, solver: Solver) -> Aggregation:
    check_choice("aggregation", name, ("ahfda", "mean", "max"))
    named: dict[str, Aggregation] = {"ahfda": Ahfda(smoothing, mu, solver), "mean": Mean(), "max": Maximum()}
    return named[name]


def _geometry(name: str, shared: Iterable[Tensor] | None, heads: Any, printed: bool) -> Geometry:
    check_choice("geometry", name, ("sample", "mean", "feature", "full"))
    if name == "full":
        return Full(shared)
    if shared is not None:
        raise FairMTError(f"shared: met parameters with geometry={name!r}, expected them with geometry='full' only")
    if name == "mean" and heads is None:
        raise FairMTError("geometry: met 'mean' without heads, expected heads=, each one nn.Linear on the features")
    named: dict[str, Geometry] = {"sample": Sample(), "mean": BatchMean(printed), "feature": Feature()}
    return named[name]


def _weighting(name: str, layout: Layout, geometry: Geometry, gradient_norm: GradientNorm, every: int) -> Weighting:
    check_choice("weighting", name, ("min_norm", "uniform"))
    minimum_norm = MinimumNorm(layout.tasks, geometry, gradient_norm=gradient_norm, every=every)
    return minimum_norm if name == "min_norm" else Uniform()


def _budget(
    allowed: float | None, reference: Mapping[str, float] | None, memory: float, layout: Layout
) -> UtilityBudget | None:
    if allowed is None:
        if reference is not None:
            raise FairMTError("reference_losses: met losses without max_utility_loss, expected both or neither")
        return None
    if reference is None:
        return UtilityBudget(allowed, memory, layout.tasks)
    if not isinstance(reference, Mapping):
        raise FairMTError(f"reference_losses: met {describe(reference)}, expected a mapping from task name to loss")
    for name, loss in reference.items():
        check_choice("reference_losses", name, layout.task_names)
        check_number(f"reference_losses[{name!r}]", loss, above=0)
    missing = [name for name in layout.task_names if name not in reference]
    if missing:
        raise FairMTError(f"reference_losses: {missing[0]!r} is missing, expected a loss for every task")
    return UtilityBudget(allowed, memory, layout.tasks, [float(reference[name]) for name in layout.task_names])
