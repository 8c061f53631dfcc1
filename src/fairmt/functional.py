"""The pure functions of the method: tensors in, tensors out, no state."""

from .aggregation import ahfda, frank_wolfe
from .disparity import aeod, aep, caeod, group_rates
from .geometry import head_gram, head_gram_mean
from .simplex import min_norm, project_simplex

__all__ = [
    "aeod",
    "aep",
    "ahfda",
    "caeod",
    "frank_wolfe",
    "group_rates",
    "head_gram",
    "head_gram_mean",
    "min_norm",
    "project_simplex",
]
