"""Readers of the official file formats: IDX (MNIST), CIFAR's binary records, SVHN's MATLAB files, and NumPy's .npz.

No reader trusts a header: sizes are bounded before anything is allocated, nothing is unpickled, and whatever is not
as declared becomes one line that names the file.
"""

from __future__ import annotations

import ast
import difflib
import gzip
import math
import os
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dale.errors import DataError

_DEFLATE_RATIO = 1032  # deflate cannot expand by more than this factor
_MAX_HEADER = 10_000
_MISTYPED = 0.85  # likeness of two names, of which one is a slip: image_test, and not images_val


def check_memory(size: int, where: str) -> None:
    """Refuse data of `size` bytes that the machine cannot hold, before anything is allocated."""
    try:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        available = 1 << 36
    if size > available:
        raise DataError(f"{where}: declares {size / 2**30:.1f} GiB of data, more than this machine's memory")


def read_idx(path: Path, rank: int) -> Tensor:
    """Read a gzipped IDX file of bytes with `rank` dimensions (3 for images, 1 for labels)."""
    try:
        with gzip.open(path, "rb") as file:
            head = file.read(4 + 4 * rank)
            if len(head) < 4 + 4 * rank or head[:4] != bytes([0, 0, 8, rank]):
                raise DataError(f"{path}: not an IDX file of bytes with {rank} dimension{'s' if rank > 1 else ''}")
            shape = struct.unpack(f">{rank}I", head[4:])
            size = math.prod(shape)
            if size == 0 or size > _DEFLATE_RATIO * path.stat().st_size:
                raise DataError(f"{path}: its header declares shape {shape}, which its file size cannot hold")
            check_memory(size, str(path))
            data = np.empty(size, dtype=np.uint8)
            got = file.readinto(memoryview(data))  # type: ignore[arg-type]
            while 0 < got < size and (more := file.readinto(memoryview(data)[got:])):  # type: ignore[arg-type]
                got += more
            if got < size:
                raise DataError(f"{path}: truncated, {got} of {size} bytes")
            if file.read(1):
                raise DataError(f"{path}: more data than its header declares, shape {shape}")
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as gzip ({error})") from error
    return torch.from_numpy(data.reshape(shape))


def read_cifar(path: Path, num_labels: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Read CIFAR binary records: `num_labels` label bytes (the last counts), then 3 x 32 x 32 bytes of image."""
    record = num_labels + 3072
    size = path.stat().st_size
    if size == 0 or size % record:
        raise DataError(f"{path}: {size} bytes is not a whole number of {record}-byte CIFAR records (truncated?)")
    check_memory(size, str(path))
    data = np.fromfile(path, dtype=np.uint8).reshape(-1, record)
    labels = data[:, num_labels - 1].astype(np.int64)
    if labels.max() >= num_classes:
        raise DataError(f"{path}: label {labels.max()} is out of range 0 .. {num_classes - 1}; not a CIFAR binary file")
    return torch.from_numpy(data)[:, num_labels:].view(-1, 3, 32, 32), torch.from_numpy(labels)


def read_svhn(path: Path) -> tuple[Tensor, Tensor]:
    """Read SVHN's cropped digits: X (32, 32, 3, N) bytes and y (N, 1) with 10 for the digit 0."""
    from scipy.io import loadmat

    try:
        content: dict[str, Any] = loadmat(path, variable_names=["X", "y"])
        images, labels = content["X"], content["y"].reshape(-1).astype(np.int64) % 10
    except KeyError as error:
        raise DataError(f"{path}: has no variable {error}; an SVHN file has X and y") from error
    except Exception as error:  # scipy raises a dozen kinds for damaged files
        raise DataError(f"{path}: cannot be read as a MATLAB file ({error})") from error
    if (
        images.ndim != 4
        or images.shape[:3] != (32, 32, 3)
        or images.dtype != np.uint8
        or len(labels) != images.shape[3]
    ):
        raise DataError(f"{path}: X must be bytes of shape (32, 32, 3, N) and y of length N, got {images.shape}")
    return torch.from_numpy(np.ascontiguousarray(images.transpose(3, 2, 0, 1))), torch.from_numpy(labels)


def read_npz(path: Path, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, NDArray[Any]]:
    """Read the arrays `names`, and those of `optional` that are there, from an .npz; never pickled objects."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = [name for name in names if name not in members]
            if missing:
                have = ", ".join(sorted(members)) or "nothing"
                raise DataError(f"{path}: has no array {missing[0]!r} (it holds {have}); expected {', '.join(names)}")
            absent = [name for name in (*names, *optional) if name not in members]
            for name in sorted(members.keys() - {*names, *optional}):
                if meant := difflib.get_close_matches(name, absent, n=1, cutoff=_MISTYPED):
                    raise DataError(f"{path}: has an array {name!r}; did you mean {meant[0]!r}?")
            wanted = [name for name in (*names, *optional) if name in members]
            check_memory(sum(members[name].file_size for name in wanted), str(path))
            for name in wanted:
                arrays[name] = _read_member(archive, members[name], f"{path}: array {name!r}")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
        RuntimeError,
        UnicodeError,
    ) as error:
        raise DataError(f"{path}: cannot be read as an .npz file ({error})") from error
    return arrays


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NDArray[Any]:
    if info.file_size > _DEFLATE_RATIO * info.compress_size + _MAX_HEADER:
        raise DataError(f"{where} declares {info.file_size} bytes, which its compressed size cannot hold")
    with archive.open(info) as file:
        shape, fortran, dtype, head = _read_header(file, where)
        size = math.prod(shape) * dtype.itemsize
        if head + size != info.file_size:
            raise DataError(f"{where} declares shape {shape} of {dtype}, but holds {info.file_size - head} bytes")
        data = np.frombuffer(file.read(size), dtype=dtype)
        if data.size != math.prod(shape):
            raise DataError(f"{where} is truncated")
    return data.reshape(shape, order="F" if fortran else "C")


def _read_header(file: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Parse the .npy header (a Python literal, read as such): shape, order, type, and its own length in bytes."""
    magic = file.read(8)
    if len(magic) < 8 or magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise DataError(f"{where} is not a NumPy array")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_HEADER:
        raise DataError(f"{where} has a header of {length} bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser, on what is not even Python
            header = ast.literal_eval(file.read(length).decode("utf-8" if magic[6] == 3 else "latin1"))
        shape, fortran, dtype = header["shape"], header["fortran_order"], np.dtype(header["descr"])
        valid = all(isinstance(n, int) and n >= 0 for n in shape) and isinstance(shape, tuple)
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise DataError(f"{where} has a damaged header") from error
    if not valid or dtype.hasobject or dtype.itemsize == 0:
        raise DataError(f"{where} holds Python objects or no numbers; save plain arrays of numbers")
    return shape, bool(fortran), dtype, 8 + width + length
