from __future__ import annotations

import math

import pytest
import torch

from dale.errors import UsageError
from dale.models.preact import PreActBlock, PreActResNet, WideResNet


def test_a_block_is_a_sum_of_shortcut_and_branch():
    x = torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    same = PreActBlock(4, 4, 1, "relu").eval()
    torch.nn.init.zeros_(same.conv2.weight)
    assert torch.equal(same(x), x)
    wider = PreActBlock(4, 8, 1, "relu").eval()  # a change of width alone needs a convolution too
    torch.nn.init.zeros_(wider.conv2.weight)
    assert torch.equal(wider(x), wider.shortcut(wider.act1(wider.bn1(x))))
    assert PreActBlock(4, 8, 2, "silu").eval()(x).shape == (2, 8, 3, 3)


def test_stages_halve_the_image():
    x = torch.zeros(1, 3, 32, 32)
    model = PreActResNet().eval()
    assert model.stages(model.conv1(x)).shape == (1, 512, 4, 4)
    wide = WideResNet(10, 1).eval()
    assert wide.stages(wide.conv1(x)).shape == (1, 64, 8, 8)


def test_wide_initialisation_is_the_authors():
    torch.manual_seed(0)
    model = WideResNet(10, 4)
    weight = model.stages[2][0].conv2.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 256)), rel=0.01)
    assert not model.fc.bias.any()


@pytest.mark.parametrize(("depth", "width", "words"), [(4, 1, "6n"), (29, 10, "6n"), (28, 0, "width")])
def test_bad_shapes(depth, width, words):
    with pytest.raises(UsageError, match=words):
        WideResNet(depth, width)
