"""A replica of the model for the search: the same function up to rounding, faster.

BatchNorm is folded where torch.fx can trace the model. On a CPU, queries without a gradient go through a second copy
in the channels-last layout, in which pooling and small convolutions are two to three times as fast. What is counted is
decided by the model itself, never by a replica.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dale.folding import fold_batchnorm, replicate

_AGREEMENT = 1e-4  # of the largest logit


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


def search_replica(model: nn.Module, images: Tensor, logits: Tensor) -> nn.Module:
    """Return a faster replica that agrees with `logits` on `images`, or the model itself."""
    folded = fold_batchnorm(model)
    if images.device.type != "cpu":
        return folded if folded is not None and _agrees(folded, images, logits) else model
    if folded is not None:
        # a CPU's gradients are faster in the layout of the images, and its convolutions have nothing to fuse
        plain = replicate(model, channels_last=False, fuse=False)
        folded = plain if isinstance(plain, nn.Module) and _agrees(plain, images, logits) else None
    chosen = model if folded is None else folded
    try:
        turned = copy.deepcopy(chosen)
        turned.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stubs do not know it
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # not every module can be copied
        return chosen
    for parameter in turned.parameters():
        parameter.requires_grad_(False)
    both = TwoLayouts(chosen, turned)
    return both if _agrees(both, images, logits) else chosen


def _agrees(replica: nn.Module, images: Tensor, logits: Tensor) -> bool:
    try:
        with torch.no_grad():
            ours = replica(images)
    except RuntimeError:  # a view that the other layout does not allow, say
        return False
    return bool((ours - logits).abs().max() <= _AGREEMENT * logits.abs().max())
