"""Model modes that are always put back: train or eval, and whether parameters ask for gradients.

`model.train()` after an attack is not a restoration: it switches on every module that the caller had frozen in eval
mode. Here each module's own flag is remembered and put back, whatever happens in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from torch import nn

from dale.errors import unknown

Mode = Literal["eval", "train", "keep"]


@contextmanager
def sampling_mode(model: nn.Module, mode: Mode = "eval") -> Iterator[None]:
    """Run a block with `model` in `mode` ("keep": as it is); every module's training flag is restored afterwards."""
    if mode not in get_args(Mode):
        raise unknown("mode", mode, get_args(Mode))
    # a frozen TorchScript module has no flag: its mode is fixed
    flags = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    wanted = mode == "train"
    try:
        if mode != "keep" and any(training != wanted for _, training in flags):
            _switch(model, wanted)
        yield
    finally:
        for module, training in flags:
            # plain assignment, since train() would recurse into children that have flags of their own
            module.training = training


def _switch(model: nn.Module, training: bool) -> None:
    """Switch through the model's own train(), so that a module which keeps a part of itself in eval mode still does.

    An exported program, whose mode is fixed, refuses; in a model that contains one the others are switched by hand.
    """
    try:
        model.train(training)
    except NotImplementedError:
        for module in model.modules():
            if hasattr(module, "training"):
                module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a block with `model` in eval mode; every module's training flag is restored afterwards."""
    with sampling_mode(model, "eval"):
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Run a block in which no parameter of `model` asks for a gradient; each one's flag is restored afterwards.

    A backward pass to the input then computes no weight gradients and touches no `.grad`. The block may not contain
    a forward pass whose graph is needed, for the parameters, after it.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
