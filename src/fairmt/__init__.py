"""FairMT: one network for many tasks, so that no group of people is served worse than the best-served one."""

from . import functional
from .errors import FairMTError
from .groups import cross
from .methods import Criterion, FairMT
from .tasks import Classification, Detection, Regression, Task

__version__ = "0.1.0"

__all__ = [
    "Classification",
    "Criterion",
    "Detection",
    "FairMT",
    "FairMTError",
    "Regression",
    "Task",
    "cross",
    "functional",
]
