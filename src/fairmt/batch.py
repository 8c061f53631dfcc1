"""One call's arguments, checked and laid side by side.

After this module nothing is missing by name, of a wrong shape, or out of range: missing labels are rows of weight
0, and unknown members are rows of zeros in the one-hot matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import FairMTError, describe, unknown_name
from .labels import EXPECTED, decode, legal, unify
from .layout import Head, Kind, Layout, join
from .state import State
from .watch import Watch

TensorMap = Mapping[str, Tensor]
OptionalTensorMap = Mapping[str, Tensor | None]


class Batch(NamedTuple):
    """B rows in the layout's C columns; all in one floating dtype, without gradient.

    Attributes:
        logits: (B, C), 0 where the label is missing: whatever stands there, it counts for nothing.
        raw_logits: (B, C) as they came.
        labels: (B, C): 0/1 for detections, one-hot for classes, values for regressions; 0 where missing.
        weight: (B, C): the row's weight, 0 where the label is missing.
        positive: (B, C): labels times weight.
        members: (B, attributes · width) one-hot; a row of an unknown person is 0.
        weighted: whether sample weights were given; without, `weight` is 0 or 1 and counts rows.
        problem: an error found in the values here, to be raised when all ranks know of it.
    """

    logits: Tensor
    raw_logits: Tensor
    labels: Tensor
    weight: Tensor
    positive: Tensor
    members: Tensor
    weighted: bool
    problem: FairMTError | None = None


class Reader(State):
    """Turns a call's dictionaries into a `Batch`, or raises an error that names what is wrong.

    Args:
        layout: the problem's numbering.
        validate: look at values at once (True), only mark and mask them (False), or the former on the CPU and the
            latter on accelerators, where a look would wait for the device (None).
    """

    classes: Tensor
    class_head: Tensor
    class_counts: Tensor
    group_numbers: Tensor
    lowest_group: Tensor
    highest_group: Tensor

    def __init__(self, layout: Layout, validate: bool | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.validate = validate
        classifications = layout.heads_of("classification")
        self._constant("classes", [k for head in classifications for k in range(head.width)])
        self._constant("class_head", [i for i, head in enumerate(classifications) for _ in range(head.width)])
        self._constant("class_counts", [head.width for head in classifications])
        self._constant("group_numbers", list(range(layout.groups.width)))
        self._constant("lowest_group", [-1 for _ in layout.groups.given])
        self._constant("highest_group", [attribute.size - 1 for attribute in layout.groups.given])
        cells = [("labels", head.name) for head in layout.heads]
        cells += [("members", attribute.name) for attribute in layout.groups.given]
        cells += [("heads", head.name) for head in layout.heads]
        self.head_names = {head.name: None for head in layout.heads}
        self.given_names = {attribute.name: None for attribute in layout.groups.given}
        self.by_kind = {kind: layout.heads_of(kind) for kind in layout.kind_columns}
        self.widths = [head.width for head in layout.heads]
        self.device = torch.device("cpu")
        self.watch = Watch([*cells, ("sample_weight", ""), ("loss", "")])

    def _constant(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.long), persistent=False)

    def forward(
        self,
        features: Tensor,
        logits: TensorMap,
        labels: OptionalTensorMap,
        members: OptionalTensorMap,
        sample_weight: Tensor | None,
        alone: bool,
    ) -> Batch:
        """Reads one call; `alone` says that no other rank waits, so that problems may be raised at once."""
        self.device = self.group_numbers.device
        size = self._check_features(features)
        layout = self.layout
        _check_names("logits", logits, self.head_names)
        _check_names("labels", labels, self.head_names)
        _check_names("members", members, self.given_names)
        z = self._logits(logits, size)
        z = z.to(torch.float64 if torch.float64 in (z.dtype, features.dtype) else torch.float32)

        problems = _Problems(self, alone)
        decoded = [self._labels(kind, labels, size, z, problems) for kind in layout.kind_columns]
        y, labelled = join([values for values, _ in decoded]), join([mask for _, mask in decoded])
        weight = labelled.to(z.dtype)
        if sample_weight is not None:
            weight = weight * self._sample_weight(sample_weight, size, z.dtype, problems).unsqueeze(1)
        return Batch(
            logits=z.masked_fill(~labelled, 0),
            raw_logits=z,
            labels=y,
            weight=weight,
            positive=y if sample_weight is None else y * weight,
            members=self._members(members, size, z, problems),
            weighted=sample_weight is not None,
            problem=problems.first,
        )

    def _check_features(self, features: Tensor) -> int:
        if not isinstance(features, Tensor) or features.ndim < 2 or not features.is_floating_point():
            raise FairMTError(
                f"features: met {_describe(features)}, expected a floating tensor of shape (rows, features)"
            )
        own = self.device
        if features.device != own:
            raise FairMTError(
                f"features: met device {features.device}, expected {own}, where the criterion is; "
                f"move one with .to({str(features.device)!r})"
            )
        return features.shape[0]

    def _logits(self, logits: TensorMap, size: int) -> Tensor:
        """All heads' logits side by side."""
        heads = self.layout.heads
        parts = self._matrices("logits", [logits[head.name] for head in heads], heads, size, self.widths)
        if not all(dtype.is_floating_point for dtype in {part.dtype for part in parts}):
            head, part = next((h, z) for h, z in zip(heads, parts, strict=True) if not z.is_floating_point())
            raise FairMTError(f"logits[{head.name!r}]: met {part.dtype}, expected a floating dtype")
        return join(parts)

    def _labels(
        self, kind: Kind, labels: OptionalTensorMap, size: int, z: Tensor, problems: _Problems
    ) -> tuple[Tensor, Tensor]:
        """Values (rows, columns) in z's dtype and the mask of the labelled, for all heads of one kind."""
        heads = self.by_kind[kind]
        widths = [1] * len(heads) if kind == "classification" else [head.width for head in heads]
        given = [
            z.new_full((size, width), torch.nan) if labels[head.name] is None else labels[head.name]
            for head, width in zip(heads, widths, strict=True)
        ]
        raw = join(unify(self._matrices("labels", given, heads, size, widths), kind, z.dtype))
        y, labelled = decode(kind, raw)
        bad = problems.settle("labels", heads, raw, y, legal(kind, y, self.class_counts))
        if bad is not None:
            y, labelled = y.masked_fill(bad, 0), labelled & ~bad
        if kind == "classification":
            labelled = labelled[:, self.class_head]
            y = (y.long()[:, self.class_head] == self.classes) & labelled
        return y.to(z.dtype), labelled

    def _matrices(
        self, what: str, given: Sequence[object], heads: Sequence[Head], size: int, widths: Sequence[int]
    ) -> list[Tensor]:
        """Each head's tensor as (rows, columns): all at once if they are that, else one by one to say which not."""
        matrices = [tensor for tensor in given if isinstance(tensor, Tensor)]
        if (
            len(matrices) == len(given)
            and [tensor.shape for tensor in matrices] == [(size, width) for width in widths]
            and {tensor.device for tensor in matrices} == {self.device}
            and not any(dtype.is_complex for dtype in {tensor.dtype for tensor in matrices})
        ):
            return matrices
        return [
            self._matrix(what, tensor, head, size, width)
            for tensor, head, width in zip(given, heads, widths, strict=True)
        ]

    def _matrix(self, what: str, tensor: object, head: Head, size: int, width: int) -> Tensor:
        if isinstance(tensor, Tensor) and tensor.device == self.device and not tensor.is_complex():
            if tensor.shape == (size, width):
                return tensor
            if width == 1 and tensor.shape == (size,):
                return tensor.unsqueeze(1)
        shapes = f"({size}, {width})" + (f" or ({size},)" if width == 1 else "")
        raise FairMTError(
            f"{what}[{head.name!r}]: met {_describe(tensor)}, expected a tensor of shape {shapes} on {self.device}"
        )

    def _sample_weight(self, weight: Tensor, size: int, dtype: torch.dtype, problems: _Problems) -> Tensor:
        if (
            not isinstance(weight, Tensor)
            or weight.shape != (size,)
            or weight.is_complex()
            or weight.device != self.device
        ):
            raise FairMTError(
                f"sample_weight: met {_describe(weight)}, expected a tensor of shape ({size},) on {self.device}"
            )
        column = weight.detach().to(dtype).unsqueeze(1)
        bad = problems.settle("sample_weight", (), column, column, torch.nan_to_num(column.abs(), posinf=-1.0))
        return (column if bad is None else column.masked_fill(bad, 0)).squeeze(1)

    def _members(self, members: OptionalTensorMap, size: int, z: Tensor, problems: _Problems) -> Tensor:
        """The one-hot membership (rows, attributes · width)."""
        groups = self.layout.groups
        if not groups.attributes:
            return z.new_zeros((size, 0))
        given = {}
        for attribute in groups.given:
            tensor = members[attribute.name]
            if tensor is None:
                tensor = self.group_numbers.new_full((size,), -1)
            if isinstance(tensor, Tensor) and tensor.shape == (size, 1):
                tensor = tensor.squeeze(1)
            if (
                not isinstance(tensor, Tensor)
                or tensor.shape != (size,)
                or tensor.is_floating_point()
                or tensor.is_complex()
                or tensor.device != self.device
            ):
                raise FairMTError(
                    f"members[{attribute.name!r}]: met {_describe(tensor)}, expected an integer tensor of shape "
                    f"({size},) on {self.device} with group numbers, -1 where unknown"
                )
            given[attribute.name] = tensor.long()
        codes = torch.stack([given[attribute.name] for attribute in groups.given], dim=1)
        bad = problems.settle("members", (), codes, codes, codes.clamp(self.lowest_group, self.highest_group))
        if bad is not None:
            codes = codes.masked_fill(bad, -1)
        if len(groups.given) < len(groups.attributes):
            parts = dict(zip(given, codes.unbind(1), strict=True))
            codes = torch.stack(groups.codes(parts), dim=1)
        return (codes.unsqueeze(2) == self.group_numbers).to(z.dtype).flatten(1)


