"""Files that are whole or not there: atomic writes, tensors with a checksum, and nothing that executes on reading."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dale.errors import CheckpointError, DaleError

MAX_JSON = 64 * 2**20  # no text file of a run is larger; a stranger's might be
_KINDS = {  # torch's names of types, and those in a safetensors file
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into one line that names the file."""
    try:
        yield
    except OSError as error:
        raise DaleError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` once it is whole and on the disk; left early, it leaves no trace."""
    with _refusals(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new, and a full disk leaves the old."""
    with _replacing(path) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, with NaN refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_text(path: Path) -> str:
    """Read a text file of bounded size, with one clear line for what cannot be read."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(f"{path} is larger than {MAX_JSON >> 20} MiB; it was not written by dale")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not a text file: {error.reason}") from error


def read_json(path: Path) -> Any:
    """Read JSON, with one clear line for what is not."""
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error


def _raw(tensor: Any) -> Any:
    """The bytes of a contiguous tensor on the CPU, as a view."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""


def digest(tensors: Mapping[str, Any], meta: str) -> str:
    """A checksum over names, shapes, types, contents and the text beside them."""
    total = hashlib.blake2b(meta.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        total.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        total.update(_raw(tensor))
    return total.hexdigest()


def write_safetensors(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors on the CPU as a safetensors file, atomically.

    The format is eight bytes of length, a JSON header and the tensors one after the other, larger types first so that
    all lie aligned. Written here and not by the library: straight from the tensors' memory, without a second copy, and
    without Python's lock, which a training thread beside this one needs.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}  # the same content, the same bytes
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        kind = _KINDS[str(tensor.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_raw(tensors[name]))


def write_tensors(path: Path, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write tensors and JSON-able facts beside them as one safetensors file with a checksum, atomically."""
    text = json.dumps(meta, allow_nan=False)
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_safetensors(path, held, {"dale": text, "digest": digest(held, text)})


def read_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what `write_tensors` wrote, checking its checksum; a damaged or foreign file gets one clear line."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        if "dale" not in header or "digest" not in header:
            raise CheckpointError(f"{path} was not written by dale")
        meta = json.loads(header["dale"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: {str(error).splitlines()[0]}") from error
    if digest(tensors, header["dale"]) != header["digest"] or not isinstance(meta, dict):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content")
    return tensors, meta
