"""ResNet-18/34/50 in CIFAR form (He et al., 2016): a 3x3 stem of stride 1, no max-pool, global average pooling.

Every convolution is directly followed by its BatchNorm, so that the pair folds into one convolution in eval mode.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dale.models.layers import Normalise, make_activation, normalisation


class BasicBlock(nn.Module):
    """act(BN(conv3x3(act(BN(conv3x3(x))))) + shortcut(x))."""

    expansion = 1

    def __init__(self, inputs: int, planes: int, stride: int, activation: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = _shortcut(inputs, planes, stride)
        self.act2 = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        result: Tensor = self.act2(y + self.shortcut(x))
        return result


class Bottleneck(nn.Module):
    """act(BN(conv1x1(act(BN(conv3x3(act(BN(conv1x1(x)))))))) + shortcut(x)); the last convolution widens by four."""

    expansion = 4

    def __init__(self, inputs: int, planes: int, stride: int, activation: str) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.act2 = make_activation(activation)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.shortcut = _shortcut(inputs, outputs, stride)
        self.act3 = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.act2(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        result: Tensor = self.act3(y + self.shortcut(x))
        return result


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 convolution and BatchNorm where the shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """Stem, four stages of 64, 128, 256, 512 planes (each after the first halves the image), mean, linear.

    For ten classes: ResNet-18 has 11,173,962 parameters, ResNet-34 21,282,122, ResNet-50 23,520,842.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        *,
        channels: int = 3,
        num_classes: int = 10,
        activation: str = "relu",
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__()
        self.normalise = normalise if normalise is not None else normalisation(channels)
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.act1 = make_activation(activation)
        stages, inputs = [], 64
        for stage, depth in enumerate(depths):
            planes, blocks = 64 * 2**stage, []
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                blocks.append(block(inputs, planes, stride, activation))
                inputs = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [0, 1] to logits (B, classes)."""
        x = self.act1(self.bn1(self.conv1(self.normalise(x))))
        # a mean rather than an adaptive pooling: any image size, and deterministic backward on every device
        logits: Tensor = self.fc(self.stages(x).mean((2, 3)))
        return logits
