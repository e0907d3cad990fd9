"""`create_model`: a network by name, or a user's by import path, for the shape of the data at hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any, Protocol

import torch
from torch import nn

from dale.components import import_object, is_import_path
from dale.errors import UsageError, require, told_of, unknown
from dale.models.convnet import ConvNet, SmallCNN
from dale.models.layers import ACTIVATIONS, normalisation
from dale.models.preact import PreActResNet, WideResNet
from dale.models.resnet import BasicBlock, Bottleneck, ResNet
from dale.models.stored import PREFIX, find
from dale.models.weights import load_weights

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "convnet": ConvNet,
    "convnet-nodropout": partial(ConvNet, dropout=(0.0, 0.0)),
    "smallcnn": SmallCNN,
    "smallcnn-nodropout": partial(SmallCNN, dropout=0.0),
    "resnet18": partial(ResNet, BasicBlock, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "preact-resnet18": partial(PreActResNet, (2, 2, 2, 2)),
    "wrn-28-10": partial(WideResNet, 28, 10),
    "wrn-34-10": partial(WideResNet, 34, 10),
}

MODELS: tuple[str, ...] = tuple(_BUILDERS)
"""The names that `create_model` knows."""


def require_model(name: str) -> None:
    """Raise for a name that is neither one of `MODELS` nor an import path."""
    if name not in MODELS and not is_import_path(name):
        raise unknown("model", name, (*MODELS, "package.module:Name"))


class ImageData(Protocol):
    """What `create_model` asks of data; its `name`, where it has one, chooses the normalisation."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        ...

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        ...


def create_model(
    name: str,
    data: ImageData | None = None,
    *,
    channels: int | None = None,
    size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    activation: str = "relu",
    seed: int = 0,
    init: str | PathLike[str] | None = None,
) -> nn.Module:
    """Build a network from [0, 1] images to logits, its shape taken from `data` unless given.

    `name` is one of `MODELS`, or an import path ``package.module:Name`` of an `nn.Module` class or a function that
    returns one; that is called with those of channels, size (an int, or (height, width) if not square), num_classes
    and activation which its signature names. The initial weights are a function of `seed` alone and the global random
    numbers are left as they were. `init` names a .safetensors file, or a stored model ("zoo:NAME"), whose weights then
    replace the initial ones.
    """
    if data is not None:
        require(
            hasattr(data, "image_shape"),
            f"create_model: data must know its image_shape and num_classes, as data sets do; got {data!r:.80}",
        )
        shape = data.image_shape
        channels = shape[0] if channels is None else channels
        size = (shape[1], shape[2]) if size is None else size
        num_classes = data.num_classes if num_classes is None else num_classes
    if channels is None or size is None or num_classes is None:
        raise UsageError("create_model needs the data, or all of channels, size and num_classes")
    sides = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    require(channels >= 1, f"create_model: channels must be at least 1, got {channels}")
    require(min(sides) >= 1, f"create_model: size must be at least 1, got {size}")
    require(num_classes >= 2, f"create_model: num_classes must be at least 2, got {num_classes}")

    require_model(name)
    options: dict[str, Any] = {"channels": channels, "num_classes": num_classes, "activation": activation}
    if name in _BUILDERS:
        if activation not in ACTIVATIONS:
            raise unknown("activation", activation, ACTIVATIONS)
        if name.startswith(("convnet", "smallcnn")):
            options["size"] = sides
            if name == "convnet" and min(sides) < 16:
                # at the size of the digits dropout costs more than it gives: it doubles the training loss that the
                # constraint sees, and the network, 53,000 weights, has nothing to spare
                options["dropout"] = (0.0, 0.0)
        normalise = normalisation(channels, getattr(data, "name", None))
        build = partial(_BUILDERS[name], **options, normalise=normalise)
    else:
        options["size"] = sides[0] if sides[0] == sides[1] else sides
        build = partial(_build_users, name, options)
    with _seeded(seed):
        model = build()
    if isinstance(init, str) and init.startswith(PREFIX):
        entry = find(init)
        require(
            name not in _BUILDERS or activation == entry.activation,
            f"{init} has activation {entry.activation!r}; the model that is to start from it has {activation!r}",
        )
        entry.load_into(model)
    elif init is not None:
        load_weights(model, init)
    # remembered so that a run folder can say which model it holds, and what it started from
    model.dale_name, model.dale_activation = name, activation  # type: ignore[assignment]
    model.dale_init = None if init is None else str(init)  # type: ignore[assignment]
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, the global ones untouched outside (CUDA's too, once CUDA is in use)."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices):
        # not torch.manual_seed: that would also seed a CUDA that is started later
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        yield


def _build_users(name: str, options: dict[str, Any]) -> nn.Module:
    """Call a user's class or factory with the options that its signature names."""
    factory = import_object(name)
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UsageError(f"{name!r} must be an nn.Module class or a function that returns one, got {factory!r:.80}")
    try:
        accepted = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name!r} has no signature to read; wrap it in a function of num_classes") from error
    arguments = {key: value for key, value in options.items() if _takes(accepted, key)}
    if "activation" not in arguments and options["activation"] != "relu":
        raise UsageError(
            f"{name!r} takes no activation by name, so activation={options['activation']!r} is not possible"
        )
    missing = [
        key
        for key, parameter in accepted.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and key not in arguments
    ]
    if missing:
        raise UsageError(
            f"{name!r} needs {', '.join(missing)}, and dale gives only channels, size, num_classes, activation; "
            "wrap it in a function of these"
        )
    try:
        model = factory(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UsageError(f"{name!r} could not be built with ({given}): {told_of(error)}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name!r} returned {type(model).__name__}, expected an nn.Module")
    return model


def _takes(accepted: Mapping[str, inspect.Parameter], key: str) -> bool:
    """Tell whether an option is to be passed."""
    if key not in accepted:
        # factories such as torchvision's hand num_classes on through **kwargs
        return key == "num_classes" and any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    parameter = accepted[key]
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return False
    # an activation whose default is a class or function is chosen by that, not by a name
    return key != "activation" or parameter.default is parameter.empty or isinstance(parameter.default, str)
