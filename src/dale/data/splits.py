"""Splits: images, labels and example numbers that stay compact in memory, and a data set of four disjoint ones.

Images are kept as they are in their file (bytes where the file has bytes) and become float32 in [0, 1] batch by
batch: image = stored / scale. Every example carries its number in its original file, so that two splits of one file
are disjoint exactly when their numbers are, and so that random numbers belong to the example and not to its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dale import random
from dale.batch import Batch
from dale.errors import DataError, UsageError

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Split:
    """Examples in some order: stored images (N, C, H, W), labels, example numbers and, where given, groups.

    `scale` is the stored value that means 1: 255 for bytes, 16 for digits, 1 for floats in [0, 1].
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    num_classes: int
    scale: float = 255.0
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        shape = "x".join(str(n) for n in self.images.shape[1:])
        return f"Split({len(self)} images of {shape}, {self.num_classes} classes, {self.images.dtype})"

    @staticmethod
    def of(
        images: Tensor,
        labels: Tensor,
        num_classes: int | None = None,
        groups: Tensor | None = None,
        *,
        where: str = "data",
    ) -> Split:
        """Make a split of tensors at hand, numbered 0, 1, ...: floats in [0, 1], or bytes of which 255 means 1.

        `where` names the source in error messages. The number of classes is that of the labels where not given.
        """
        _check_images(images, where)
        labels, num_classes = _check_labels(labels, len(images), num_classes, where)
        if groups is not None:
            groups, _ = _check_numbers(groups, len(images), "groups", where)
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        stored = images.detach() if images.dtype == torch.uint8 else images.detach().to(torch.float32)
        return Split(stored, labels, torch.arange(len(labels), device=labels.device), num_classes, scale, groups)

    def convert(self, stored: Tensor) -> Tensor:
        """Turn stored values into new float32 images in [0, 1]: stored / scale.

        As a product with the rounded 1 / scale, which a GPU computes anyway: the same bits on every device, and full
        scale is exactly 1 (for 255 and for every power of two).
        """
        images = stored.to(torch.float32, copy=True)
        return images if self.scale == 1.0 else images.mul_(1.0 / self.scale)

    def take(self, indices: Tensor | Sequence[int]) -> Split:
        """Return the examples at the given places of this split, in the given order."""
        rows = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        groups = None if self.groups is None else self.groups[rows]
        images = self.images[rows.to(self.images.device)]
        return replace(self, images=images, labels=self.labels[rows], index=self.index[rows], groups=groups)

    def first(self, n: int) -> Split:
        """Return the first `n` examples (all of them where there are fewer), without copying."""
        if n < 1:
            raise UsageError(f"the number of examples must be at least 1, got {n}")
        groups = None if self.groups is None else self.groups[:n]
        return replace(self, images=self.images[:n], labels=self.labels[:n], index=self.index[:n], groups=groups)

    def to(self, device: torch.device | str) -> Split:
        """Return the split on another device (stored values stay as compact as they are)."""
        groups = None if self.groups is None else self.groups.to(device)
        return replace(
            self,
            images=self.images.to(device),
            labels=self.labels.to(device),
            index=self.index.to(device),
            groups=groups,
        )

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield every example once, in order; the last batch may be smaller."""
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got {batch_size}")
        for start in range(0, len(self), batch_size):
            part = slice(start, start + batch_size)
            groups = None if self.groups is None else self.groups[part]
            yield Batch(self.convert(self.images[part]), self.labels[part], self.index[part], groups)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Four disjoint splits of one data set, and what a model must know of it.

    `train` is for descent, `validation` for selection and tightening, `certification` for the certificates only,
    and `test` for the final evaluation only. Where the whole of one would take too long, its first examples stand for
    it: classes must not come one after the other. `image_shape` is (C, H, W); `num_groups` is 0 where there are none.
    `source` and `seed` are what `load_dataset` was asked for, so that a run can say which data it was trained on.
    """

    name: str
    train: Split
    validation: Split
    certification: Split
    test: Split
    num_classes: int
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    num_groups: int = 0
    source: str | None = None
    seed: int = 0

    def __repr__(self) -> str:
        sizes = "/".join(str(len(s)) for s in (self.train, self.validation, self.certification, self.test))
        shape = "x".join(str(n) for n in self.image_shape)
        return (
            f"Dataset({self.name!r}, {shape}, {self.num_classes} classes, {sizes} train/validation/certification/test)"
        )


