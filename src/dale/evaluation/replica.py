"""A replica of the model for the search: the same function up to rounding, faster.

BatchNorm is folded where torch.fx can trace the model. On a CPU, queries without a gradient go through a second copy
in the channels-last layout, in which pooling and small convolutions are two to three times as fast. On a GPU the
channels-last layout with fused ReLUs is the fast one for TF32, whose tensor cores want it, and the layout of the images
for strict float32. What is counted is decided by the model itself, never by a replica; but attacks climb its gradient,
so a model whose gradient a trace does not show (a backward pass of its own, say) is searched as it is.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dale.evaluation.judge import matmul_precision
from dale.faithful import unfaithful
from dale.folding import replicate

# of the largest logit: rounding alone does not exceed it, another function does
_AGREEMENT = {"ieee": 1e-4, "tf32": 1e-2}
_COMPARED = (64, 3)  # numbers of images on which replica and model are compared: a trace may have fixed the number


class TwoLayouts(nn.Module):
    """One model for gradients, one (in the channels-last layout) for queries."""

    def __init__(self, for_gradients: nn.Module, for_queries: nn.Module) -> None:
        super().__init__()
        self.for_gradients, self.for_queries = for_gradients, for_queries

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        if torch.is_grad_enabled() and x.requires_grad:
            logits: Tensor = self.for_gradients(x)
        else:
            logits = self.for_queries(x.contiguous(memory_format=torch.channels_last))
        return logits


def search_replica(model: nn.Module, images: Tensor, logits: Tensor, precision: str = "ieee") -> nn.Module:
    """Return a faster replica that agrees with the model's `logits` on `images`, or the model itself."""
    on_cpu = images.device.type == "cpu"
    pays = not on_cpu or any(isinstance(module, nn.BatchNorm2d) for module in model.modules())  # what a CPU folds
    faithful = pays and unfaithful(model, tuple(images.shape[1:]), channels_last=False) is None
    if not on_cpu:
        return _on_gpu(model, images, logits, precision) if faithful else model
    chosen = model
    if faithful:
        # a CPU's gradients are faster in the layout of the images, and its convolutions have nothing to fuse
        folded = replicate(model, channels_last=False, fuse=False)
        if isinstance(folded, nn.Module) and _agrees(folded, images, logits):
            chosen = folded
    try:
        turned = copy.deepcopy(chosen)
        turned.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stubs do not know it
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # not every module can be copied
        return chosen
    for parameter in turned.parameters():
        parameter.requires_grad_(False)
    both = TwoLayouts(chosen, turned)
    return both if _agrees(both, images, logits) else chosen


def _on_gpu(model: nn.Module, images: Tensor, logits: Tensor, precision: str) -> nn.Module:
    candidates = [(True, True), (True, False)] if precision == "tf32" else []
    for channels_last, fuse in (*candidates, (False, False)):
        replica = replicate(model, channels_last=channels_last, fuse=fuse)
        if isinstance(replica, str):
            break
        if _agrees(replica, images, logits, precision):
            return replica
    return model


def _agrees(replica: nn.Module, images: Tensor, logits: Tensor, precision: str = "ieee") -> bool:
    """Compare in the precision of the search: in another one the library may have no kernel, or round otherwise."""
    try:
        with torch.no_grad(), matmul_precision(images.device, precision):
            for count in _COMPARED:
                gap = (replica(images[:count].clone()) - logits[:count]).abs().max()
                if not bool(gap <= _AGREEMENT[precision] * logits.abs().max()):
                    return False
    except Exception:  # a view that the other layout does not allow, say
        return False
    return True
