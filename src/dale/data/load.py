"""`load_dataset`: a data set by name, or the user's own by its path."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dale.data import readers
from dale.data.fetch import ensure
from dale.data.sources import SOURCES, Source, default_data_dir, verify
from dale.data.splits import Dataset, Split, split_dataset
from dale.data.user import read_user_folder, read_user_npz
from dale.errors import DataError, UsageError, nearest, require

DATASETS: tuple[str, ...] = ("digits", *SOURCES)
"""The data sets that `load_dataset` knows by name."""

_DIGITS_SIZES = {"validation": 200, "certification": 200, "test": 397}
_DEFAULT_SIZE = 2000


def load_dataset(
    name: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    train_size: int | None = None,
    validation_size: int | None = None,
    certification_size: int | None = None,
    test_size: int | None = None,
) -> Dataset:
    """Load a data set and split it into disjoint train, validation, certification and test parts.

    `name` is one of `DATASETS`, the path of an .npz file (images, labels; optionally images_test, labels_test, groups,
    groups_test, class_names), or a folder of class folders of images, optionally with train/ and test/ above them.
    Official files are looked for below `data_dir` (default `$DALE_DATA`, else a cache folder) and fetched where
    missing. The splits are fixed by `seed`; the official test set, where there is one, is the test split. Examples of
    your own come in a random order, those of a named set in the order of its files.
    """
    text = os.fspath(name)
    known, path = locate(text)
    title = path.resolve().stem if known is None else known
    test: Split | None = None
    names: tuple[str, ...] | None = None
    if known == "digits":
        pool = _read_digits()
        defaults = _DIGITS_SIZES
    elif known is not None:
        folder = default_data_dir() if data_dir is None else Path(data_dir).expanduser()
        source = SOURCES[known]
        pool, test = _read_source(source, folder)
        names, defaults = source.class_names, {"validation": _DEFAULT_SIZE, "certification": _DEFAULT_SIZE}
    else:
        pool, test, names = read_user_folder(path) if path.is_dir() else read_user_npz(path)
        defaults = {}
    require(isinstance(seed, int), f"seed must be an integer, got {seed!r}")
    data = split_dataset(
        title,
        pool,
        test,
        class_names=names,
        seed=seed,
        train_size=train_size,
        validation_size=defaults.get("validation") if validation_size is None else validation_size,
        certification_size=defaults.get("certification") if certification_size is None else certification_size,
        test_size=defaults.get("test") if test_size is None else test_size,
        file_order=known is not None,
    )
    return replace(data, source=text if known is None else known)


def known_name(text: str) -> str | None:
    """The known data set that a text names, in any spelling."""
    return {_fold(choice): choice for choice in DATASETS}.get(_fold(text))


def locate(text: str) -> tuple[str | None, Path]:
    """What a text means: the name of a known data set, or the path of the user's own, which is there."""
    path, known = Path(text).expanduser(), known_name(text)
    if known is None and not path.exists():
        if len(path.parts) > 1 or path.suffix == ".npz":
            raise DataError(f"{path}: no such file or folder")
        close = nearest(text, DATASETS)
        hint = f"; did you mean {close!r}?" if close else "."
        raise UsageError(f"unknown dataset {text!r}{hint} Valid: {', '.join(DATASETS)}, an .npz file or a folder")
    return known, path


def _fold(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _read_digits() -> Split:
    arrays = readers.read_npz(Path(__file__).with_name("digits.npz"), ("images", "labels"))
    images = torch.from_numpy(arrays["images"].copy()).unsqueeze(1)
    labels = torch.from_numpy(arrays["labels"].astype("int64"))
    return Split(images, labels, torch.arange(len(labels)), 10, scale=16.0)


def _read_source(source: Source, data_dir: Path) -> tuple[Split, Split]:
    """Find or fetch the official files, check them, and read the official training and test sets."""
    folder = ensure(source, data_dir)
    paths = [folder / file for file in source.files]
    verify({folder / file: want for file, want in source.files.items()})
    num_classes = len(source.class_names)
    if source.kind == "idx":
        parts = [(readers.read_idx(paths[i], 3).unsqueeze(1), readers.read_idx(paths[i + 1], 1)) for i in (0, 2)]
    elif source.kind == "svhn":
        parts = [readers.read_svhn(path) for path in paths]
    else:
        num_labels = 1 if source.kind == "cifar10" else 2
        files = [readers.read_cifar(path, num_labels, num_classes) for path in paths]
        for path, (_, labels), want in zip(paths, files, source.files.values(), strict=True):
            # no official md5 is published for the unpacked files of CIFAR-100; their classes are equally many
            counts = labels.bincount(minlength=num_classes)
            if want is None and counts.min() < counts.max():
                raise DataError(f"{path}: its classes are not equally many; it is truncated or another file")
        parts = [_join(files[:-1]), files[-1]]
    train, test = (Split.of(images.contiguous(), labels, num_classes, where=str(folder)) for images, labels in parts)
    return train, test


def _join(files: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([images for images, _ in files]), torch.cat([labels for _, labels in files])
