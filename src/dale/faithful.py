"""Whether a replica computes what its model computes: tried out on a copy, on the CPU, in float32.

A replica is built from the trace of a model, and a trace is not the model: it sees neither an autograd function's own
backward pass nor what a layer does behind torch's back. So logits and the gradient that samplers and attacks climb are
compared before a training or an evaluation relies on them, on noise, which has no ties that rounding could decide
otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dale.errors import told_of
from dale.folding import Replica, hooked, replicate

# relative, of the largest logit; rounding alone does not exceed it, another function does
LOGITS = 1e-4
# relative, in the norm: where an activation is zero up to rounding its slope may be taken on either side
GRADIENT = 5e-2
COUNT = 3


def unfaithful(
    model: nn.Module, shape: tuple[int, ...], *, channels_last: bool = True, captured: bool = False
) -> str | None:
    """Say why a replica of the model cannot stand for it, or None; `shape`: of one image.

    `channels_last`: in that memory layout, which training takes. `captured`: its training step, too, must be one that a
    CUDA graph can repeat.
    """
    if (reason := hooked(model)) is not None:  # with which some models cannot be copied
        return reason
    with torch.random.fork_rng([]):
        layout = torch.channels_last if channels_last else torch.contiguous_format
        images = torch.rand(COUNT, *shape, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)
        try:
            own: nn.Module = copy.deepcopy(model).cpu().float().to(memory_format=layout)  # type: ignore[call-overload]
            own.eval()
            expected = _logits_and_gradient(own, images)
        except Exception as error:
            return f"a copy of the model cannot be tried out: {told_of(error)}"
        replica = replicate(own, channels_last=channels_last)
        if not isinstance(replica, Replica):
            return replica
        try:
            found = _logits_and_gradient(replica, images)
        except Exception as error:
            return f"a copy of the model with its layers folded cannot run: {told_of(error)}"
        if not float((found[0] - expected[0]).abs().max()) <= LOGITS * float(expected[0].abs().max()):
            return "with its layers folded the model gives other logits"
        if not float((found[1] - expected[1]).norm()) <= GRADIENT * float(expected[1].norm()):
            return "with its layers folded the model has another gradient"
        return _unrepeatable(own, images) if captured else None


@torch.enable_grad()
def _logits_and_gradient(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of a fixed combination of them with respect to the images."""
    x = images.clone().requires_grad_(True)
    logits = model(x)
    weights = torch.linspace(-1.0, 1.0, logits.numel()).view_as(logits)
    (gradient,) = torch.autograd.grad((logits * weights).sum(), x)
    return logits.detach(), gradient


_ATEN = torch.ops.aten
_WAITING = {_ATEN._local_scalar_dense.default, _ATEN.nonzero.default, _ATEN.masked_select.default}


class _Waiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a number, or how many are true, was read from a tensor: a GPU would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waited = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        self.waited |= func in _WAITING
        if func is _ATEN.index.Tensor:
            self.waited |= any(place is not None and place.dtype == torch.bool for place in args[1])
        return func(*args, **(kwargs or {}))


def _unrepeatable(model: nn.Module, images: Tensor) -> str | None:
    """Say what in a forward pass in train mode could not be replayed."""
    model.train()
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    try:
        with _Waiting() as mode:
            model(images)
    except Exception as error:
        return f"a copy of the model cannot be tried out in train mode: {told_of(error)}"
    if mode.waited:
        return "the model reads a number from a tensor in train mode, for which a GPU must be waited for"
    for name, buffer in model.named_buffers():
        if before.get(name) != id(buffer):
            return f"the model puts a new tensor in the place of its buffer {name}, where it should change the old one"
    return None
