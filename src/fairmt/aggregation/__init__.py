"""One number from many violations: weights on the simplex."""

from .ahfda import Ahfda, ahfda
from .frank_wolfe import frank_wolfe
from .plain import Maximum, Mean

__all__ = ["Ahfda", "Maximum", "Mean", "ahfda", "frank_wolfe"]
