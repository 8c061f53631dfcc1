"""What each kind of task computes from its logits, for all columns of the kind at once."""

from .block import Block, Terms
from .classification import ClassificationBlock
from .detection import DetectionBlock
from .regression import RegressionBlock

__all__ = ["Block", "ClassificationBlock", "DetectionBlock", "RegressionBlock", "Terms"]
