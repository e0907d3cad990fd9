"""Pre-activation networks in CIFAR form: PreActResNet-18 (He et al., 2016) and WideResNet (Zagoruyko, 2016)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from dale.errors import require
from dale.models.layers import Normalise, make_activation, normalisation


class PreActBlock(nn.Module):
    """conv3x3(act(BN(conv3x3(z)))) + shortcut, z = act(BN(x)).

    The shortcut is x itself where the shape is kept, and a 1x1 convolution of z where it changes. Every change of
    shape counts: WideResNet widens in its first stage too, at stride 1.
    """

    def __init__(self, inputs: int, planes: int, stride: int, activation: str) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.act1 = make_activation(activation)
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.act2 = make_activation(activation)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        keeps_shape = stride == 1 and inputs == planes
        self.shortcut = None if keeps_shape else nn.Conv2d(inputs, planes, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        z = self.act1(self.bn1(x))
        # decided when the block was built, so that tracing sees one path
        kept: Tensor = x if self.shortcut is None else self.shortcut(z)
        changed: Tensor = self.conv2(self.act2(self.bn2(self.conv1(z))))
        return kept + changed


def _stages(depths: Sequence[int], widths: Sequence[int], inputs: int, activation: str) -> nn.Sequential:
    """Stages of pre-activation blocks; each after the first halves the image."""
    stages = []
    for stage, (depth, planes) in enumerate(zip(depths, widths, strict=True)):
        blocks = []
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            blocks.append(PreActBlock(inputs, planes, stride, activation))
            inputs = planes
        stages.append(nn.Sequential(*blocks))
    return nn.Sequential(*stages)


class PreActResNet(nn.Module):
    """Stem, four stages of pre-activation blocks of 64, 128, 256, 512 planes, mean, linear.

    PreActResNet-18, `depths` (2, 2, 2, 2), has 11,171,146 parameters for ten classes: the widely used form without a
    BatchNorm after the last stage.
    """

    def __init__(
        self,
        depths: Sequence[int] = (2, 2, 2, 2),
        *,
        channels: int = 3,
        num_classes: int = 10,
        activation: str = "relu",
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__()
        self.normalise = normalise if normalise is not None else normalisation(channels)
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.stages = _stages(depths, (64, 128, 256, 512), 64, activation)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [0, 1] to logits (B, classes)."""
        logits: Tensor = self.fc(self.stages(self.conv1(self.normalise(x))).mean((2, 3)))
        return logits


class WideResNet(nn.Module):
    """WRN-depth-width: stem of 16, three stages of 16k, 32k, 64k planes, BatchNorm, activation, mean, linear.

    `depth` = 6n + 4 gives n blocks a stage. For ten classes WRN-28-10 has 36,479,194 parameters and WRN-34-10
    46,160,474. Convolutions start at N(0, 2 / (9 planes)), as in the authors' code.
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        *,
        channels: int = 3,
        num_classes: int = 10,
        activation: str = "relu",
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__()
        require(depth >= 10 and (depth - 4) % 6 == 0, f"WideResNet: depth must be 6n + 4 (10, 16, ...), got {depth}")
        require(width >= 1, f"WideResNet: width must be at least 1, got {width}")
        self.normalise = normalise if normalise is not None else normalisation(channels)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.stages = _stages([(depth - 4) // 6] * 3, (16 * width, 32 * width, 64 * width), 16, activation)
        self.bn = nn.BatchNorm2d(64 * width)
        self.act = make_activation(activation)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                area = math.prod(module.kernel_size)
                nn.init.normal_(module.weight, std=math.sqrt(2 / (area * module.out_channels)))
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [0, 1] to logits (B, classes)."""
        x = self.stages(self.conv1(self.normalise(x)))
        logits: Tensor = self.fc(self.act(self.bn(x)).mean((2, 3)))
        return logits
