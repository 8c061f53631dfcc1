"""Problems on the probability simplex: the nearest point of it, and the minimum norm over it."""

from .min_norm import min_norm, solve
from .projection import project, project_simplex

__all__ = ["min_norm", "project", "project_simplex", "solve"]
