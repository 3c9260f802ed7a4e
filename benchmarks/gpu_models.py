"""Models of the sizes of ResNet-50 and of the small GPT-2, for the benchmark on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NUM_TOKENS, LENGTH, WIDTH, HEADS, LAYERS = 50_257, 1024, 768, 12, 12


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            *_convolution(channels, width, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, wide, 1, 1),
        )
        is_same = channels == wide and stride == 1
        self.shortcut = nn.Sequential(*(() if is_same else _convolution(channels, wide, 1, stride)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, wide: int, size: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(channels, wide, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(wide)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [
        *_convolution(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return model


class Gpt2(nn.Module):
    """A causal transformer of 124 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_TOKENS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([_Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits.flatten(0, 1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        mixed = self.mix(self.norms[0](x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = mixed.unbind(0)
        seen = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        wider: Tensor = self.mlp(self.norms[1](x))
        return x + wider


def images(batch: int, size: int = 224, **where: Any) -> tuple[Tensor, Tensor]:
    pictures = torch.randn(batch, 3, size, size, **where)
    return pictures.to(memory_format=torch.channels_last), torch.randint(1000, (batch,), **where)


def texts(batch: int, length: int = LENGTH, **where: Any) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(NUM_TOKENS, (batch, length + 1), **where)
    return tokens[:, :-1], tokens[:, 1:].flatten()
