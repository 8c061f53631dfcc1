"""The one exception users of the package meet."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from numbers import Integral, Real


class FairMTError(ValueError):
    """A mistake in what was given: names the argument, what was met and what was expected."""


def unknown_name(what: str, met: object, allowed: Iterable[object]) -> FairMTError:
    """The error for a name that is not among the allowed ones, with the nearest of them."""
    options = list(allowed)
    near = get_close_matches(str(met), [str(name) for name in options], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    expected = ", ".join(repr(name) for name in options[:20]) + (" …" if len(options) > 20 else "")
    return FairMTError(f"{what}: met {short(met)}, expected one of {expected or 'none'}{hint}")


def describe(value: object) -> str:
    """A value as an error shows it: what it is, and no more of it than fits in a line."""
    if isinstance(value, Collection) and not isinstance(value, str) and len(value) == 0:
        return f"an empty {type(value).__name__}"
    return f"{type(value).__name__} {short(value)}"


def short(value: object, longest: int = 80) -> str:
    """The beginning of a value's representation."""
    text = " ".join(repr(value).split())
    return text if len(text) <= longest else f"{text[:longest]}…"


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a number of this kind, NumPy's among them, and no truth value."""
    return isinstance(value, kind) and not isinstance(value, bool)


def check_number(
    name: str, value: object, *, above: float | None = None, least: float | None = None, finite: bool = True
) -> float:
    """A real number within bounds, or an error."""
    if is_number(value, Real):
        number = float(value)  # type: ignore[arg-type]
        fits = (above is None or number > above) and (least is None or number >= least)
        if fits and (math.isfinite(number) or (number > 0 and not finite)):
            return number
    kind = "a positive number" if above == 0 else "a number"
    bound = f" of at least {least:g}" if least is not None else f" above {above:g}" if above else ""
    raise FairMTError(f"{name}: met {short(value)}, expected {kind}{bound}{', finite' if finite else ''}")


def check_integer(name: str, value: object, least: int) -> int:
    """A whole number of at least so much, or an error."""
    if is_number(value, Integral) and int(value) >= least:  # type: ignore[call-overload]
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise FairMTError(f"{name}: met {short(value)}, expected an int of at least {least}")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """One of the allowed values, or an error that names the nearest."""
    options = list(allowed)
    # By identity and by equal strings only: an array compared to a name gives an array.
    if not any(value is option or (isinstance(value, str) and value == option) for option in options):
        raise unknown_name(name, value, options)
