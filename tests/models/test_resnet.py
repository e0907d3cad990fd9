from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from dale.models.resnet import BasicBlock, Bottleneck, ResNet


def images(size: int = 32) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def test_every_stage_after_the_first_halves_the_image():
    model = ResNet(BasicBlock, (2, 2, 2, 2)).eval()
    z = model.act1(model.bn1(model.conv1(images())))
    shapes = [tuple((z := stage(z)).shape[1:]) for stage in model.stages]
    assert shapes == [(64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4)]


def test_the_bottleneck_widens_by_four():
    block = Bottleneck(64, 32, 2, "relu").eval()
    assert block(torch.zeros(1, 64, 8, 8)).shape == (1, 128, 4, 4)
    assert isinstance(Bottleneck(128, 32, 1, "relu").shortcut, nn.Identity)


def test_a_block_with_a_silent_branch_is_its_shortcut():
    block = BasicBlock(8, 8, 1, "relu").eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 8, 5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x), x)


def test_every_batch_norm_directly_follows_its_convolution():
    """Folding each BatchNorm into the node before it, found by tracing, leaves no BatchNorm and the same logits."""
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (1, 1, 1, 1)).train()
    model(images(8))  # statistics that are not the initial ones
    model.eval()
    traced = torch.fx.symbolic_trace(model)
    modules = dict(traced.named_modules())
    folded = 0
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(modules[node.target], nn.BatchNorm2d):
            before = node.args[0]
            assert isinstance(modules[before.target], nn.Conv2d)
            traced.set_submodule(before.target, fuse_conv_bn_eval(modules[before.target], modules[node.target]))
            traced.set_submodule(node.target, nn.Identity())
            folded += 1
    assert folded == 1 + 4 * 2 + 3
    traced.recompile()
    assert torch.allclose(traced(images()), model(images()), atol=1e-5)
