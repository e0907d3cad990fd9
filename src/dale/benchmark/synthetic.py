"""Random images in the shapes of the known data sets: the same loader, no file on disk."""

from __future__ import annotations

import torch

from dale.data import Dataset, Split
from dale.errors import unknown

# channels, side, classes, training images of the official files
_SHAPES: dict[str, tuple[int, int, int, int]] = {
    "digits": (1, 8, 10, 1797),
    "mnist": (1, 28, 10, 60_000),
    "fashion-mnist": (1, 28, 10, 60_000),
    "cifar10": (3, 32, 10, 50_000),
    "cifar100": (3, 32, 100, 50_000),
    "svhn": (3, 32, 10, 73_257),
}
_HELD_OUT = 64  # images of each of the other splits, which a benchmark does not read


def synthetic_dataset(name: str, train_size: int | None = None, seed: int = 0) -> Dataset:
    """Uniformly random bytes in the shape and number of a known data set, with labels in turn.

    The training split has all images of the official files unless `train_size` says otherwise. What is learnt from
    them is nothing; a step costs what it costs on real images.
    """
    folded = {choice.replace("-", ""): choice for choice in _SHAPES}
    known = folded.get(name.lower().replace("-", "").replace("_", ""))
    if known is None:
        raise unknown("dataset to imitate", name, tuple(_SHAPES))
    channels, side, num_classes, count = _SHAPES[known]
    count = train_size or count
    source = torch.Generator().manual_seed(seed)

    def split(size: int) -> Split:
        images = torch.randint(0, 256, (size, channels, side, side), dtype=torch.uint8, generator=source)
        return Split.of(images, torch.arange(size) % num_classes, num_classes)

    return Dataset(
        name=known,
        train=split(count),
        validation=split(_HELD_OUT),
        certification=split(_HELD_OUT),
        test=split(_HELD_OUT),
        num_classes=num_classes,
        class_names=tuple(str(number) for number in range(num_classes)),
        image_shape=(channels, side, side),
        source=known,
        seed=seed,
    )
