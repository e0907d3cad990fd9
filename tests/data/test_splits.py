from __future__ import annotations

import pytest
import torch

from dale.data import Split, split_dataset
from dale.errors import DataError, UsageError


def _pool(n: int = 50, classes: int = 5) -> Split:
    return Split.of(torch.arange(n * 4).view(n, 1, 2, 2).remainder(256).to(torch.uint8), torch.arange(n) % classes)


def test_batches_cover_the_split_in_order_and_divide_by_the_scale() -> None:
    split = _pool(10)
    batches = list(split.batches(4))
    assert [len(b) for b in batches] == [4, 4, 2]
    images = torch.cat([b.images for b in batches])
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, split.images / 255, rtol=0, atol=2**-24)
    assert torch.equal(images, split.images * torch.tensor(1 / 255))
    assert torch.equal(torch.cat([b.index for b in batches]), torch.arange(10))
    assert torch.equal(torch.cat([b.labels for b in batches]), split.labels)


def test_every_byte_stays_in_range_and_full_scale_is_one() -> None:
    split = Split.of(torch.arange(256, dtype=torch.uint8).view(4, 1, 8, 8), torch.arange(4))
    levels = torch.cat([b.images for b in split.batches(3)]).flatten()
    assert levels[0] == 0.0
    assert levels[255] == 1.0
    assert (levels.diff() > 0).all()


def test_float_images_are_kept_as_they_are() -> None:
    images = torch.rand(3, 1, 2, 2, dtype=torch.float64)
    split = Split.of(images, torch.tensor([0, 1, 1]), groups=torch.tensor([0, 2, 1]))
    batch = next(split.batches(3))
    assert torch.equal(batch.images, images.float())
    assert batch.groups is not None
    assert batch.groups.tolist() == [0, 2, 1]
    batch.images.zero_()  # what is handed out is the caller's own
    assert torch.equal(split.images, images.float())


def test_take_and_first() -> None:
    split = _pool(10)
    assert split.take([7, 2]).index.tolist() == [7, 2]
    assert torch.equal(split.take([7, 2]).images[0], split.images[7])
    assert split.first(3).index.tolist() == [0, 1, 2]
    assert len(split.first(99)) == 10
    with pytest.raises(UsageError, match="at least 1"):
        split.first(0)


def test_splits_are_disjoint_cover_the_pool_and_depend_on_the_seed_alone() -> None:
    pool = _pool(100)
    data = split_dataset("p", pool, seed=3)
    parts = [data.train, data.validation, data.certification, data.test]
    assert [len(p) for p in parts] == [60, 10, 10, 20]
    index = torch.cat([p.index for p in parts])
    assert torch.equal(index.sort().values, torch.arange(100))
    for part in parts:
        assert not torch.equal(part.index, part.index.sort().values)
        assert torch.equal(part.images, pool.images[part.index])
        assert torch.equal(part.labels, pool.labels[part.index])
    again, other = split_dataset("p", pool, seed=3), split_dataset("p", pool, seed=4)
    assert torch.equal(again.train.index, data.train.index)
    assert not torch.equal(other.test.index, data.test.index)


def test_train_size_leaves_the_other_splits_alone() -> None:
    pool = _pool(100)
    whole, small = split_dataset("p", pool, seed=0), split_dataset("p", pool, seed=0, train_size=7)
    assert len(small.train) == 7
    assert set(small.train.index.tolist()) <= set(whole.train.index.tolist())
    for part in ("validation", "certification", "test"):
        assert torch.equal(getattr(whole, part).index, getattr(small, part).index)


