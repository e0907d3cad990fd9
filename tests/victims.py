"""A small trained classifier that the attacks are tried on."""

from __future__ import annotations

import torch
from torch import nn

from dale.data import Split, load_dataset


class Net(nn.Module):
    """A small convolutional network with BatchNorm and dropout, for digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.conv2, self.bn2 = nn.Conv2d(12, 24, 3), nn.BatchNorm2d(24)
        self.dropout, self.fc = nn.Dropout(0.2), nn.Linear(24 * 9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = nn.functional.max_pool2d(self.bn2(self.conv2(x)).relu(), 2)
        return self.fc(self.dropout(x.flatten(1)))


def trained() -> tuple[Net, Split]:
    """A network trained against FGSM for a few seconds, and all digits that it was not trained on, plus some."""
    data = load_dataset("digits")
    x, y = data.train.convert(data.train.images), data.train.labels
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Net()
        optimiser = torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(12):
            for rows in torch.randperm(len(x)).split(100):
                images = x[rows].clone().requires_grad_(True)
                (slope,) = torch.autograd.grad(nn.functional.cross_entropy(model(images), y[rows]), images)
                images = (images + 0.15 * slope.sign()).clamp(0, 1).detach()
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(images), y[rows]).backward()
                optimiser.step()
    optimiser.zero_grad()
    parts = (data.test, data.validation, data.certification)
    images = torch.cat([part.images for part in parts])
    labels = torch.cat([part.labels for part in parts])
    split = Split(images, labels, torch.arange(len(labels)), 10, scale=16.0)
    return model.eval(), split
