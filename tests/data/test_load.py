from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits

from dale.data import DATASETS, Dataset, Split, load_dataset
from dale.errors import DataError, UsageError


def _joined(data: Dataset) -> tuple[torch.Tensor, torch.Tensor]:
    """The official training set, put together again from the three splits carved from it."""
    parts: list[Split] = [data.train, data.validation, data.certification]
    index = torch.cat([p.index for p in parts])
    assert torch.equal(index.sort().values, torch.arange(len(index)))  # disjoint, and nothing is lost
    order = index.argsort()
    return torch.cat([p.images for p in parts])[order], torch.cat([p.labels for p in parts])[order]


def _moments(images: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of bytes over 255, to four digits, from their histogram."""
    share = images.reshape(-1).bincount(minlength=256).double() / images.numel()
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean = (share * levels).sum()
    return round(mean.item(), 4), round(((share * levels**2).sum() - mean**2).sqrt().item(), 4)


def test_digits_are_those_of_scikit_learn() -> None:
    data = load_dataset("digits")
    parts = [data.train, data.validation, data.certification, data.test]
    assert [len(p) for p in parts] == [1000, 200, 200, 397]
    assert (data.num_classes, data.image_shape, data.num_groups) == (10, (1, 8, 8), 0)
    index = torch.cat([p.index for p in parts])
    assert torch.equal(index.sort().values, torch.arange(1797))
    theirs = load_digits()
    for part in parts:
        assert part.images.dtype == torch.uint8
        images = next(part.batches(len(part))).images[:, 0]
        assert torch.equal(images, torch.from_numpy(theirs.images).float()[part.index] / 16)
        assert torch.equal(part.labels, torch.from_numpy(theirs.target)[part.index])


def test_digits_are_fixed_by_the_seed() -> None:
    first, again, other = load_dataset("digits"), load_dataset("digits", seed=0), load_dataset("digits", seed=1)
    assert torch.equal(first.test.index, again.test.index)
    assert not torch.equal(first.test.index, other.test.index)


def test_mnist_against_known_values(real_data: Path) -> None:
    data = load_dataset("mnist", data_dir=real_data)
    assert [len(s) for s in (data.train, data.validation, data.certification, data.test)] == [56000, 2000, 2000, 10000]
    images, labels = _joined(data)
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert data.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert images[0, 0, 5, 12:24].tolist() == [3, 18, 18, 18, 126, 136, 175, 26, 166, 255, 247, 127]
    assert _moments(images) == (0.1307, 0.3081)


def test_cifar10_against_known_values(real_data: Path) -> None:
    data = load_dataset("cifar10", data_dir=real_data)
    images, labels = _joined(data)
    assert labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert labels.bincount().tolist() == [5000] * 10
    assert data.test.labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert torch.equal(data.test.index, torch.arange(10000))
    assert images[0, :, 0, :2].tolist() == [[59, 43], [62, 46], [63, 45]]
    for channel, known in enumerate([(0.4914, 0.2470), (0.4822, 0.2435), (0.4465, 0.2616)]):
        assert _moments(images[:, channel]) == known
    assert data.class_names[3] == "cat"


def test_small_sizes_of_a_real_set(real_data: Path) -> None:
    data = load_dataset("CIFAR-10", data_dir=real_data, train_size=500, validation_size=300, test_size=1000)
    assert [len(s) for s in (data.train, data.validation, data.certification, data.test)] == [500, 300, 2000, 1000]
    with pytest.raises(UsageError, match=r"49000 validation.*more than the 50000"):
        load_dataset("cifar10", data_dir=real_data, validation_size=49000)


def test_data_dir_from_the_environment(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALE_DATA", str(real_data))
    assert len(load_dataset("mnist").test) == 10000


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("cifra10", "cifar10"), ("digit", "digits"), ("fashion", "fashion-mnist"), ("mnits", "mnist")],
)
def test_unknown_names_get_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{nearest}'") as caught:
        load_dataset(name)
    assert all(choice in str(caught.value) for choice in DATASETS)


def test_missing_paths() -> None:
    with pytest.raises(DataError, match=r"nowhere/mine.npz: no such file"):
        load_dataset("nowhere/mine.npz")
    with pytest.raises(DataError, match="nowhere/folder: no such file or folder"):
        load_dataset("nowhere/folder")


def test_damaged_official_files(tmp_path: Path, real_data: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    for file in (real_data / "mnist").glob("*.gz"):
        (folder / file.name).write_bytes(file.read_bytes())
    labels = folder / "t10k-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    for content in (whole[:2000], whole[:-1] + b"\1", b"<html>not found</html>", b""):
        labels.write_bytes(content)
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz: md5 is .* delete it") as caught:
            load_dataset("mnist", data_dir=tmp_path)
        assert "\n" not in str(caught.value)
