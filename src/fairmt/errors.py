"""The one exception users of the package meet."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


class FairMTError(ValueError):
    """A mistake in what was given: names the argument, what was met and what was expected."""


def unknown_name(what: str, met: object, allowed: Iterable[object]) -> FairMTError:
    """The error for a name that is not among the allowed ones, with the nearest of them."""
    options = list(allowed)
    near = get_close_matches(str(met), [str(name) for name in options], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    expected = ", ".join(repr(name) for name in options[:20]) + (" …" if len(options) > 20 else "")
    return FairMTError(f"{what}: met {describe(met)}, expected one of {expected or 'none'}{hint}")


def describe(value: object, longest: int = 80) -> str:
    """A value as an error shows it: what it is, and no more of it than fits in a line."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[:longest]}… ({type(value).__name__})"


def check_number(
    name: str, value: object, *, above: float | None = None, least: float | None = None, finite: bool = True
) -> float:
    """A real number within bounds, or an error."""
    bounds = [f"above {above:g}"] if above is not None else [f"of at least {least:g}"] if least is not None else []
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (not finite or math.isfinite(value)):  # type: ignore[arg-type]
        number = float(value)  # type: ignore[arg-type]
        if (above is None or number > above) and (least is None or number >= least):
            return number
    kind = "a finite number" if finite else "a number"
    raise FairMTError(f"{name}: met {describe(value)}, expected {' '.join([kind, *bounds])}")


def check_integer(name: str, value: object, least: int) -> int:
    """A whole number of at least so much, or an error."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    raise FairMTError(f"{name}: met {describe(value)}, expected a whole number of at least {least}")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """One of the allowed values, or an error that names the nearest."""
    options = list(allowed)
    if not any(value is option or (isinstance(value, str) and value == option) for option in options):
        raise unknown_name(name, value, options)
