"""Data for training and for tests."""

from .planted import Planted, planted

__all__ = ["Planted", "planted"]
