"""Data of the user's own: an .npz of arrays, or a folder of class folders of image files."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dale.data.readers import check_memory, read_npz
from dale.data.splits import Split
from dale.errors import DataError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_CLUTTER = {"thumbs.db", "desktop.ini"}
_GREY = {"1", "L"}
_COLOUR = {"RGB", "RGBA", "P", "CMYK", "YCbCr"}
_MAX_SIDE = 4096

Parts = tuple[Split, Split | None, tuple[str, ...] | None]


def read_user_npz(path: Path) -> Parts:
    """Read an .npz: images and labels; optionally images_test and labels_test, groups (and groups_test), class_names.

    Images are bytes or floats in [0, 1] of shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels.
    """
    optional = ("images_test", "labels_test", "groups", "groups_test", "class_names")
    arrays = read_npz(path, ("images", "labels"), optional)
    for one, other in (("images_test", "labels_test"), ("labels_test", "images_test"), ("groups_test", "groups")):
        if one in arrays and other not in arrays:
            raise DataError(f"{path}: has {one!r} but no {other!r}")
    if "groups" in arrays and "images_test" in arrays and "groups_test" not in arrays:
        raise DataError(f"{path}: has groups and test images, but no 'groups_test'")
    names = _names(arrays["class_names"], path) if "class_names" in arrays else None
    num_classes = _num_classes(arrays, path) if names is None else len(names)
    if num_classes is not None and num_classes < 2:
        raise DataError(f"{path}: there is only one class; a classifier needs at least two")
    pool = _npz_split(arrays, "", num_classes, path)
    test = _npz_split(arrays, "_test", num_classes, path) if "images_test" in arrays else None
    if test is not None and test.images.shape[1:] != pool.images.shape[1:]:
        raise DataError(f"{path}: images are {_size(pool)} but images_test are {_size(test)}")
    return pool, test, names


def _num_classes(arrays: dict[str, NDArray[Any]], path: Path) -> int | None:
    """How many classes there are: numbered 0, 1, ... without a gap. None where labels are no whole numbers.

    A gap is a label that was mistyped, or labels that begin at 1: the model would have a class that no example is of.
    """
    labels = {k: arrays[k] for k in ("labels", "labels_test") if k in arrays}
    if any(array.dtype.kind not in "ui" or not array.size for array in labels.values()):
        return None  # which is refused with the labels themselves
    found = {name: np.unique(array) for name, array in labels.items()}
    distinct = np.unique(found["labels"])
    least, most = int(distinct[0]), int(distinct[-1])
    if least >= 0 and most >= len(distinct):
        place = int(np.argmax(arrays["labels"].reshape(-1) == most))
        raise DataError(
            f"{path}: label {most} of example {place}, and {len(distinct)} different labels; expected 0 .. "
            f"{len(distinct) - 1} (class_names, with a name for each, allows classes without examples)"
        )
    if int(found.get("labels_test", distinct)[-1]) > most:
        raise DataError(f"{path}: labels_test hold {int(found['labels_test'][-1])}; labels end at {most}")
    return most + 1


def _names(array: NDArray[Any], path: Path) -> tuple[str, ...]:
    """Class names as text; NumPy's text may hold numbers that are no characters."""
    try:
        text = np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
        names = tuple(str(name) for name in text.reshape(-1))
    except (SystemError, ValueError) as error:
        raise DataError(f"{path}: class_names hold what is not text") from error
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise DataError(f"{path}: class_names hold {twice[0]!r} twice")
    return names


def _size(split: Split) -> str:
    return " x ".join(str(n) for n in split.images.shape[1:])


def _npz_split(arrays: dict[str, NDArray[Any]], suffix: str, num_classes: int | None, path: Path) -> Split:
    array = arrays["images" + suffix]
    images = _tensor(array, path, "images" + suffix)
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise DataError(f"{path}: images{suffix} must be bytes (uint8) or floats in [0, 1], got {array.dtype}")
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.permute(0, 3, 1, 2).contiguous()
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise DataError(
            f"{path}: images{suffix} must have shape (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, got "
            f"{array.shape}"
        )
    labels = _tensor(arrays["labels" + suffix], path, "labels" + suffix)
    groups = _tensor(arrays["groups" + suffix], path, "groups" + suffix) if "groups" + suffix in arrays else None
    return Split.of(images, labels, num_classes, groups, where=str(path) + (f" ({suffix[1:]} part)" if suffix else ""))


