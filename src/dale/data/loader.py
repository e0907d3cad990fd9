"""Training batches: shuffled, augmented, on the device, and the same whoever asks.

The order of an epoch and the augmentation of an example depend on (seed, epoch, example) alone. A resumed run starts
in the middle of an epoch at no cost, and each of several processes takes its own part of the same global batches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dale import random
from dale.batch import Batch
from dale.compiling import Compiler, as_it_is
from dale.data.augment import Augmentation
from dale.data.splits import Split
from dale.errors import UsageError, require

_BLOCK = 512  # examples gathered and moved at once: fewer, larger operations, still small enough for a CPU's cache
_DRAWN = 16  # blocks whose augmentation is drawn at once
_AHEAD = 2  # blocks that wait, pinned, for a device that does not hold the data

_Drawn = list[tuple[Augmentation, Tensor]]  # augmentations, each with its numbers for one block
_Stored = tuple[Split, Tensor | None]  # a split on the device, and the places of a block in it (None: all of it)


class Loader:
    """Batches of a split for training.

    Every epoch is a new order of the whole split, cut into global batches of `batch_size`; this process gets the
    `rank`-th of `world_size` contiguous shares of each. With `drop_last` an uneven last batch is left out; a split
    smaller than one batch gives one batch of all. With `resident` the split lives on the device as it is stored;
    without, a background thread gathers examples into pinned memory ahead of use. The default decides by the free
    memory of the device. Both give the same numbers.

    What goes through `compiler`, where one is set, is everything from the stored examples to floats: selecting them,
    drawing, and the leading augmentations that say `compiles`. The numbers stay the same. What changes between calls
    is in tensors, and blocks of another size than the usual take the plain path, so that nothing is compiled twice.
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
        self.compiler: Compiler = as_it_is
        self._key = random.key(seed)
        whole, rest = divmod(len(split), self.batch_size)
        self._num_batches = whole + (rest > 0 and not drop_last)
        self._step = min(max(1, _BLOCK // self.batch_size), self._num_batches)  # batches of a block
        self._compiles = tuple(itertools.takewhile(lambda a: a.moves_only and a.compiles, self.augmentation))

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self._num_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on: float32 images in [0, 1], augmented."""
        # where the examples are: on a device nothing of it is waited for
        order = random.permutation(self._key.fold("order").fold(epoch), len(self.split), self.split.index.device)
        blocks = [range(first, min(first + self._step, len(self))) for first in range(start, len(self), self._step)]
        keys = [self._key.fold("augmentation").fold(epoch).fold(i) for i in range(len(self.augmentation))]
        words = torch.tensor([key.word for key in keys], dtype=torch.int64).to(self.device, non_blocking=True)
        places = [self._places(order, block) for block in blocks]
        drawn = self._draw(places, keys)
        usual = self._step * len(self._share(0))
        gather = self._gather if self.resident else self._gather_ahead
        for number, stored in enumerate(gather(places)):
            sizes, left = [len(self._share(batch)) for batch in blocks[number]], range(len(self.augmentation))
            if self.compiler is not as_it_is and len(places[number]) == usual:
                with torch.no_grad():
                    examples = self.compiler(_load)(*stored, words, self._compiles)
                rest = [(self.augmentation[i], drawn(number, i)) for i in left[len(self._compiles) :]]
                yield from self._finish(examples, sizes, rest, lambda images: images)
            else:
                examples, rest = self._move(*stored, [(self.augmentation[i], drawn(number, i)) for i in left])
                yield from self._finish(examples, sizes, rest, self.split.convert)

    def _share(self, number: int) -> range:
        """Where in the order this process's share of a batch is."""
        first = number * self.batch_size
        size = min(self.batch_size, len(self.split) - first)
        return range(first + self.rank * size // self.world_size, first + (self.rank + 1) * size // self.world_size)

    def _places(self, order: Tensor, block: range) -> Tensor:
        """This process's places in the split of a block of batches; one process's are a stretch of the order."""
        if self.world_size == 1:
            return order[self._share(block[0]).start : self._share(block[-1]).stop]
        shares = [self._share(number) for number in block]
        return torch.cat([order[share.start : share.stop] for share in shares])

    def _draw(self, places: list[Tensor], keys: list[random.Key]) -> Callable[[int, int], Tensor]:
        """Return a function that gives a block's numbers of an augmentation.

        They are drawn when first asked for, for many blocks at a time: the hash costs little more.
        """

        @functools.lru_cache(maxsize=1)
        def index(part: int) -> Tensor:
            together = torch.cat(places[part * _DRAWN : (part + 1) * _DRAWN])
            return self.split.index.index_select(0, together).to(self.device, non_blocking=True)

        @functools.lru_cache(maxsize=max(1, len(keys)))
        def numbers(part: int, which: int) -> tuple[Tensor, ...]:
            sizes = [len(block) for block in places[part * _DRAWN : (part + 1) * _DRAWN]]
            return torch.split(self.augmentation[which].draw(keys[which], index(part)), sizes)

        return lambda block, which: numbers(block // _DRAWN, which)[block % _DRAWN]

    def _move(self, stored: Split, places: Tensor | None, left: _Drawn) -> tuple[Batch, _Drawn]:
        """Gather a block of stored examples, and do to it whole what only moves pixels; the rest is left."""
        images = stored.images
        if places is not None and left and left[0][0].moves_only:
            (augmentation, numbers), *left = left
            images = augmentation.gather(images, places, numbers)
        elif places is not None:
            images = images.index_select(0, places)
        while left and left[0][0].moves_only:
            (augmentation, numbers), *left = left
            images = augmentation.apply(images, numbers)
        return Batch(images, *_others(stored, places)), left

    def _finish(
        self, examples: Batch, sizes: list[int], left: _Drawn, convert: Callable[[Tensor], Tensor]
    ) -> Iterator[Batch]:
        """Cut a block into batches of floats, and do to each what is left of the augmentation."""
        first = 0
        for size in sizes:
            part, first = slice(first, first + size), first + size
            batch = examples[part]
            images = convert(batch.images)
            for augmentation, numbers in left:
                images = augmentation.apply(images, numbers[part])
                images = images if augmentation.moves_only else images.clamp_(0.0, 1.0)
            yield Batch(images, batch.labels, batch.index, batch.groups)

    def _gather(self, places: list[Tensor]) -> Iterator[_Stored]:
        """Yield the split and each block's places in it."""
        return ((self.split, block) for block in places)

    def _gather_ahead(self, places: list[Tensor]) -> Iterator[_Stored]:
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
            for _ in places:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                here = _each(item, lambda tensor: tensor.to(self.device, non_blocking=True))
                yield replace(self.split, **vars(here)), None
        finally:
            stop.set()
            thread.join()


def _load(stored: Split, places: Tensor | None, words: Tensor, augmentation: tuple[Augmentation, ...]) -> Batch:
    """A block from the stored examples to augmented floats, in one function for a compiler; `words` are the keys'."""
    images = stored.images if places is None else stored.images.index_select(0, places)
    labels, index, groups = _others(stored, places)
    for number, one in enumerate(augmentation):
        images = one.apply(images, one.draw(random.Key(words[number]), index))
    return Batch(stored.convert(images), labels, index, groups)


def _others(stored: Split, places: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What belongs to the images of a block: labels, example numbers, groups."""
    if places is None:
        return stored.labels, stored.index, stored.groups
    groups = None if stored.groups is None else stored.groups.index_select(0, places)
    return stored.labels.index_select(0, places), stored.index.index_select(0, places), groups


def _fits(split: Split, device: torch.device) -> bool:
    """Tell whether the stored images take less than half of the device's free memory."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return split.images.nbytes < free // 2


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    groups = None if batch.groups is None else change(batch.groups)
    return Batch(change(batch.images), change(batch.labels), change(batch.index), groups)
