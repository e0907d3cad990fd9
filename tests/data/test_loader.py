from __future__ import annotations

import functools
import shutil
import threading

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from dale.batch import Batch
from dale.data import Augmentation, Loader, RandomCrop, RandomCropShift, RandomCutout, RandomFlip, Split, StrongAugment
from dale.errors import UsageError

_N = 1500  # more than one block of the loader
_SPLIT = Split.of(
    torch.randint(0, 256, (_N, 3, 8, 8), dtype=torch.uint8),
    torch.arange(_N) % 7,
    groups=torch.arange(_N) % 3,
).take(torch.arange(_N - 1, -1, -1))
_MOVES = (RandomCrop(padding=2), RandomFlip())
_MIXED = (RandomCrop(padding=2), StrongAugment(), RandomCutout(size=3))


def _same(ours: Batch, theirs: Batch) -> bool:
    assert ours.groups is not None
    assert theirs.groups is not None
    return all(
        torch.equal(a, b)
        for a, b in zip(
            (ours.images, ours.labels, ours.index, ours.groups),
            (theirs.images, theirs.labels, theirs.index, theirs.groups),
            strict=True,
        )
    )


def _by_example(batches: list[Batch]) -> torch.Tensor:
    index = torch.cat([b.index for b in batches])
    return torch.cat([b.images for b in batches])[index.argsort()]


def test_an_epoch_without_augmentation_shows_every_example_once() -> None:
    loader = Loader(_SPLIT, 100, seed=0)
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader) == 15
    index = torch.cat([b.index for b in batches])
    assert torch.equal(index.sort().values, torch.arange(_N))
    assert not torch.equal(index, torch.arange(_N))
    labels, groups = (
        torch.cat([b.labels for b in batches]),
        torch.cat([b.groups for b in batches if b.groups is not None]),
    )
    assert torch.equal(labels, index % 7)
    assert torch.equal(groups, index % 3)
    assert torch.equal(_by_example(batches), _SPLIT.convert(_SPLIT.images.flip(0)))


def test_order_and_augmentation_depend_on_seed_and_epoch() -> None:
    def first(seed: int, epoch: int) -> Batch:
        return next(Loader(_SPLIT, 100, seed=seed, augmentation=_MOVES).epoch(epoch))

    assert _same(first(0, 3), first(0, 3))
    assert not torch.equal(first(0, 3).index, first(0, 4).index)
    assert not torch.equal(first(0, 3).index, first(1, 3).index)


@pytest.mark.parametrize("augmentation", [_MOVES, _MIXED], ids=["moves", "mixed"])
def test_augmentation_does_not_depend_on_the_batch_size(augmentation: tuple[RandomCrop, ...]) -> None:
    images = [
        _by_example(list(Loader(_SPLIT, size, seed=0, augmentation=augmentation, drop_last=False).epoch(2)))
        for size in (7, 64, 700, 5000)
    ]
    assert all(torch.equal(images[0], other) for other in images[1:])
    assert images[0].min() >= 0
    assert images[0].max() <= 1


@pytest.mark.parametrize("augmentation", [_MOVES, _MIXED], ids=["moves", "mixed"])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_every_global_batch(augmentation: tuple[RandomCrop, ...], world_size: int) -> None:
    whole = list(Loader(_SPLIT, 128, seed=1, augmentation=augmentation).epoch(1))
    shares = [
        list(Loader(_SPLIT, 128, seed=1, augmentation=augmentation, rank=rank, world_size=world_size).epoch(1))
        for rank in range(world_size)
    ]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert max(len(p) for p in parts) - min(len(p) for p in parts) <= 1
        groups = torch.cat([p.groups for p in parts if p.groups is not None])
        joined = Batch(
            torch.cat([p.images for p in parts]),
            torch.cat([p.labels for p in parts]),
            torch.cat([p.index for p in parts]),
            groups,
        )
        assert _same(joined, batch)


@pytest.mark.parametrize("resident", [True, False])
def test_resume_in_the_middle_of_an_epoch(resident: bool) -> None:
    loader = Loader(_SPLIT, 64, seed=1, augmentation=_MIXED, resident=resident)
    whole = list(loader.epoch(5))
    for start in (0, 3, 9, 22, 23):
        rest = list(loader.epoch(5, start))
        assert len(rest) == len(whole) - start
        assert all(_same(a, b) for a, b in zip(rest, whole[start:], strict=True))