def test_the_first_examples_of_sorted_data_are_of_all_classes() -> None:
    """A file sorted by class: parts of the splits stand for the whole, and so does a test set given as one."""
    pool = Split.of(torch.rand(4000, 1, 2, 2), torch.arange(4000) // 400)
    for data in (split_dataset("p", pool), split_dataset("p", pool, pool)):
        for part in (data.train, data.validation, data.certification, data.test):
            counts = part.first(len(part) // 2).labels.bincount(minlength=10)
            assert counts.min() > 0, counts
    orders = [split_dataset("p", pool, pool, seed=seed).test.index for seed in (0, 1)]
    assert torch.equal(*orders)  # the first test images are the same ones whatever the seed


def test_the_order_of_the_file_is_kept_where_it_is_as_good() -> None:
    pool = _pool(100)
    mixed, kept = split_dataset("p", pool, seed=3), split_dataset("p", pool, seed=3, file_order=True)
    for part in ("train", "validation", "certification", "test"):
        assert torch.equal(getattr(kept, part).index, getattr(mixed, part).index.sort().values)


def test_an_official_test_set_keeps_its_first_examples() -> None:
    data = split_dataset("p", _pool(100), _pool(30), seed=0, test_size=8, file_order=True)
    assert data.test.index.tolist() == list(range(8))
    assert len(data.train) + len(data.validation) + len(data.certification) == 100


def test_groups_are_counted() -> None:
    pool = Split.of(torch.rand(20, 1, 2, 2), torch.arange(20) % 2, groups=torch.arange(20) % 3)
    data = split_dataset("p", pool)
    assert data.num_groups == 3
    assert split_dataset("p", _pool(20)).num_groups == 0
    assert data.validation.groups is not None
    assert torch.equal(data.validation.groups, data.validation.index % 3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"validation_size": 80, "certification_size": 30}, "more than the 100 examples"),
        ({"train_size": 90}, "90 train .* more than the 100"),
        ({"train_size": 0}, "train_size must be at least 1"),
        ({"certification_size": -1}, "certification_size must be at least 1"),
        ({"test_size": 0}, "test_size must be at least 1"),
    ],
)
def test_impossible_sizes(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_dataset("p", _pool(100), **sizes)


def test_test_size_beyond_the_official_set() -> None:
    with pytest.raises(UsageError, match="test_size 31 is more than the 30"):
        split_dataset("p", _pool(100), _pool(30), test_size=31)


_IMAGES, _LABELS = torch.rand(4, 1, 2, 2), torch.tensor([0, 1, 2, 1])
_NAN, _LARGE = _IMAGES.clone(), _IMAGES.clone()
_NAN[2, 0, 1, 1] = float("nan")
_LARGE[3, 0, 0, 0] = 200.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((_IMAGES[0], _LABELS), r"shape \(N, C, H, W\)"),
        ((_IMAGES[:0], _LABELS[:0]), "no images"),
        ((_LARGE, _LABELS), r"image 3 has values from .* to 200; images must be in \[0, 1\]"),
        ((-_IMAGES, _LABELS), r"must be in \[0, 1\]"),
        ((_NAN, _LABELS), "image 2 has NaN"),
        ((_IMAGES.to(torch.int32), _LABELS), "floats in .* or bytes"),
        ((_IMAGES, _LABELS[:3]), r"labels must have shape \(4,\)"),
        ((_IMAGES, _LABELS.float()), "labels must be integers"),
        ((_IMAGES, _LABELS - 1), "labels must be 0 or more, got -1"),
        ((_IMAGES, _LABELS, 2), r"label 2 of example 2 is out of range 0 .. 1"),
        ((_IMAGES, torch.zeros(4, dtype=torch.int64)), "at least two classes"),
        ((_IMAGES, _LABELS, None, torch.tensor([0, 1])), r"groups must have shape \(4,\)"),
        ((_IMAGES, _LABELS, None, torch.tensor([0, 1, -1, 0])), "groups must be 0 or more"),
    ],
)
def test_bad_tensors(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Split.of(*arguments, where="mine")  # type: ignore[arg-type]
    assert str(caught.value).startswith("mine: ")
    assert "\n" not in str(caught.value)
