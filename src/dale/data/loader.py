"""Training batches: shuffled, augmented, on the device, and the same whoever asks.

The order of an epoch and the augmentation of an example depend on (seed, epoch, example) alone. A resumed run starts
in the middle of an epoch at no cost, and each of several processes takes its own part of the same global batches.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dale import random
from dale.batch import Batch
from dale.data.augment import Augmentation
from dale.data.splits import Split
from dale.errors import UsageError, require

_AHEAD = 4  # batches that wait, pinned, for a device that does not hold the data
_DRAWN = 4096  # examples whose augmentation is drawn at once: the hash costs the same for one as for thousands


@dataclass(frozen=True, eq=False)
class _Rows:
    """One batch before augmentation: stored images and the rest of it."""

    images: Tensor
    labels: Tensor
    index: Tensor
    groups: Tensor | None


class Loader:
    """Batches of a split for training.

    Every epoch is a new order of the whole split, cut into global batches of `batch_size`; this process gets the
    `rank`-th of `world_size` contiguous shares of each. With `drop_last` an uneven last batch is left out; a split
    smaller than one batch gives one batch of all. With `resident` the split lives on the device as it is stored;
    without, a background thread gathers batches into pinned memory ahead of use. The default decides by the free
    memory of the device. Both give the same numbers.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int,
        augmentation: Sequence[Augmentation] = (),
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = True,
        resident: bool | None = None,
    ) -> None:
        require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
        require(0 <= rank < world_size, f"rank must be in 0 .. {world_size - 1}, got {rank}")
        require(len(split) > 0, "the training split is empty")
        self.batch_size = min(batch_size, len(split))
        if self.batch_size < world_size:
            raise UsageError(f"a batch of {self.batch_size} examples cannot be shared by {world_size} processes")
        self.device = torch.device(device)
        self.resident = _fits(split, self.device) if resident is None else resident
        self.split = split.to(self.device) if self.resident else split
        self.augmentation = tuple(augmentation)
        self.rank, self.world_size = rank, world_size
        self._key = random.key(seed)
        self._num_batches = len(split) // self.batch_size
        if not drop_last and len(split) % self.batch_size:
            self._num_batches += 1

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self._num_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on: float32 images in [0, 1], augmented."""
        order = random.permutation(self._key.fold("order").fold(epoch), len(self.split))
        shares = [self._share(order, number) for number in range(start, len(self))]
        keys = [self._key.fold("augmentation").fold(epoch).fold(i) for i in range(len(self.augmentation))]
        rows = self._gather(shares) if self.resident else self._gather_ahead(shares)
        for part, numbers in zip(rows, self._draw(shares, keys), strict=True):
            yield self._finish(part, numbers)

    def _share(self, order: Tensor, number: int) -> Tensor:
        batch = order[number * self.batch_size : (number + 1) * self.batch_size]
        return batch[self.rank * len(batch) // self.world_size : (self.rank + 1) * len(batch) // self.world_size]

    def _draw(self, shares: list[Tensor], keys: list[random.Key]) -> Iterator[list[Tensor]]:
        """Yield each batch's augmentation numbers, drawn for many batches at a time."""
        step = max(1, _DRAWN // self.batch_size)
        for start in range(0, len(shares), step):
            block = shares[start : start + step]
            sizes = [len(share) for share in block]
            places = torch.cat(block).to(self.split.index.device)
            index = self.split.index[places].to(self.device)
            drawn = [
                torch.split(augmentation.draw(key, index), sizes)
                for augmentation, key in zip(self.augmentation, keys, strict=True)
            ]
            for i in range(len(block)):
                yield [numbers[i] for numbers in drawn]

    def _finish(self, rows: _Rows, numbers: list[Tensor]) -> Batch:
        images, converted = rows.images, False
        for augmentation, drawn in zip(self.augmentation, numbers, strict=True):
            if not augmentation.moves_only and not converted:
                images, converted = self.split.convert(images), True
            images = augmentation.apply(images, drawn)
            if not augmentation.moves_only:
                images = images.clamp_(0.0, 1.0)
        if not converted:
            images = self.split.convert(images)
        return Batch(images, rows.labels, rows.index, rows.groups)

    def _select(self, places: Tensor) -> _Rows:
        split = self.split
        groups = None if split.groups is None else split.groups[places]
        return _Rows(split.images.index_select(0, places), split.labels[places], split.index[places], groups)

    def _gather(self, shares: list[Tensor]) -> Iterator[_Rows]:
        for share in shares:
            yield self._select(share.to(self.device, non_blocking=True))

    def _gather_ahead(self, shares: list[Tensor]) -> Iterator[_Rows]:
        """Yield batches that a thread gathers ahead of use, pinned where the device is a GPU."""
        ready: queue.Queue[_Rows | BaseException] = queue.Queue(maxsize=_AHEAD)
        stop = threading.Event()

        def put(item: _Rows | BaseException) -> None:
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    return

        def work() -> None:
            try:
                for share in shares:
                    if stop.is_set():
                        return
                    rows = self._select(share)
                    put(_pin(rows) if self.device.type == "cuda" else rows)
            except BaseException as error:  # handed to the consumer, which raises it
                put(error)

        thread = threading.Thread(target=work, name="dale-loader", daemon=True)
        thread.start()
        try:
            for _ in shares:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield _send(item, self.device)
        finally:
            stop.set()
            thread.join()


def _fits(split: Split, device: torch.device) -> bool:
    """Tell whether the stored images take less than half of the device's free memory."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return split.images.nbytes < free // 2


def _pin(rows: _Rows) -> _Rows:
    groups = None if rows.groups is None else rows.groups.pin_memory()
    return _Rows(rows.images.pin_memory(), rows.labels.pin_memory(), rows.index.pin_memory(), groups)


def _send(rows: _Rows, device: torch.device) -> _Rows:
    groups = None if rows.groups is None else rows.groups.to(device, non_blocking=True)
    return _Rows(
        rows.images.to(device, non_blocking=True),
        rows.labels.to(device, non_blocking=True),
        rows.index.to(device, non_blocking=True),
        groups,
    )
