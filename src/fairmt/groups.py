"""For whom: the attributes people are grouped by, their intersections, and membership codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from .errors import FairMTError, describe, is_number, short

UNKNOWN = -1
"""The code of a person whose membership is not known."""


@dataclass(frozen=True)
class Intersection:
    """An attribute whose groups are the combinations of other attributes' groups."""

    of: tuple[str, ...]


def cross(*attributes: str) -> dict[str, Intersection]:
    """The intersection of two or more attributes, to be merged into `groups`.

    A person's code in it follows from the codes in its parts (the last part counts fastest), so `members` does
    not name it; who is unknown in a part is unknown in the intersection.

    >>> {"gender": 2, "race": 6} | cross("gender", "race")
    {'gender': 2, 'race': 6, 'gender*race': Intersection(of=('gender', 'race'))}
    """
    names = all(isinstance(attribute, str) for attribute in attributes)
    if not names or len(attributes) < 2 or len(set(attributes)) != len(attributes):
        raise FairMTError(f"cross: met {short(attributes)}, expected at least two different attribute names")
    return {"*".join(attributes): Intersection(attributes)}


@dataclass(frozen=True)
class Attribute:
    """One attribute: its name, number of groups and, for an intersection, the attributes it is made of."""

    name: str
    size: int
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Groups:
    """All attributes of a problem, in order."""

    attributes: tuple[Attribute, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(attribute.name for attribute in self.attributes)

    @property
    def given(self) -> tuple[Attribute, ...]:
        """The attributes whose codes a caller passes: all but the intersections."""
        return tuple(attribute for attribute in self.attributes if not attribute.parts)

    @property
    def width(self) -> int:
        """The largest number of groups of an attribute: tables over groups are padded to it."""
        return max((attribute.size for attribute in self.attributes), default=0)

    @classmethod
    def of(cls, groups: object) -> Groups:
        """From what a user gives: attribute name -> number of groups, or `cross(…)`.

        >>> [a.size for a in Groups.of({"gender": 2, "race": 6} | cross("gender", "race")).attributes]
        [2, 6, 12]
        """
        if isinstance(groups, Groups):
            return groups
        if not isinstance(groups, Mapping):
            raise FairMTError(
                f"groups: met {describe(groups)}, expected a mapping from attribute name to number of groups"
            )
        sizes: dict[str, int] = {}
        attributes: list[Attribute] = []
        for name, value in groups.items():
            if not isinstance(name, str) or not name:
                raise FairMTError(f"groups: met the name {short(name)}, expected a non-empty string")
            if isinstance(value, Mapping) and len(value) == 1:  # {"both": cross("a", "b")}: an own name for it
                value = next(iter(value.values()))
            if isinstance(value, Intersection):
                attributes.append(_intersection(name, value, sizes))
                continue
            if not is_number(value, Integral) or value < 2:
                raise FairMTError(
                    f"groups[{name!r}]: met {short(value)}, expected an int of at least 2, or fairmt.cross(…)"
                )
            sizes[name] = int(value)
            attributes.append(Attribute(name, int(value)))
        return cls(tuple(attributes))

    def codes(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """The codes (B,) of every attribute, those of the intersections derived from their parts."""
        columns: list[Tensor] = []
        for attribute in self.attributes:
            if not attribute.parts:
                columns.append(given[attribute.name])
                continue
            code = torch.zeros_like(given[attribute.parts[0]])
            known = torch.ones_like(code, dtype=torch.bool)
            for part in attribute.parts:
                code = code * self.size(part) + given[part]
                known &= given[part] >= 0
            columns.append(torch.where(known, code, UNKNOWN))
        return columns

    def size(self, name: str) -> int:
        return next(attribute.size for attribute in self.attributes if attribute.name == name)


def _intersection(name: str, value: Intersection, sizes: Mapping[str, int]) -> Attribute:
    size = 1
    for part in value.of:
        if part not in sizes:
            raise FairMTError(
                f"groups[{name!r}]: the intersection names {part!r}, expected an attribute given before it "
                f"({', '.join(map(repr, sizes)) or 'there is none'})"
            )
        size *= sizes[part]
    return Attribute(name, size, value.of)