class _Problems:
    """Bad values of one call: raised at once, kept until all ranks know, or marked on the device."""

    def __init__(self, reader: Reader, alone: bool) -> None:
        self.reader = reader
        self.alone = alone
        self.first: FairMTError | None = None
        on_host = reader.group_numbers.device.type == "cpu"
        self.look = on_host if reader.validate is None else reader.validate

    def settle(self, what: str, heads: tuple[Head, ...], raw: Tensor, values: Tensor, legal: Tensor) -> Tensor | None:
        """None if a look shows that all values are legal; else which are not, after raising or marking."""
        if self.look and torch.equal(legal, values):
            return None
        bad = legal != values
        if not self.look:
            self._mark(what, heads, values, bad)
            return bad
        error = self._error(what, heads, raw, bad)
        if self.alone:
            raise error
        self.first = self.first or error
        return bad

    def _error(self, what: str, heads: tuple[Head, ...], values: Tensor, bad: Tensor) -> FairMTError:
        row, column = (int(i) for i in bad.nonzero()[0])
        met = f"met {values[row, column].item():g} in row {row}"
        layout = self.reader.layout
        if what == "sample_weight":
            return FairMTError(f"sample_weight: {met}, expected a finite number of at least 0")
        if what == "members":
            attribute = layout.groups.given[column]
            return FairMTError(
                f"members[{attribute.name!r}]: {met}, expected a group number from 0 to {attribute.size - 1}, "
                "or -1 for unknown"
            )
        head = _owner(heads, column)
        return FairMTError(f"labels[{head.name!r}]: {met}, expected {EXPECTED[head.kind].format(last=head.width - 1)}")

    def _mark(self, what: str, heads: tuple[Head, ...], values: Tensor, bad: Tensor) -> None:
        watch = self.reader.watch
        cells = watch.cells_of(what)
        if not heads:
            watch.note(cells, values, bad)
            return
        order = [head.name for head in self.reader.layout.heads]
        at = 0
        for head in heads:
            width = 1 if head.kind == "classification" else head.width
            cell = cells.start + order.index(head.name)
            part = slice(at, at + width)
            watch.note(slice(cell, cell + 1), values[:, part].reshape(-1, 1), bad[:, part].reshape(-1, 1))
            at += width


def _owner(heads: tuple[Head, ...], column: int) -> Head:
    for head in heads:
        column -= 1 if head.kind == "classification" else head.width
        if column < 0:
            return head
    raise IndexError(column)


def _check_names(what: str, given: object, names: Mapping[str, None]) -> None:
    if isinstance(given, Mapping) and given.keys() == names.keys():
        return
    if not isinstance(given, Mapping):
        raise FairMTError(f"{what}: met {_describe(given)}, expected a mapping with {', '.join(map(repr, names))}")
    for name in given:
        if name not in names:
            raise unknown_name(what, name, names)
    missing = next(name for name in names if name not in given)
    raise FairMTError(
        f"{what}: {missing!r} is missing, met {', '.join(map(repr, given)) or 'nothing'}"
        + ("; pass None where a whole batch has none" if what != "logits" else "")
    )


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, on {value.device}"
    return describe(value)
