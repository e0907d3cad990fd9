from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dale.errors import UsageError
from dale.models import ConvNet, SmallCNN


def test_the_forward_pass_is_that_of_the_public_example():
    model = ConvNet(channels=1, size=(28, 28), num_classes=10).eval()
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    z = (x - 0.5) / 0.5
    z = F.relu(F.conv2d(z, model.conv1.weight, model.conv1.bias))
    z = F.max_pool2d(F.relu(F.conv2d(z, model.conv2.weight, model.conv2.bias)), 2)
    z = F.relu(F.linear(torch.flatten(z, 1), model.fc1.weight, model.fc1.bias))
    assert torch.equal(model(x), F.linear(z, model.fc2.weight, model.fc2.bias))


def test_dropout_is_the_papers_and_can_be_set():
    model = ConvNet()
    assert (model.dropout1.p, model.dropout2.p) == (0.25, 0.5)
    without = ConvNet(dropout=(0.0, 0.0)).train()
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.equal(without(x), without.eval()(x))
    with pytest.raises(UsageError, match=r"two probabilities in \[0, 1\), got \(0.5, 1.5\)"):
        ConvNet(dropout=(0.5, 1.5))


@pytest.mark.parametrize("size", [(6, 6), (8, 8), (9, 7), (33, 20)])
def test_sizes_are_inferred(size):
    model = ConvNet(channels=3, size=size, num_classes=4).eval()
    assert model(torch.zeros(2, 3, *size)).shape == (2, 4)


def test_images_too_small_are_refused():
    with pytest.raises(UsageError, match="at least 6x6 pixels, got 8x5"):
        ConvNet(size=(8, 5))


def test_the_forward_pass_is_that_of_the_network_published_with_trades():
    model = SmallCNN().eval()
    x = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    z = (x - 0.5) / 0.5
    for conv in (model.conv1, model.conv2):
        z = F.relu(F.conv2d(z, conv.weight, conv.bias))
    z = F.max_pool2d(z, 2)
    for conv in (model.conv3, model.conv4):
        z = F.relu(F.conv2d(z, conv.weight, conv.bias))
    z = torch.flatten(F.max_pool2d(z, 2), 1)
    for linear in (model.fc1, model.fc2):
        z = F.relu(F.linear(z, linear.weight, linear.bias))
    assert torch.equal(model(x), F.linear(z, model.fc3.weight, model.fc3.bias))


@pytest.mark.parametrize("size", [(16, 16), (17, 19), (32, 28)])
def test_sizes_of_the_deeper_network_are_inferred(size):
    assert SmallCNN(channels=3, size=size, num_classes=4).eval()(torch.zeros(2, 3, *size)).shape == (2, 4)


def test_what_the_deeper_network_refuses():
    with pytest.raises(UsageError, match="at least 16x16 pixels, got 28x15"):
        SmallCNN(size=(28, 15))
    with pytest.raises(UsageError, match=r"in \[0, 1\), got 1.0"):
        SmallCNN(dropout=1.0)
