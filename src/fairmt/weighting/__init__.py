"""Task weights on the simplex: the first socket of a method."""

from .minimum_norm import MinimumNorm
from .uniform import Uniform
from .weighting import Situation, Weighting

__all__ = ["MinimumNorm", "Situation", "Uniform", "Weighting"]
