"""The replica of the search: the same function, folded, and given up where it would not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dale.data import Split
from dale.evaluation import evaluate
from dale.evaluation.replica import TwoLayouts, search_replica
from dale.folding import Replica
from dale.models import create_model
from dale.perturbations import Linf

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


class Rounding(torch.autograd.Function):
    """Rounds on the way forth, and lets gradients through on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (7.0 * x).round() / 7.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Through(nn.Module):
    """Rounds its images; gradients go through, by an autograd function or by hand."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            with torch.no_grad():
                rest = (7.0 * x).round() / 7.0 - x
            return self.layers(x + rest)  # type: ignore[no-any-return]
        return self.layers(Rounding.apply(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_gradient_that_a_trace_does_not_show_is_climbed_all_the_same(by_hand: bool) -> None:
    """The replica has the same logits and no gradient: PGD on it would find nothing, and report robustness."""
    model = Through(by_hand).eval()
    images = torch.rand(64, 1, 8, 8)
    with torch.no_grad():
        logits = model(images)
    replica = search_replica(model, images, logits)
    x = images.clone().requires_grad_(True)
    gradients = [torch.autograd.grad(function(x)[:, 0].sum(), x)[0] for function in (model, replica)]
    assert torch.equal(*gradients)
    assert gradients[0].abs().max() > 0.0
    fallen = evaluate(model, Split.of(images, logits.argmax(dim=1), 10), Linf(epsilon=0.3), ["pgd20"], progress=False)
    assert fallen["pgd20"].accuracy.value < 0.5


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
