"""Weights in safetensors files: written atomically, read without executing or trusting anything in the file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from dale.errors import CheckpointError, DaleError, UsageError
from dale.files import write_safetensors

_MAX_HEADER = 16 * 2**20
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_OTHERS = {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_weights(
    model: nn.Module,
    path: str | PathLike[str],
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the state dict of `model` to a .safetensors file, all of it or nothing.

    `dtype` (float16, say, for half the size) converts the floating-point tensors; a value that it cannot hold is an
    error. Tensors that share memory are written once each, so that the file needs no knowledge of the sharing.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise DaleError(f"cannot write {path}: No such file or directory")
    write_safetensors(path, stored_tensors(model, dtype), {"format": "pt", **(metadata or {})})


def stored_tensors(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the state dict as `save_weights` stores it: contiguous copies on the CPU, none sharing memory."""
    if dtype is not None and dtype not in _FLOATS.values():
        raise UsageError(f"weights can be stored as float64, float32, float16 or bfloat16, got {dtype}")
    tensors = {}
    for name, tensor in _unwrapped(model).state_dict().items():
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name!r} in the model's state dict is {type(tensor).__name__}, only tensors are stored")
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if target not in _FLOATS.values() and target not in _OTHERS:
            raise UsageError(f"{name!r} is of {target}, which no weights file holds")
        copy = torch.empty(tensor.shape, dtype=target, device="cpu").copy_(tensor.detach())
        if target != tensor.dtype and not torch.equal(copy.isfinite(), tensor.detach().isfinite().cpu()):
            raise UsageError(f"{name!r} has values that {target} cannot hold; store it as torch.bfloat16 or float32")
        tensors[name] = copy
    return tensors


def load_weights(model: nn.Module, path: str | PathLike[str]) -> dict[str, str]:
    """Load a .safetensors file into `model`, in the model's own dtype, and return the file's metadata.

    Names, shapes and types are compared with the model before a tensor is read, so that what is read is never larger
    than the model, and the model is changed only when everything fits and every value is finite.
    """
    path = Path(path)
    expected = _unwrapped(model).state_dict()
    _check_frame(path)
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            _compare(path, file, expected)
            tensors = {name: _converted(path, name, file.get_tensor(name), expected[name]) for name in expected}
            metadata = dict(file.metadata() or {})
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: damaged safetensors file: {error}") from error
    _unwrapped(model).load_state_dict(tensors)
    return metadata


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`'s wrapper, whose names have no prefix."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _check_frame(path: Path) -> None:
    """Check what precedes the tensors (eight bytes of header length, then JSON) before a library allocates for it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: expected a .safetensors file, this is not a regular file")
        size = status.st_size
        with path.open("rb") as file:
            start = file.read(9)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such weights file") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    if start[:4] == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x04"):
        raise CheckpointError(
            f"{path}: a pickled PyTorch file, which could execute code; convert it to .safetensors where you trust it"
        )
    if len(start) < 9:
        raise CheckpointError(f"{path}: truncated, {size} bytes are no safetensors file")
    header = int.from_bytes(start[:8], "little")
    if start[8:9] != b"{" or header > _MAX_HEADER:
        raise CheckpointError(f"{path}: not a safetensors file")
    if header > size - 8:
        raise CheckpointError(f"{path}: truncated, the header alone should have {header} bytes")


def _compare(path: Path, file: Any, expected: Mapping[str, Tensor]) -> None:
    """Check that the file holds exactly the model's tensors, by name, shape and kind."""
    names = set(file.keys())
    if missing := [name for name in expected if name not in names]:
        raise CheckpointError(f"{path}: not the weights of this model: {_some(missing)} missing")
    if foreign := sorted(names - set(expected)):
        raise CheckpointError(f"{path}: not the weights of this model: {_some(foreign)} unexpected")
    wrong = []
    for name, tensor in expected.items():
        view = file.get_slice(name)
        shape, kind = tuple(view.get_shape()), view.get_dtype()
        if shape != tuple(tensor.shape):
            wrong.append(f"{name} is {_shape(shape)}, expected {_shape(tensor.shape)}")
        elif kind not in _FLOATS if tensor.is_floating_point() else kind != _OTHERS.get(tensor.dtype):
            wrong.append(f"{name} is of type {kind}, expected {str(tensor.dtype).removeprefix('torch.')}")
    if wrong:
        raise CheckpointError(f"{path}: not the weights of this model: {_some(wrong, '; ')}")


def _converted(path: Path, name: str, tensor: Tensor, target: Tensor) -> Tensor:
    """The tensor in the model's dtype, all of it finite."""
    tensor = tensor.to(target.dtype)
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{path}: {name} has values that are not finite in {target.dtype}")
    return tensor


def _some(items: list[str], separator: str = ", ") -> str:
    """The first three items, and how many more there are."""
    more = len(items) - 3
    return separator.join(items[:3]) + (f" and {more} more" if more > 0 else "")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) if shape else "a scalar"
