"""The replica of the search: the same function, folded, and given up where it would not be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dale.data import Split
from dale.evaluation.replica import TwoLayouts, search_replica
from dale.folding import Replica
from dale.models import create_model

Victim = tuple[nn.Module, Split]


def test_agrees_in_value_and_gradient(victim: Victim) -> None:
    model, split = victim
    images = split.convert(split.images[:128])
    model.requires_grad_(False)
    try:
        with torch.no_grad():
            replica = search_replica(model, images, model(images))
        assert isinstance(replica, TwoLayouts)
        assert isinstance(replica.for_gradients, Replica)
        with torch.no_grad():
            assert torch.allclose(replica(images), model(images), atol=1e-4)
        gradients = []
        for function in (model, replica):
            x = images.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(function(x)[:, 0].sum(), x)
            gradients.append(gradient)
        assert torch.allclose(*gradients, atol=1e-4)
    finally:
        model.requires_grad_(True)


class Baked(nn.Module):
    """Its trace remembers the number of images."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), nn.Linear(64, 10)
        self.count: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).reshape(self.count or x.shape[0], 64))


@pytest.mark.parametrize("count", [None, 64])
def test_a_trace_of_one_batch_size_is_not_used(count: int | None) -> None:
    model, images = Baked().eval().requires_grad_(False), torch.rand(64, 1, 8, 8)
    logits = model(images)
    model.count = count
    replica = search_replica(model, images, logits)
    if count is None:
        assert isinstance(replica, TwoLayouts)
    else:
        assert not isinstance(replica.for_gradients if isinstance(replica, TwoLayouts) else replica, Replica)


class Untraceable(nn.Module):
    """Control flow that depends on the images."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1) if x.sum() > 0 else -x.flatten(1))


def test_what_cannot_be_traced_is_searched_as_it_is() -> None:
    model, images = Untraceable().eval().requires_grad_(False), torch.rand(8, 1, 8, 8)
    replica = search_replica(model, images, model(images))
    assert isinstance(replica, TwoLayouts)
    assert replica.for_gradients is model


@pytest.mark.parametrize(("name", "channels", "size"), [("convnet", 1, 8), ("resnet18", 3, 32)])
def test_the_products_own_models_have_one(name: str, channels: int, size: int) -> None:
    model = create_model(name, channels=channels, size=size, num_classes=10).eval().requires_grad_(False)
    images = torch.rand(3, channels, size, size)
    replica = search_replica(model, images, model(images))
    assert isinstance(replica, TwoLayouts)
    assert isinstance(replica.for_gradients, Replica) == (name == "resnet18")  # the other has no BatchNorm to fold
