from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dale.data import load_dataset
from dale.errors import DataError

_RNG = np.random.default_rng(0)
_BYTES = _RNG.integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
_LABELS = np.arange(40) % 4


@pytest.mark.parametrize(
    ("images", "shape"),
    [
        (_BYTES, (3, 6, 5)),
        (_BYTES.transpose(0, 3, 1, 2), (3, 6, 5)),
        (_BYTES[..., 0], (1, 6, 5)),
        (_BYTES / 255, (3, 6, 5)),
        ((_BYTES / 255).astype(np.float32)[..., :1], (1, 6, 5)),
    ],
)
def test_npz_layouts(tmp_path: Path, images: np.ndarray, shape: tuple[int, int, int]) -> None:
    np.savez(tmp_path / "mine.npz", images=images, labels=_LABELS)
    data = load_dataset(tmp_path / "mine.npz", seed=1)
    assert (data.name, data.image_shape, data.num_classes) == ("mine", shape, 4)
    assert [len(s) for s in (data.train, data.validation, data.certification, data.test)] == [24, 4, 4, 8]
    expected = torch.from_numpy(_BYTES.copy()).permute(0, 3, 1, 2)[:, : shape[0]].float() / 255
    for part in (data.train, data.test):
        torch.testing.assert_close(next(part.batches(40)).images, expected[part.index], rtol=0, atol=2**-24)
        assert torch.equal(part.labels, part.index % 4)


def test_class_names_as_bytes(tmp_path: Path) -> None:
    names = np.array([b"cat", "d\u00f6g".encode(), b"c", b"d"])
    np.savez(tmp_path / "mine.npz", images=_BYTES, labels=_LABELS, class_names=names)
    assert load_dataset(tmp_path / "mine.npz").class_names == ("cat", "d\u00f6g", "c", "d")


def test_npz_with_a_test_set_groups_and_names(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "mine.npz",
        images=_BYTES,
        labels=_LABELS.astype(np.uint16),
        groups=np.arange(40) % 2,
        images_test=_BYTES[:10],
        labels_test=_LABELS[:10],
        groups_test=np.full(10, 2),
        class_names=np.array(["a", "b", "c", "d", "e"]),
    )
    data = load_dataset(str(tmp_path / "mine.npz"))
    assert sorted(data.test.index.tolist()) == list(range(10))
    assert (data.num_classes, data.num_groups, data.class_names) == (5, 3, ("a", "b", "c", "d", "e"))
    assert data.train.groups is not None
    assert torch.equal(data.train.groups, data.train.index % 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": _BYTES * 1.0}, r"image 0 has values .* must be in \[0, 1\]"),
        ({"images": np.full((40, 6, 5), np.nan)}, "image 0 has NaN"),
        ({"images": _BYTES[:0], "labels": _LABELS[:0]}, "no images"),
        ({"images": _BYTES[0, 0]}, r"with 1 or 3 channels, got \(5, 3\)"),
        ({"images": np.zeros((40, 6, 5, 4), np.uint8)}, r"with 1 or 3 channels, got \(40, 6, 5, 4\)"),
        ({"images": np.zeros((40, 2, 6, 5), np.uint8)}, r"with 1 or 3 channels, got \(40, 2, 6, 5\)"),
        ({"images": _BYTES.astype(np.uint16)}, r"must be bytes \(uint8\) or floats in \[0, 1\], got uint16"),
        ({"labels": _LABELS + 1}, r"label 4 of example 3, and 4 different labels; expected 0 \.\. 3"),
        ({"labels": np.where(np.arange(40) == 5, 10**9, _LABELS)}, "label 1000000000 of example 5, and 5 different"),
        ({"images_test": _BYTES, "labels_test": _LABELS + 1}, "labels_test hold 4; labels end at 3"),
        ({"class_names": np.array(["a", "b", "a", "c"])}, "class_names hold 'a' twice"),
        ({"image_test": _BYTES, "labels_test": _LABELS}, "has an array 'image_test'; did you mean 'images_test'"),
        ({"images": _BYTES.astype(bool)}, "must hold numbers"),
        ({"labels": _LABELS[:39]}, r"labels must have shape \(40,\)"),
        ({"labels": _LABELS * 1.0}, "labels must be integers"),
        ({"labels": _LABELS - 1}, "got -1"),
        ({"labels": _LABELS * 0}, "only one class"),
        ({"class_names": np.array(["a", "b", "c"])}, r"label 3 of example 3 is out of range 0 \.\. 2"),
        ({"images_test": _BYTES}, "has 'images_test' but no 'labels_test'"),
        ({"images_test": _BYTES[:, :4], "labels_test": _LABELS}, "3 x 6 x 5 but images_test are 3 x 4 x 5"),
        ({"images_test": _BYTES, "labels_test": _LABELS, "groups": _LABELS}, "no 'groups_test'"),
        ({"groups": _LABELS[:3]}, r"groups must have shape \(40,\)"),
    ],
)
def test_bad_npz(tmp_path: Path, change: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **({"images": _BYTES, "labels": _LABELS} | change))
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_other_arrays_are_left_alone_and_names_allow_gaps(tmp_path: Path) -> None:
    names = np.array(["a", "b", "c", "d", "e"])
    np.savez(tmp_path / "mine.npz", images=_BYTES, labels=_LABELS + 1, class_names=names, camera=np.arange(40))
    assert load_dataset(tmp_path / "mine.npz").num_classes == 5


