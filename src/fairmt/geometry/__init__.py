"""How the tasks' gradients, and the fairness gradient, meet in the encoder."""

from .autograd import Feature, Full
from .closed import BatchMean, Sample, head_gram, head_gram_mean
from .forward import Forward, Geometry, Gram
from .heads import Heads

__all__ = [
    "BatchMean",
    "Feature",
    "Forward",
    "Full",
    "Geometry",
    "Gram",
    "Heads",
    "Sample",
    "head_gram",
    "head_gram_mean",
]
