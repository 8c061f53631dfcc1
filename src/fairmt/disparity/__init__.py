"""How far groups are apart: rates and errors by group, and the one-sided gaps between them."""

from .estimates import aeod, aep, caeod
from .gaps import Spread, comparable, spread
from .memory import GroupMemory
from .rates import group_rates
from .sides import DISPARITIES, Disparity, Side, SidePlan, choose

__all__ = [
    "DISPARITIES",
    "Disparity",
    "GroupMemory",
    "Side",
    "SidePlan",
    "Spread",
    "aeod",
    "aep",
    "caeod",
    "choose",
    "comparable",
    "group_rates",
    "spread",
]