def _tensor(array: NDArray[Any], path: Path, name: str) -> Tensor:
    """Turn a NumPy array into a tensor of a type torch computes with."""
    if array.dtype.kind not in "uif":
        raise DataError(f"{path}: array {name!r} must hold numbers, got {array.dtype}")
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f":
        array = array.astype(np.float32)
    return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))


def read_user_folder(path: Path) -> Parts:
    """Read a folder of class folders of images (the classes in alphabetical order), or train/ and test/ of such.

    All images have one size, and are all grey or all colour.
    """
    below = {child.name for child in path.iterdir() if child.is_dir()}
    has_test = {"train", "test"} <= below
    if "train" in below and not has_test and len(below) > 1 and _is_split(path / "train"):
        others = ", ".join(f"{name}/" for name in sorted(below - {"train"}))
        raise DataError(f"{path}: holds train/ beside {others}; expected train/ and test/, or a folder per class")
    root = path / "train" if has_test or below == {"train"} else path
    names = tuple(sorted(child.name for child in _visible(root) if child.is_dir()))
    if len(names) < 2:
        found = f"only one class folder, {names[0]!r}" if names else "no class folders"
        raise DataError(f"{root}: holds {found}; expected a folder per class, at least two, with its images inside")
    files = _list(root, names)
    first = files[0][0]
    mode, size = _describe(first)
    pool = _decode(files, first, mode, size, len(names))
    if not has_test:
        return pool, None, names
    for child in _visible(path / "test"):
        if child.is_dir() and child.name not in names:
            raise DataError(f"{child}: this class is not among those of {root}: {', '.join(names)}")
    return pool, _decode(_list(path / "test", names), first, mode, size, len(names)), names


def _is_split(folder: Path) -> bool:
    """Whether a folder holds class folders; one that holds images may be of a class called train."""
    inside = _visible(folder)
    return any(child.is_dir() for child in inside) and not any(child.is_file() for child in inside)


def _visible(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith(".") and p.name.lower() not in _CLUTTER)


def _list(root: Path, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return every image file with its class number, in the order of their paths."""
    files = []
    for number, name in enumerate(names):
        inside = _visible(root / name) if (root / name).is_dir() else []
        for file in inside:
            if file.suffix.lower() not in _SUFFIXES or not file.is_file():
                raise DataError(f"{file}: not an image file ({', '.join(sorted(_SUFFIXES))})")
            files.append((file, number))
        if not inside and root.name != "test":
            raise DataError(f"{root / name}: this class folder holds no images")
    if not files:
        raise DataError(f"{root}: holds no images")
    return files


def _describe(file: Path) -> tuple[str, tuple[int, int]]:
    """Return "L" or "RGB", and (width, height), from the header of an image file."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                mode, size = image.mode, image.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{file}: cannot be read as an image ({type(error).__name__})") from error
    if mode not in _GREY | _COLOUR:
        raise DataError(f"{file}: images of mode {mode!r} are not read; save it as 8-bit grey or colour")
    if max(size) > _MAX_SIDE:
        raise DataError(f"{file}: {size[0]} x {size[1]} pixels is larger than {_MAX_SIDE} on a side")
    return "L" if mode in _GREY else "RGB", size


def _decode(files: list[tuple[Path, int]], first: Path, mode: str, size: tuple[int, int], num_classes: int) -> Split:
    from PIL import Image

    width, height = size
    channels = 1 if mode == "L" else 3
    check_memory(len(files) * channels * height * width, str(first.parent.parent))
    images = np.empty((len(files), channels, height, width), dtype=np.uint8)

    def read(place: int) -> None:
        file = files[place][0]
        own_mode, own_size = _describe(file)
        if own_size != size:
            own = f"{own_size[0]} x {own_size[1]}"
            raise DataError(f"{file}: {own} pixels, but {first} has {width} x {height}; all images need one size")
        if own_mode != mode:
            kinds = {"L": "grey", "RGB": "colour"}
            raise DataError(f"{file}: a {kinds[own_mode]} image where {kinds[mode]} is expected, as in {first}")
        try:
            with Image.open(file) as image:
                pixels = np.asarray(image.convert(mode))
        except (OSError, ValueError, SyntaxError, EOFError) as error:
            raise DataError(f"{file}: damaged or truncated image ({error})") from error
        images[place] = pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(read, range(len(files))))
    labels = torch.tensor([number for _, number in files])
    return Split.of(torch.from_numpy(images), labels, num_classes, where=str(first.parent.parent))
