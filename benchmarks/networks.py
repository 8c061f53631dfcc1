"""Encoders to measure beside: their cost is the yardstick, their weights are random."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block of 3×3 convolutions, or a bottleneck of 1×1, 3×3, 1×1."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        bottleneck = outputs != width
        first = nn.Conv2d(inputs, width, 1 if bottleneck else 3, 1 if bottleneck else stride, 0 if bottleneck else 1)
        layers = [first, nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, stride if bottleneck else 1, 1), nn.BatchNorm2d(width)]
        if bottleneck:
            layers += [nn.ReLU(), nn.Conv2d(width, outputs, 1), nn.BatchNorm2d(outputs)]
        self.body = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet(depths: tuple[int, ...], expansion: int, width: int = 64) -> tuple[nn.Module, int]:
    """A ResNet-like encoder and its feature size."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for stage, depth in enumerate(depths):
        own = width * 2**stage
        for block in range(depth):
            layers.append(Residual(inputs, own, own * expansion, 2 if stage and not block else 1))
            inputs = own * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), inputs


class Transformer(nn.Module):
    """Token embeddings, positions, encoder layers, and the mean over tokens."""

    def __init__(self, size: int, layers: int, heads: int, length: int, vocabulary: int = 30_000) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.position = nn.Parameter(torch.zeros(length, size))
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens) + self.position).mean(1)


def mlp(inputs: int, hidden: tuple[int, ...]) -> tuple[nn.Module, int]:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), nn.ReLU(), nn.Dropout(0.1)]
        inputs = size
    return nn.Sequential(*layers), inputs


def build(name: str) -> tuple[nn.Module, int, tuple[int, ...]]:
    """An encoder, its feature size, and the shape of a batch (one of token numbers has two dimensions)."""
    if name == "mlp":
        return *mlp(64, (128, 128)), (256, 64)
    if name == "conv":
        return *resnet((2, 2, 2, 2), 1), (16, 3, 64, 64)
    if name == "transformer":
        return Transformer(256, 4, 4, 128), 256, (8, 128)
    if name == "resnet50":
        return *resnet((3, 4, 6, 3), 4), (256, 3, 224, 224)
    if name == "resnet18":
        return *resnet((2, 2, 2, 2), 1), (512, 3, 64, 64)
    if name == "bert":
        return Transformer(768, 12, 12, 128), 768, (64, 128)
    raise SystemExit(f"--encoder: met {name!r}, expected mlp, conv, transformer, resnet50, resnet18 or bert")
