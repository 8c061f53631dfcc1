"""The composition: one call is one step of a method, whatever fills its three sockets.

    labels, logits, members → losses, gaps → violation → how gradients meet → α → one scalar → η

Nothing moves until the step is known to be sound: each part says what its buffers would become, and all changes
are made together at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..batch import Batch, OptionalTensorMap, Reader, TensorMap
from ..constraint import GroupConstraint, Infeasible
from ..errors import FairMTError, check_choice, short
from ..geometry import Forward, Gram, Heads
from ..layout import Layout
from ..multiplier import DualAscent, FixedStrength, UtilityBudget
from ..ranks import Ranks
from ..state import State, both, choose, look
from ..surrogate import surrogate
from ..weighting import Situation, Weighting
from .measure import Measure, Measured
from .step import Kkt, Step

CHECK_EVERY = 1024
"""Steps after which heads are compared with logits again, beside the powers of two."""


@dataclass
class _Progress:
    """What a criterion notes on each call, in a plain object: a module looks twice at every attribute it is given."""

    steps: int = 0
    last: Step | None = None


class Criterion(State):
    """A loss for a network of many tasks.

    Args:
        layout: the problem's numbering.
        heads: the model's heads by task name, or None.
        weighting: the tasks' weights in the encoder.
        constraint: the fairness term, or None.
        strength: its multiplier.
        dual_on: which violation drives the multiplier: of thresholded ("hard") or of soft predictions.
        budget: what the tasks may pay, or None.
        encoder_scale: whether α sums to 1 in the encoder ("mean") or to the number of active tasks ("sum").
        nonfinite: what a loss or gradient that is not finite does: "raise", or "skip" (a loss of 0, counted).
        validate: look at values at once, or leave marks on the device (None: the latter on accelerators).
        process_group: the ranks that share a batch; None: all.
    """

    skipped: Tensor

    def __init__(
        self,
        layout: Layout,
        heads: Any,
        *,
        weighting: Weighting,
        constraint: GroupConstraint | None = None,
        strength: DualAscent | FixedStrength | None = None,
        dual_on: Literal["hard", "soft"] = "hard",
        budget: UtilityBudget | None = None,
        encoder_scale: Literal["mean", "sum"] = "mean",
        nonfinite: Literal["raise", "skip"] = "raise",
        validate: bool | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        check_choice("dual_on", dual_on, ("hard", "soft"))
        check_choice("encoder_scale", encoder_scale, ("mean", "sum"))
        check_choice("nonfinite", nonfinite, ("raise", "skip"))
        check_choice("validate", validate, (None, True, False))
        self.layout = layout
        self.heads = Heads(heads, layout)
        self.reader = Reader(layout, validate)
        self.measure = Measure(layout, constraint)
        self.weighting = weighting
        self.strength = strength if strength is not None else FixedStrength(0.0)
        self.budget = budget
        self.dual_on = dual_on
        self.encoder_scale = encoder_scale
        self.nonfinite = nonfinite
        self.ranks = Ranks(process_group)
        self.head_slices = [(head.columns, head.tasks) for head in layout.heads]
        self._progress = _Progress()
        self.register_buffer("skipped", torch.zeros((), dtype=torch.long))

    def forward(
        self,
        features: Tensor,
        logits: TensorMap,
        labels: OptionalTensorMap,
        members: OptionalTensorMap,
        sample_weight: Tensor | None = None,
    ) -> Tensor:
        """The loss of one batch: a 0-dim tensor, to be differentiated once as any other.

        Args:
            features: (B, D) what the encoder gave and the heads took.
            logits: what each head gave, by task name.
            labels: by task name; each task says how a missing one is marked. None: a whole batch without.
            members: group numbers (B,) by attribute, -1 where unknown. None: a whole batch of unknown.
            sample_weight: (B,) how much each row counts, at least 0.
        """
        recording = torch.is_grad_enabled()
        moving = self.training and recording
        ranks = self.ranks if moving and self.ranks.world() > 1 else None
        with torch.no_grad(), _full_precision(features):
            batch = self.reader(features, logits, labels, members, sample_weight, ranks is None)
            outputs = [logits[head.name] for head in self.layout.heads]
            if moving and not features.requires_grad and not any(z.requires_grad for z in outputs):
                raise FairMTError(
                    "features: neither they nor the logits take a gradient, expected one of them to "
                    "(was the model run under no_grad, or detached?)"
                )
            value, at_logits, at_features = self._step(features, outputs, batch, moving, ranks)
        if not recording:
            return value
        loss = surrogate(value, at_logits, at_features, self.head_slices, features, outputs)
        if at_logits is None:  # a GradScaler wants to see some gradient
            loss = loss + sum((0 * parameter).sum() for parameter in self.heads.parameters())
        return loss

    def _step(
        self, features: Tensor, outputs: Sequence[Tensor], batch: Batch, moving: bool, ranks: Ranks | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The scalar's value and its gradients at the logits (None: it has none at all) and at the features."""
        found: Measured = self.measure(batch, ranks)
        forward = self._forward(features, outputs, batch, found, moving, ranks)
        gram = self._gram(forward)
        sums = [found.losses] if gram is None else [found.losses, gram.K, gram.cross]
        sound, labelled = _finite(sums), look(found.active.any())
        if sound is False:
            return self._unsound(batch, moving)

        eta = self.strength.eta.clone()
        scale = found.active.sum().clamp(min=1) if self.encoder_scale == "sum" else None
        situation = Situation(
            losses=found.comparable,
            active=found.active,
            gram=gram if gram is None or sound is True else gram.where(sound),
            eta=eta if scale is None else eta / scale,
        )
        alpha = self.weighting.weights(situation)
        in_encoder = alpha if scale is None else alpha * scale

        # Heads see every task's plain loss, the encoder sees it α times: the features carry the difference.
        dtype = batch.logits.dtype
        at_logits, nothing = found.delta, eta.new_zeros((), dtype=dtype)
        at_features = nothing
        if features.requires_grad:
            at_features = forward.at_features(found.delta * self.measure.per_column((in_encoder - 1).to(dtype)))
            if gram is None:
                sound = both(sound, _finite([at_features], ranks))
                if sound is False:
                    return self._unsound(batch, moving)
        value = in_encoder @ found.losses
        violation = None
        if found.violation is not None and found.delta_phi is not None:
            at_logits = torch.addcmul(at_logits, found.delta_phi, eta.to(dtype))
            # Where nothing is measured there is nothing to bound: no term, and a multiplier that stays.
            known = found.violation.measured.any()
            soft, hard = ((found.violation.phis - self.strength.epsilon) * known).unbind()
            value = torch.addcmul(value, eta, soft)
            violation = hard if self.dual_on == "hard" else soft
        if ranks is not None:  # gradients are averaged over ranks; each has only its own rows' part of them
            at_logits, at_features = at_logits * ranks.world(), at_features * ranks.world()

        self._progress.last = Step(
            self.layout, eta, found.losses, found.active, alpha, in_encoder, found.violation, violation, gram
        )
        if moving:
            self._move(found, alpha, violation, both(sound, labelled))
            if isinstance(sound, Tensor):
                self._mark(sound)
        value, at_logits, at_features = (choose(sound, x, nothing) for x in (value.to(dtype), at_logits, at_features))
        return choose(labelled, value, nothing), at_logits, at_features

    def _forward(
        self,
        features: Tensor,
        outputs: Sequence[Tensor],
        batch: Batch,
        found: Measured,
        moving: bool,
        ranks: Ranks | None,
    ) -> Forward:
        weight = self.heads.weight(features, batch.logits.dtype)
        if weight is not None:
            step = self._progress.steps
            if moving and (step & (step - 1) == 0 or step % CHECK_EVERY == 0):
                self.heads.check(features, batch.raw_logits, self.layout, self.reader.watch)
        return Forward(
            features=features,
            logits=outputs,
            weight=weight,
            delta=found.delta,
            delta_phi=found.delta_phi,
            rows=found.rows,
            owner=None if self.measure.one_each else self.measure.owner,
            heads=self.head_slices,
            ranks=ranks,
        )

    def _gram(self, forward: Forward) -> Gram | None:
        geometry = self.weighting.geometry
        if geometry is None or not self.weighting.due(self._progress.steps) or not geometry.possible(forward):
            return None
        return geometry.gram(forward)

    def _unsound(self, batch: Batch, moving: bool) -> tuple[Tensor, None, Tensor]:
        """A loss of 0 that gives no gradient at all, or an error."""
        if self.nonfinite == "raise":
            raise FairMTError(
                "loss: met a value or a gradient that is not finite, expected finite ones; nothing was changed "
                "(look at the logits and the learning rate, or pass nonfinite='skip' to leave such batches out)"
            )
        self.skipped += moving
        nothing = batch.logits.new_zeros(())
        return nothing, None, nothing

    def _move(self, found: Measured, alpha: Tensor, violation: Tensor | None, sound: bool | Tensor) -> None:
        """Makes the step's changes, if it was sound and had a label."""
        changes = self.weighting.changes(alpha)
        if self.measure.moments.needed:
            changes.append((self.measure.moments.moments, found.moments))
        spent = None
        if self.budget is not None:
            sums, best, spent = self.budget.next(found.loss, found.labelled)
            changes += [(self.budget.sums, sums), (self.budget.best, best)]
        if found.violation is not None and violation is not None and self.measure.constraint is not None:
            eta = self.strength.next(violation, spent)
            changes += [(self.strength.eta, eta), (self.measure.constraint.memory.table, found.violation.table)]
        if sound is False:
            return
        self._progress.steps += 1
        for buffer, value in changes:
            buffer.copy_(choose(sound, value, buffer))

    def _mark(self, sound: Tensor) -> None:
        """On an accelerator: counts a step that was left out, and leaves word of it."""
        self.skipped += ~sound
        if self.nonfinite == "raise":
            watch = self.reader.watch
            watch.note(watch.cells_of("loss"), torch.where(sound, 0.0, torch.inf).view(1, 1), ~sound.view(1, 1))

    def check(self) -> None:
        """Raises for values that earlier steps met on an accelerator and could only mask there."""
        self.reader.watch.raise_met()

    @property
    def last(self) -> Step:
        """What happened in the last call."""
        if self._progress.last is None:
            raise FairMTError("last: met a criterion that was not called yet, expected a step before it")
        return self._progress.last

    @property
    def eta(self) -> Tensor:
        """The multiplier as the next step will use it."""
        return self.strength.eta

    @property
    def tolerance(self) -> float:
        """The bound on the weighted root mean square of the gaps."""
        return float(self.strength.epsilon**0.5)

    def kkt(self) -> Kkt:
        """How far the last step is from a solution. On several ranks, call it on each."""
        step, constraint = self.last, self.measure.constraint
        above: list[Infeasible] = []
        violation = float("nan")
        if step.found is not None and constraint is not None and step.psi:
            above = constraint.above(step.found, self.tolerance, hard=self.dual_on == "hard")
            violation = float(violation if step.violation is None else step.violation)
        return Kkt(violation, float(step.eta) * violation, step.stationarity(), tuple(above))

    def __deepcopy__(self, memo: dict[int, Any]) -> Criterion:
        """A copy of a model with its criterion has its own heads; one of the criterion alone looks at the same."""
        if not memo:
            memo.update({id(seen): seen for seen in self._looked_at()})
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copy

    def _looked_at(self) -> list[object]:
        """What belongs to the user's model."""
        shared = getattr(self.weighting.geometry, "shared", [])
        return [*(self.heads.modules or []), *shared]

    def get_extra_state(self) -> dict[str, Any]:
        return {"steps": self._progress.steps, "problem": self._problem()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self._progress.steps = int(state["steps"])

    def _problem(self) -> dict[str, Any]:
        """What a state must be of to be loaded: the same numbering of everything."""
        constraint = self.measure.constraint
        return {
            "tasks": list(self.layout.task_names),
            "columns": list(self.layout.column_names),
            "groups": [[own.name, own.size, *own.parts] for own in self.layout.groups.attributes],
            "sides": [] if constraint is None else list(constraint.sides.names),
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state = state_dict.get(f"{prefix}_extra_state")
        if state is not None:  # refuse before anything is loaded: tables of other problems may have the same shape
            problem = state.get("problem", {}) if isinstance(state, dict) else {}
            for name, own in self._problem().items():
                met = problem.get(name)
                if met != own:
                    raise FairMTError(f"state: met {name} {short(met)}, expected {short(own)}, as this criterion has")
        super()._load_from_state_dict(state_dict, prefix, *args)


def _finite(parts: Sequence[Tensor], ranks: Ranks | None = None) -> bool | Tensor:
    """Whether all parts are finite, on all ranks if they are given; a sum is, only if its parts are."""
    total = torch.stack([part.sum() for part in parts]).sum()
    if ranks is not None:
        (total,) = ranks.sum(total)
    return math.isfinite(total.item()) if total.device.type == "cpu" else total.abs() < torch.inf


def _full_precision(features: object) -> AbstractContextManager[object]:
    """Sums, gaps and Gram matrices are computed as they are, whatever precision the model runs in."""
    device = features.device.type if isinstance(features, Tensor) else "cpu"
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