def split_dataset(
    name: str,
    pool: Split,
    test: Split | None = None,
    *,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    train_size: int | None = None,
    validation_size: int | None = None,
    certification_size: int | None = None,
    test_size: int | None = None,
    file_order: bool = False,
) -> Dataset:
    """Carve the four splits: validation, certification and, where `test` is None, test out of `pool`; the rest trains.

    A random order of the pool, fixed by `seed`, is dealt out in that sequence, so that `train_size` does not change
    the other three. Sizes not given: a tenth each for validation and certification, a fifth for test, all the rest
    for training. Inside a split the order is random too, for files come sorted by class; `file_order` keeps that of the
    file, where it is known to be as good. Of a `test` given whole, `test_size` keeps the first examples in that order.
    """
    total = len(pool)
    validation_size = max(1, total // 10) if validation_size is None else validation_size
    certification_size = max(1, total // 10) if certification_size is None else certification_size
    carved = 0
    if test is None:
        carved = max(1, total // 5) if test_size is None else test_size
    elif test_size is not None and test_size > len(test):
        raise UsageError(f"{name}: test_size {test_size} is more than the {len(test)} test examples there are")
    rest = total - validation_size - certification_size - carved
    train_size = max(1, rest) if train_size is None else train_size
    asked = {"train": train_size, "validation": validation_size, "certification": certification_size}
    asked["test"] = carved if test is None else len(test) if test_size is None else test_size
    for part, size in asked.items():
        if size < 1:
            raise UsageError(f"{name}: {part}_size must be at least 1, got {size}")
    if train_size > rest:
        sizes = " + ".join(f"{size} {part}" for part, size in asked.items() if part != "test" or test is None)
        raise UsageError(f"{name}: {sizes} is more than the {total} examples there are; lower one of the sizes")
    order = random.permutation(random.key(seed).fold("splits"), total)
    bounds = torch.tensor([validation_size, certification_size, carved, train_size]).cumsum(0).tolist()
    dealt = [order[start:end] for start, end in zip([0, *bounds], bounds, strict=False)]
    validation, certification, held, train = (pool.take(part.sort().values if file_order else part) for part in dealt)
    if test is None:
        test = held
    else:
        if not file_order:  # the same order for every seed
            test = test.take(random.permutation(random.key(0).fold("test"), len(test)))
        test = test.first(asked["test"])
    names = tuple(class_names) if class_names is not None else tuple(str(k) for k in range(pool.num_classes))
    channels, height, width = pool.images.shape[1:]
    groups = [part.groups for part in (pool, test) if part.groups is not None]
    num_groups = 1 + max((int(g.max()) for g in groups), default=-1)
    return Dataset(
        name,
        train,
        validation,
        certification,
        test,
        pool.num_classes,
        names,
        (channels, height, width),
        num_groups,
        seed=seed,
    )


def _check_images(images: Tensor, where: str) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4:
        shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"{where}: images must be a tensor of shape (N, C, H, W), got {shape}")
    if images.numel() == 0:
        raise DataError(f"{where}: there are no images (shape {tuple(images.shape)})")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise DataError(f"{where}: images must be floats in [0, 1] or bytes (uint8), got {images.dtype}")
    for start in range(0, len(images), 4096):  # in parts, so that the check needs no second copy of the data
        part = images[start : start + 4096]
        low, high = part.min().item(), part.max().item()
        if not (low >= 0.0 and high <= 1.0):
            wrong = ~((part >= 0.0) & (part <= 1.0)).flatten(1).all(dim=1)
            number = start + int(wrong.nonzero()[0])
            what = "NaN" if bool(images[number].isnan().any()) else f"values from {low:g} to {high:g}"
            raise DataError(f"{where}: image {number} has {what}; images must be in [0, 1] (divide bytes by 255)")


def _check_numbers(values: Tensor, count: int, what: str, where: str) -> tuple[Tensor, int]:
    if not isinstance(values, Tensor) or values.dtype not in _INTEGERS:
        kind = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise DataError(f"{where}: {what} must be integers, got {kind}")
    if tuple(values.shape) != (count,):
        raise DataError(f"{where}: {what} must have shape ({count},), one per image, got {tuple(values.shape)}")
    values = values.detach().to(torch.int64)
    low, high = int(values.min()), int(values.max())
    if low < 0:
        raise DataError(f"{where}: {what} must be 0 or more, got {low} (example {int(values.argmin())})")
    return values, high


def _check_labels(labels: Tensor, count: int, num_classes: int | None, where: str) -> tuple[Tensor, int]:
    labels, high = _check_numbers(labels, count, "labels", where)
    if num_classes is None:
        num_classes = high + 1
        if num_classes < 2:
            raise DataError(f"{where}: all labels are 0; a classifier needs at least two classes")
    elif high >= num_classes:
        number = int(labels.argmax())
        raise DataError(f"{where}: label {high} of example {number} is out of range 0 .. {num_classes - 1}")
    return labels, num_classes
