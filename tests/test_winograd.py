from __future__ import annotations

import itertools
import types

import pytest
import torch
import torch.nn.functional as F

from dale import winograd
from dale.folding import Replica, replicate
from dale.models import create_model


def tensors(channels, size, *, outputs=None, images=3):
    source = torch.Generator().manual_seed(channels + size)
    x = torch.randn(images, channels, size, size, generator=source)
    weight = 0.05 * torch.randn(outputs or channels, channels, 3, 3, generator=source)
    return x, weight, torch.randn(outputs or channels, generator=source)


def close(mine, theirs):
    return bool((mine - theirs).abs().max() <= 1e-4 * theirs.abs().max())


@pytest.mark.parametrize(("channels", "outputs", "size"), [(8, 8, 4), (8, 16, 8), (16, 8, 7), (4, 4, 1), (4, 4, 9)])
def test_a_frozen_convolution_is_the_convolution(channels, outputs, size):
    x, weight, bias = tensors(channels, size, outputs=outputs)
    z = torch.randn(3, outputs, size, size, generator=torch.Generator().manual_seed(1))
    filters = winograd.transform_both(weight)
    assert close(winograd.frozen_conv(x, filters, bias), F.conv2d(x, weight, bias, padding=1))
    leaves = [t.clone().requires_grad_() for t in (x, z, x, z)]
    mine = winograd.frozen_conv(leaves[0], filters, bias, leaves[1], relu=True)
    theirs = (F.conv2d(leaves[2], weight, bias, padding=1) + leaves[3]).relu()
    assert close(mine, theirs)
    gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2)) * (theirs > 1e-3)
    for a, b in zip(
        torch.autograd.grad(mine, leaves[:2], gradient), torch.autograd.grad(theirs, leaves[2:], gradient), strict=True
    ):
        assert close(a, b)


@pytest.mark.parametrize("size", [4, 6, 9])
def test_gradients_of_a_trained_convolution_are_those_of_the_convolution(size):
    x, weight, bias = tensors(6, size, outputs=10)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    mine, theirs = winograd.trained_conv(*leaves), F.conv2d(*leaves, padding=1)
    gradient = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2))
    for a, b in zip(
        torch.autograd.grad(mine, leaves, gradient), torch.autograd.grad(theirs, leaves, gradient), strict=True
    ):
        assert close(a, b)


def test_only_wide_convolutions_that_keep_the_size_are_replaced(monkeypatch):
    asked = []
    monkeypatch.setattr(winograd, "trained_conv", lambda *args: asked.append(args) or F.conv2d(*args, padding=1))
    wide, narrow = torch.zeros(128, 128, 3, 3), torch.zeros(64, 128, 3, 3)
    x = torch.zeros(8, 128, 16, 16)  # 128 tiles, as many as channels
    with winograd.MinimalFiltering():
        for options in ({"stride": 2, "padding": 1}, {"padding": 0}, {"padding": 1, "dilation": 2}):
            torch.nn.Conv2d(128, 128, 3, **options)(x)
        F.conv2d(x, narrow, None, 1, 1)
        F.conv2d(x.double(), wide.double(), None, 1, 1)
        torch.nn.Conv2d(128, 128, 3, padding=1, groups=2)(x)
        torch.nn.Conv2d(128, 128, 3, padding=1)(x[:7])  # too few tiles to pay for the filters
        assert not asked
        torch.nn.Conv2d(128, 128, 3, padding=1)(x)
    assert len(asked) == 1
    F.conv2d(x, wide, None, 1, 1)
    assert len(asked) == 1


@pytest.mark.parametrize("faster", [True, False])
def test_what_pays_is_tried_out(faster, monkeypatch):
    """By a clock of the test's own: the library takes a second, Winograd's method half of one or two."""
    clock = itertools.accumulate(itertools.cycle([0.0, 0.5 if faster else 2.0, 0.0, 1.0]))
    monkeypatch.setattr(winograd, "time", types.SimpleNamespace(perf_counter=clock.__next__))
    winograd.pays.cache_clear()
    assert winograd.pays() is faster
    winograd.pays.cache_clear()


def test_memory_is_used_again_and_nothing_of_it_is_seen(monkeypatch):
    """Images of several sizes in turn, a few at a time: each gives what it gave alone, and no result is overwritten."""
    monkeypatch.setattr(winograd, "_ROOM", 36 * 128 * 4)  # four tiles: the images go through one by one
    weight = torch.randn(128, 128, 3, 3, generator=torch.Generator().manual_seed(0)) / 30
    filters = winograd.transform_both(weight)
    images = [torch.randn(n, 128, h, w) for n, h, w in ((3, 8, 8), (2, 5, 7), (1, 4, 4), (3, 8, 8))]
    found = [winograd.frozen_conv(x, filters, None) for x in images]
    for x, y in zip(images, found, strict=True):
        assert close(y, F.conv2d(x, weight, None, 1, 1))


def test_filters_are_transformed_in_place():
    first, second = (torch.randn(128, 128, 3, 3) for _ in range(2))
    filters = winograd.transform_both(first)
    places = [one.data_ptr() for one in filters]
    again = winograd.transform_both(second, filters)
    assert [one.data_ptr() for one in again] == places
    for mine, fresh in zip(again, winograd.transform_both(second), strict=True):
        assert torch.equal(mine, fresh)


def test_a_replica_with_minimal_filtering_is_the_model():
    model = create_model("resnet18", channels=3, size=8, num_classes=10).eval()
    replica = replicate(model, channels_last=True, minimal_filtering=True)
    assert isinstance(replica, Replica)
    assert len(replica.wide) == 9  # three each of 128, 256 and 512 channels
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine, theirs = replica(x), model(x)
    assert close(mine, theirs)
    ours = torch.autograd.grad(mine.sum(), x)[0]
    assert (ours - torch.autograd.grad(theirs.sum(), x)[0]).norm() <= 1e-2 * ours.norm()  # a ReLU may tip over
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    replica.refresh()
    assert close(replica(x), model(x))
