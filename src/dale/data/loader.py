"""Training batches: shuffled, augmented, on the device, and the same whoever asks.

The order of an epoch and the augmentation of an example depend on (seed, epoch, example) alone. A resumed run starts
in the middle of an epoch at no cost, and each of several processes takes its own part of the same global batches.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dale import random
from dale.batch import Batch
from dale.data.augment import Augmentation
from dale.data.splits import Split
from dale.errors import UsageError, require

_BLOCK = 512  # examples gathered and moved at once: fewer, larger operations, still small enough for a CPU's cache
_DRAWN = 16  # blocks whose augmentation is drawn at once
_AHEAD = 2  # blocks that wait, pinned, for a device that does not hold the data

_Drawn = list[tuple[Augmentation, Tensor]]  # augmentations, each with its numbers for one block


class Loader:
    """Batches of a split for training.

    Every epoch is a new order of the whole split, cut into global batches of `batch_size`; this process gets the
    `rank`-th of `world_size` contiguous shares of each. With `drop_last` an uneven last batch is left out; a split
    smaller than one batch gives one batch of all. With `resident` the split lives on the device as it is stored;
    without, a background thread gathers examples into pinned memory ahead of use. The default decides by the free
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
        whole, rest = divmod(len(split), self.batch_size)
        self._num_batches = whole + (rest > 0 and not drop_last)

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self._num_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on: float32 images in [0, 1], augmented."""
        order = random.permutation(self._key.fold("order").fold(epoch), len(self.split))
        shares = [self._share(order, number) for number in range(start, len(self))]
        step = max(1, _BLOCK // self.batch_size)
        blocks = [shares[first : first + step] for first in range(0, len(shares), step)]
        keys = [self._key.fold("augmentation").fold(epoch).fold(i) for i in range(len(self.augmentation))]
        places = [torch.cat(block) for block in blocks]
        gather = self._gather if self.resident else self._gather_ahead
        for block, (examples, left) in zip(blocks, gather(places, self._draw(places, keys)), strict=True):
            yield from self._finish(examples, [len(share) for share in block], left)

    def _share(self, order: Tensor, number: int) -> Tensor:
        batch = order[number * self.batch_size : (number + 1) * self.batch_size]
        return batch[self.rank * len(batch) // self.world_size : (self.rank + 1) * len(batch) // self.world_size]

    def _draw(self, places: list[Tensor], keys: list[random.Key]) -> Iterator[_Drawn]:
        """Yield each block's augmentation numbers, drawn for many blocks at a time: the hash costs little more."""
        for first in range(0, len(places), _DRAWN):
            part = places[first : first + _DRAWN]
            index = self.split.index[torch.cat(part).to(self.split.index.device)].to(self.device)
            sizes = [len(block) for block in part]
            numbers = [
                torch.split(augmentation.draw(key, index), sizes)
                for augmentation, key in zip(self.augmentation, keys, strict=True)
            ]
            for i in range(len(part)):
                yield [(a, pieces[i]) for a, pieces in zip(self.augmentation, numbers, strict=True)]

    def _finish(self, examples: Batch, sizes: list[int], left: _Drawn) -> Iterator[Batch]:
        """Do what is left of the augmentation of a block of stored examples, and cut it into batches of floats.

        What only moves pixels is done to stored values and for the whole block; the rest to floats, batch by batch.
        """
        images = examples.images
        while left and left[0][0].moves_only:
            augmentation, numbers = left.pop(0)
            images = augmentation.apply(images, numbers)
        moved, first = Batch(images, examples.labels, examples.index, examples.groups), 0
        for size in sizes:
            part, first = slice(first, first + size), first + size
            batch = moved[part]
            images = self.split.convert(batch.images)
            for augmentation, numbers in left:
                images = augmentation.apply(images, numbers[part])
                images = images if augmentation.moves_only else images.clamp_(0.0, 1.0)
            yield Batch(images, batch.labels, batch.index, batch.groups)

    def _gather(self, places: list[Tensor], drawn: Iterator[_Drawn]) -> Iterator[tuple[Batch, _Drawn]]:
        """Yield blocks of stored examples, and the augmentation still to be done."""
        split = self.split
        for cpu_block, left in zip(places, drawn, strict=True):
            block = cpu_block.to(self.device, non_blocking=True)
            if left and left[0][0].moves_only:
                augmentation, numbers = left.pop(0)
                images = augmentation.gather(split.images, block, numbers)
            else:
                images = split.images.index_select(0, block)
            groups = None if split.groups is None else split.groups.index_select(0, block)
            yield Batch(images, split.labels.index_select(0, block), split.index.index_select(0, block), groups), left

    def _gather_ahead(self, places: list[Tensor], drawn: Iterator[_Drawn]) -> Iterator[tuple[Batch, _Drawn]]:
        """Yield blocks that a thread gathers ahead of use, pinned where the device is a GPU."""
        stored = Batch(self.split.images, self.split.labels, self.split.index, self.split.groups)
        ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=_AHEAD)
        stop = threading.Event()

        def put(item: Batch | BaseException) -> None:
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    return

        def work() -> None:
            try:
                for block in places:
                    if stop.is_set():
                        return
                    examples = _each(stored, functools.partial(torch.index_select, dim=0, index=block))
                    put(_each(examples, Tensor.pin_memory) if self.device.type == "cuda" else examples)
            except BaseException as error:  # handed to the consumer, which raises it
                put(error)

        thread = threading.Thread(target=work, name="dale-loader", daemon=True)
        thread.start()
        try:
            for left in drawn:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield _each(item, lambda tensor: tensor.to(self.device, non_blocking=True)), left
        finally:
            stop.set()
            thread.join()


def _fits(split: Split, device: torch.device) -> bool:
    """Tell whether the stored images take less than half of the device's free memory."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return split.images.nbytes < free // 2


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    groups = None if batch.groups is None else change(batch.groups)
    return Batch(change(batch.images), change(batch.labels), change(batch.index), groups)
