"""Networks for MNIST: the paper's, as in the public PyTorch example, and the one that TRADES was published with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dale.errors import require
from dale.models.layers import Normalise, make_activation, normalisation


class ConvNet(nn.Module):
    """Two 3x3 convolutions (32, 64), max-pool 2, dropout, and two linear layers (128, classes), to logits.

    1,199,882 parameters for 28x28 grey images and ten classes. `dropout` holds the probabilities after the pooling
    and before the last layer; `size` is (height, width), at least 6x6.
    """

    def __init__(
        self,
        *,
        channels: int = 1,
        size: tuple[int, int] = (28, 28),
        num_classes: int = 10,
        activation: str = "relu",
        dropout: tuple[float, float] = (0.25, 0.5),
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__()
        require(min(size) >= 6, f"convnet: images must be at least 6x6 pixels, got {size[0]}x{size[1]}")
        require(
            len(dropout) == 2 and all(0 <= p < 1 for p in dropout),
            f"convnet: dropout must be two probabilities in [0, 1), got {dropout!r}",
        )
        # each unpadded 3x3 convolution takes a pixel from every side, the pooling halves and rounds down
        height, width = ((side - 4) // 2 for side in size)
        self.normalise = normalise if normalise is not None else normalisation(channels)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.act2 = make_activation(activation)
        self.pool = nn.MaxPool2d(2)
        self.dropout1 = nn.Dropout(dropout[0])
        self.fc1 = nn.Linear(64 * height * width, 128)
        self.act3 = make_activation(activation)
        self.dropout2 = nn.Dropout(dropout[1])
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [0, 1] to logits (B, classes)."""
        x = self.act1(self.conv1(self.normalise(x)))
        x = self.dropout1(self.pool(self.act2(self.conv2(x))))
        x = self.dropout2(self.act3(self.fc1(torch.flatten(x, 1))))
        logits: Tensor = self.fc2(x)
        return logits


class SmallCNN(nn.Module):
    """Twice two 3x3 convolutions (32, 64) and max-pool 2, and three linear layers (200, 200, classes), to logits.

    The MNIST network of Zhang et al. (2019), 312,202 parameters for 28x28 grey images and ten classes: deeper than
    `ConvNet`, and a quarter of its size. `dropout` is the probability after the first linear layer; `size` is (height,
    width), at least 16x16. Unlike theirs it starts from torch's own weights.
    """

    def __init__(
        self,
        *,
        channels: int = 1,
        size: tuple[int, int] = (28, 28),
        num_classes: int = 10,
        activation: str = "relu",
        dropout: float = 0.5,
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__()
        require(min(size) >= 16, f"smallcnn: images must be at least 16x16 pixels, got {size[0]}x{size[1]}")
        require(0 <= dropout < 1, f"smallcnn: dropout must be in [0, 1), got {dropout!r}")
        # twice: two unpadded 3x3 convolutions take four pixels of each side, the pooling halves and rounds down
        height, width = (((side - 4) // 2 - 4) // 2 for side in size)
        self.normalise = normalise if normalise is not None else normalisation(channels)
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.act1 = make_activation(activation)
        self.conv2 = nn.Conv2d(32, 32, 3)
        self.act2 = make_activation(activation)
        self.pool1 = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(32, 64, 3)
        self.act3 = make_activation(activation)
        self.conv4 = nn.Conv2d(64, 64, 3)
        self.act4 = make_activation(activation)
        self.pool2 = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(64 * height * width, 200)
        self.act5 = make_activation(activation)
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(200, 200)
        self.act6 = make_activation(activation)
        self.fc3 = nn.Linear(200, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) in [0, 1] to logits (B, classes)."""
        x = self.pool1(self.act2(self.conv2(self.act1(self.conv1(self.normalise(x))))))
        x = self.pool2(self.act4(self.conv4(self.act3(self.conv3(x)))))
        x = self.dropout(self.act5(self.fc1(torch.flatten(x, 1))))
        logits: Tensor = self.fc3(self.act6(self.fc2(x)))
        return logits