def test_the_background_loader_gives_the_same_numbers_and_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dale.data.loader._BLOCK", 64)  # many blocks, so that the thread has work left when we stop
    resident = Loader(_SPLIT, 64, seed=1, augmentation=_MOVES, resident=True)
    background = Loader(_SPLIT, 64, seed=1, augmentation=_MOVES, resident=False)
    for ours, theirs in zip(background.epoch(0), resident.epoch(0), strict=True):
        assert _same(ours, theirs)
    batches = background.epoch(1)
    next(batches)
    assert any(t.name == "dale-loader" for t in threading.enumerate())
    batches.close()  # type: ignore[attr-defined]
    assert not any(t.name == "dale-loader" for t in threading.enumerate())


def _compiled_as_plain(augmentation: tuple[Augmentation, ...], backend: str) -> None:
    plain, compiled = (Loader(_SPLIT, 128, seed=1, augmentation=augmentation) for _ in range(2))
    options = {"backend": backend, "dynamic": False, "fullgraph": True}
    compiled.compiler = functools.cache(functools.partial(torch.compile, **options))
    for epoch in (0, 1):
        for ours, theirs in zip(compiled.epoch(epoch), plain.epoch(epoch), strict=True):
            assert _same(ours, theirs)


_SEVERAL = pytest.mark.parametrize(
    "augmentation",
    [_MOVES, (RandomCutout(size=3), RandomFlip(), RandomCrop(padding=2)), (RandomCropShift(strength=5),), _MIXED, ()],
    ids=["moves", "turned", "shifted", "mixed", "none"],
)


@_SEVERAL
def test_a_traced_loader_gives_the_same_numbers(augmentation: tuple[Augmentation, ...]) -> None:
    _compiled_as_plain(augmentation, "aot_eager")


@pytest.mark.verify  # the compiler takes half a minute
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@_SEVERAL
def test_a_compiled_loader_gives_the_same_numbers(augmentation: tuple[Augmentation, ...]) -> None:
    _compiled_as_plain(augmentation, "inductor")


@pytest.mark.parametrize("resident", [True, False])
def test_a_loader_is_compiled_once(resident: bool) -> None:
    """Whatever the epoch, the place in it and the size of what is left; from the batch on that has a compiler."""
    compilations = 0

    def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal compilations
        compilations += 1
        return lookup_backend("aot_eager")(module, inputs)

    def loader() -> Loader:
        return Loader(_SPLIT, 200, seed=2, augmentation=_MIXED, resident=resident, drop_last=False)

    torch._dynamo.reset()
    plain, compiled = loader(), loader()
    compiler = functools.cache(functools.partial(torch.compile, backend=backend, dynamic=False, fullgraph=True))
    for epoch, start in ((0, 0), (1, 0), (2, 3), (2, 7)):
        for ours, theirs in zip(compiled.epoch(epoch, start), plain.epoch(epoch, start), strict=True):
            assert _same(ours, theirs)
            compiled.compiler = compiler
    assert compilations == 1
    with torch.no_grad():
        next(compiled.epoch(3))
    assert compilations == 1


def test_an_error_of_the_background_thread_reaches_the_caller() -> None:
    broken = Split(_SPLIT.images[:10], _SPLIT.labels, _SPLIT.index, 7)
    with pytest.raises(IndexError):
        list(Loader(broken, 64, seed=0, resident=False).epoch(0))


def test_uneven_last_batch() -> None:
    assert len(Loader(_SPLIT, 400, seed=0)) == 3
    loader = Loader(_SPLIT, 400, seed=0, drop_last=False)
    assert [len(b) for b in loader.epoch(0)] == [400, 400, 400, 300]
    assert len(loader) == 4


def test_fewer_examples_than_a_batch() -> None:
    loader = Loader(_SPLIT.first(10), 128, seed=0, augmentation=_MOVES)
    assert [len(b) for b in loader.epoch(0)] == [10]
    assert len(loader) == 1


def test_stored_data_is_left_alone() -> None:
    kept = _SPLIT.images.clone()
    for batch in Loader(_SPLIT, 256, seed=0, augmentation=_MIXED).epoch(0):
        batch.images.zero_()
    assert torch.equal(_SPLIT.images, kept)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    list(Loader(_SPLIT, 256, seed=0, augmentation=_MIXED).epoch(0))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"rank": 2, "world_size": 2}, "rank must be in 0 .. 1"),
        ({"batch_size": 2, "world_size": 3}, "2 examples cannot be shared by 3 processes"),
    ],
)
def test_bad_settings(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(_SPLIT, **({"batch_size": 8, "seed": 0} | options))  # type: ignore[arg-type]