def test_arrays_with_names_of_their_own_are_left_alone(tmp_path: Path) -> None:
    others = ("names", "classes", "filenames", "image_ids", "images_val", "labels_val", "labels_coarse", "groups_val")
    np.savez(tmp_path / "mine.npz", images=_BYTES, labels=_LABELS, image=_BYTES, **dict.fromkeys(others, np.arange(3)))
    assert load_dataset(tmp_path / "mine.npz").num_classes == 4


def _folder(root: Path, classes: tuple[str, ...] = ("cat", "dog"), count: int = 10, mode: str = "RGB") -> Path:
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.full((4, 6, 3), 20 * i + number, dtype=np.uint8)
            Image.fromarray(pixels).convert(mode).save(root / name / f"{i:02}.png")
    return root


def test_folder_of_class_folders(tmp_path: Path) -> None:
    _folder(tmp_path / "pets")
    (tmp_path / "pets" / "cat" / ".DS_Store").write_bytes(b"clutter")
    (tmp_path / "pets" / "Thumbs.db").write_bytes(b"clutter")
    data = load_dataset(tmp_path / "pets", validation_size=3, certification_size=3, test_size=4)
    assert (data.name, data.image_shape, data.class_names) == ("pets", (3, 4, 6), ("cat", "dog"))
    assert len(data.train) == 10
    for part in (data.train, data.test):
        assert torch.equal(part.labels, part.index // 10)
        assert torch.equal(part.images[:, 0, 0, 0].long(), 20 * (part.index % 10) + part.index // 10)


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    _folder(tmp_path / "pets", ("bus", "car", "train"))
    assert load_dataset(tmp_path / "pets").class_names == ("bus", "car", "train")


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    _folder(tmp_path / "train", mode="L")
    _folder(tmp_path / "test", count=3, mode="L")
    data = load_dataset(tmp_path)
    assert data.image_shape == (1, 4, 6)
    assert data.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(data.train) + len(data.validation) + len(data.certification) == 20


def _one_class(root: Path) -> Path:
    return _folder(root, ("cat",))


def _no_class(root: Path) -> Path:
    root.mkdir()
    return root


def _mixed_sizes(root: Path) -> Path:
    Image.new("RGB", (7, 4)).save(_folder(root) / "dog" / "07.png")
    return root / "dog" / "07.png"


def _grey_among_colour(root: Path) -> Path:
    Image.new("L", (6, 4)).save(_folder(root) / "dog" / "07.png")
    return root / "dog" / "07.png"


def _colour_among_grey(root: Path) -> Path:
    Image.new("RGB", (6, 4)).save(_folder(root, mode="L") / "cat" / "03.png")
    return root / "cat" / "03.png"


def _truncated(root: Path) -> Path:
    path = _folder(root) / "cat" / "04.png"
    Image.fromarray(_RNG.integers(0, 256, (4, 6, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:60])
    return path


def _no_image(root: Path) -> Path:
    path = _folder(root) / "cat" / "04.png"
    path.write_bytes(b"plain text")
    return path


def _foreign(root: Path) -> Path:
    path = _folder(root) / "cat" / "notes.txt"
    path.write_text("hello")
    return path


def _deep(root: Path) -> Path:
    path = _folder(root) / "cat" / "07.png"
    Image.fromarray(np.zeros((4, 6), dtype=np.uint16)).save(path)
    return path


def _empty_class(root: Path) -> Path:
    (_folder(root) / "bird").mkdir()
    return root / "bird"


def _other_split(root: Path) -> Path:
    _folder(root / "train")
    _folder(root / "val")
    return root


def _test_class_unknown(root: Path) -> Path:
    _folder(root / "train")
    _folder(root / "test", ("cat", "cow"))
    return root / "test" / "cow"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_one_class, "only one class folder, 'cat'"),
        (_no_class, "no class folders"),
        (_mixed_sizes, "7 x 4 pixels, but .*cat/00.png has 6 x 4"),
        (_grey_among_colour, "a grey image where colour is expected"),
        (_colour_among_grey, "a colour image where grey is expected"),
        (_truncated, "damaged or truncated image|cannot be read as an image"),
        (_no_image, "cannot be read as an image"),
        (_foreign, "not an image file"),
        (_deep, "images of mode 'I;16' are not read"),
        (_empty_class, "this class folder holds no images"),
        (_other_split, "holds train/ beside val/; expected train/ and test/"),
        (_test_class_unknown, "this class is not among those of"),
    ],
)
def test_bad_folders(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    culprit = make(tmp_path / "pets")
    with pytest.raises(DataError, match=message) as caught:
        load_dataset(tmp_path / "pets")
    assert str(caught.value).startswith(f"{culprit}: ")
    assert "\n" not in str(caught.value)
