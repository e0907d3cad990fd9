"""Folding BatchNorm changes nothing but the rounding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dale import fused
from dale.compiling import as_it_is
from dale.folded import FoldedBlock
from dale.folding import Replica, fold_batchnorm, replicate
from dale.models import create_model


def shaken(model: nn.Module) -> nn.Module:
    """Give BatchNorm statistics and weights that matter."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                for tensor, low, high in ((module.running_mean, -1, 1), (module.running_var, 0.5, 2)):
                    tensor.uniform_(low, high)
                if module.affine:
                    nn.init.uniform_(module.weight, 0.5, 1.5)
                    nn.init.uniform_(module.bias, -1, 1)
    return model.eval()


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "preact-resnet18"])
def test_networks(name: str) -> None:
    model = shaken(create_model(name, channels=3, size=16, num_classes=10))
    folded = fold_batchnorm(model)
    assert folded is not None
    count = [sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) for net in (model, folded)]
    assert count[1] < count[0]
    assert name == "preact-resnet18" or count[1] == 0
    x = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    ours, theirs = folded(x), model(x)
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()
    slopes = [torch.autograd.grad(out.square().sum(), x)[0] for out in (ours, theirs)]
    # in the norm: where an activation is zero up to rounding its slope may be taken on either side
    assert float((slopes[0] - slopes[1]).norm()) < 1e-2 * float(slopes[1].norm())
    assert not any(p.requires_grad for p in folded.parameters())
    assert all(p.requires_grad for p in model.parameters())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) if x.sum() > 0 else x


def test_what_cannot_be_folded_is_left() -> None:
    assert fold_batchnorm(Branching()) is None
    assert fold_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())) is None
    # batch statistics are no affine map
    assert fold_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False))) is None


def test_a_layer_used_twice_is_folded_where_it_is_followed_by_batchnorm() -> None:
    conv = nn.Conv2d(2, 2, 1)
    model = shaken(nn.Sequential(conv, nn.BatchNorm2d(2), conv))
    folded = fold_batchnorm(model)
    x = torch.rand(2, 2, 5, 5)
    assert folded is None or torch.allclose(folded(x), model(x), atol=1e-5)


def test_without_affine() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=False)))
    folded = fold_batchnorm(model)
    assert folded is not None
    x = torch.rand(2, 1, 5, 5)
    assert torch.allclose(folded(x), model(x), atol=1e-5)


def test_blocks_as_one_operation_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shaken(create_model("resnet18", channels=3, size=16, num_classes=10)).double()
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    plain = replicate(model, dtype=torch.float64)
    monkeypatch.setattr("dale.folding.blocks_pay", lambda device: True)
    monkeypatch.setattr("dale.folded.fits_wide", lambda x: True)
    joined = replicate(model, dtype=torch.float64)
    assert isinstance(plain, Replica)
    assert isinstance(joined, Replica)
    blocks = [m for m in joined.modules() if isinstance(m, FoldedBlock)]
    assert [(block.premasked, block.mask_input) for block in blocks] == [(True, True), (False, True)]
    slopes = [torch.autograd.grad(replica(x).square().sum(), x)[0] for replica in (plain, joined)]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0, atol=1e-6 * float(slopes[0].abs().max()))


@pytest.mark.parametrize("name", ["resnet18", "preact-resnet18"])
def test_shortcuts_whose_gradient_is_spread_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shaken(create_model(name, channels=3, size=16, num_classes=10)).double()
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    replica = replicate(model, dtype=torch.float64, channels_last=True)
    assert isinstance(replica, Replica)
    channels = []
    original = fused._spread_gradient

    def spread(gradient: Tensor, *rest: Any) -> Tensor:
        channels.append(gradient.shape[1])
        return original(gradient, *rest)

    (plain,) = torch.autograd.grad(replica(x).square().sum(), x)
    monkeypatch.setattr("dale.folded.spreading_pays", lambda x: True)
    monkeypatch.setattr("dale.fused._spread_gradient", spread)
    compiled = torch.compile(replica, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    assert channels == [512, 256, 128]
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-9 * float(plain.abs().max()))


def test_the_shortcut_carries_the_bias_of_the_branch_that_it_adds_up() -> None:
    model = shaken(create_model("resnet18", channels=3, size=16, num_classes=10))
    replica = replicate(model)
    assert isinstance(replica, Replica)
    assert [(part.skipping, part.carried[0].bare) for part in replica.together if part.carried] == [(True, True)] * 3
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(replica(x), model(x), rtol=0, atol=2e-5 * float(model(x).detach().abs().max()))


def test_refreshing_together_is_refreshing_one_by_one() -> None:
    model = shaken(create_model("resnet18", channels=3, size=16, num_classes=10))
    replica = replicate(model, dtype=torch.bfloat16, channels_last=True, fuse=False)
    assert isinstance(replica, Replica)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    for compiler in (as_it_is, functools.partial(torch.compile, backend="aot_eager", fullgraph=True)):
        replica.compiler = compiler
        for part in replica.together:
            part.weight.zero_()
        replica.refresh()
        for part in replica.together:
            together = part.weight.clone(), part.bias.clone()
            part.refresh()
            assert torch.equal(part.weight, together[0])
            torch.testing.assert_close(part.bias, together[1])
