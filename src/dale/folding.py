"""BatchNorm folded into the convolutions and linear layers before it: a faster replica of a network in eval mode.

In eval mode BatchNorm is affine, y = (z - mean) * gamma / sqrt(var + eps) + beta, and so is the layer before it; the
two make one layer:

    W' = W * s,    b' = (b - mean) * s + beta,    s = gamma / sqrt(var + eps)      (per output channel)

The factors are computed in float64 and rounded once.
"""

from __future__ import annotations

import copy

import torch
import torch.fx
from torch import Tensor, nn

_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fold_batchnorm(model: nn.Module) -> nn.Module | None:
    """Return a frozen eval-mode replica with BatchNorm folded where it can be, or None.

    None where torch.fx cannot trace the model or there is nothing to fold. The replica shares no storage with the
    model, its parameters ask for no gradients, and it is for inference and for gradients to the input alone.
    """
    try:
        replica = copy.deepcopy(model).eval()
        with torch.no_grad():
            graph = torch.fx.symbolic_trace(replica)
    except Exception:  # whatever a stranger's forward raises under a tracer, the model itself still works
        return None
    modules = dict(graph.named_modules())
    folded = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_module" or not isinstance(modules.get(node.target), _NORMS):
            continue
        (before,) = node.args[:1]
        if not isinstance(before, torch.fx.Node) or before.op != "call_module" or len(before.users) > 1:
            continue
        layer, norm = modules[before.target], modules[node.target]
        shared = sum(n.op == "call_module" and n.target == before.target for n in graph.graph.nodes) > 1
        if shared or type(layer) not in _LAYERS or not _foldable(norm):
            continue
        _fold(layer, norm)
        node.replace_all_uses_with(before)
        graph.graph.erase_node(node)
        folded += 1
    if folded == 0:
        return None
    graph.delete_all_unused_submodules()
    graph.recompile()
    for parameter in graph.parameters():
        parameter.requires_grad_(False)
    return graph.eval()


def _foldable(norm: nn.Module) -> bool:
    """Only with running statistics: without them a BatchNorm in eval mode still looks at its batch."""
    return norm.running_mean is not None and norm.running_var is not None


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    weight = layer.weight
    assert isinstance(weight, Tensor) and isinstance(norm.running_mean, Tensor)
    assert isinstance(norm.running_var, Tensor)
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    shift = torch.zeros_like(scale)
    if isinstance(norm.weight, Tensor) and isinstance(norm.bias, Tensor):
        scale, shift = scale * norm.weight.detach().double(), norm.bias.detach().double()
    bias = layer.bias.detach().double() if isinstance(layer.bias, Tensor) else torch.zeros_like(scale)
    rows = scale.view(-1, *([1] * (weight.dim() - 1)))
    new_bias = (bias - norm.running_mean.double()) * scale + shift
    layer.weight = nn.Parameter((weight.detach().double() * rows).to(weight.dtype), requires_grad=False)
    layer.bias = nn.Parameter(new_bias.to(weight.dtype), requires_grad=False)
