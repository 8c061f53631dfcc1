"""The composition of the parts into criteria, and each method in a file of its own."""

from ..constraint import Infeasible
from .criterion import Criterion
from .fairmt import FairMT
from .step import Kkt, Step

__all__ = ["Criterion", "FairMT", "Infeasible", "Kkt", "Step"]
