from __future__ import annotations

from pathlib import Path

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from PIL import Image

from dale import random
from dale.components import dump_yaml, load_yaml
from dale.data import (
    Augmentation,
    RandomCrop,
    RandomCropShift,
    RandomCutout,
    RandomFlip,
    StrongAugment,
    write_sheet,
)
from dale.data.strong import OPERATIONS
from dale.errors import DataError, UsageError

_KEY = random.key(5)
_ALL = [
    RandomCrop(padding=2),
    RandomCrop(padding=5),
    RandomCropShift(strength=4),
    RandomFlip(),
    RandomCutout(size=3),
    StrongAugment(),
]


@pytest.mark.parametrize("augmentation", _ALL, ids=repr)
@pytest.mark.parametrize("channels", [1, 3])
def test_contract(augmentation: Augmentation, channels: int) -> None:
    images = torch.rand(30, channels, 9, 7)
    kept = images.clone()
    index = torch.arange(100, 130)
    out = augmentation(images, _KEY, index)
    assert torch.equal(images, kept)
    assert out.shape == images.shape
    assert out.dtype == images.dtype
    assert out.min() >= 0
    assert out.max() <= 1
    assert torch.equal(out, augmentation(images, _KEY, index))
    pieces = [augmentation(images[a:b], _KEY, index[a:b]) for a, b in ((0, 1), (1, 20), (20, 30))]
    assert torch.equal(out, torch.cat(pieces))
    shuffled = torch.randperm(30)
    assert torch.equal(out[shuffled], augmentation(images[shuffled], _KEY, index[shuffled]))
    assert torch.equal(out, augmentation(images.to(memory_format=torch.channels_last), _KEY, index))
    assert not torch.equal(out, augmentation(images, random.key(6), index))
    assert load_yaml(dump_yaml(augmentation), Augmentation) == augmentation


@pytest.mark.parametrize("augmentation", [a for a in _ALL if a.moves_only], ids=repr)
def test_moving_bytes_equals_moving_floats(augmentation: Augmentation) -> None:
    stored = torch.randint(0, 256, (30, 3, 9, 7), dtype=torch.uint8)
    index = torch.arange(30)
    numbers = augmentation.draw(_KEY, index)
    assert torch.equal(augmentation.apply(stored.clone(), numbers) / 255, augmentation(stored / 255, _KEY, index))


@pytest.mark.parametrize("augmentation", [a for a in _ALL if a.moves_only], ids=repr)
@pytest.mark.parametrize("count", [1, 2, 40])
def test_gathering_is_selecting_and_applying(augmentation: Augmentation, count: int) -> None:
    stored = torch.randint(0, 256, (count, 3, 9, 7), dtype=torch.uint8)
    kept = stored.clone()
    places = torch.randint(0, count, (300,))  # first and last images among them, whose shifts reach over the ends
    numbers = augmentation.draw(_KEY, torch.arange(300))
    for source in (stored, stored.to(memory_format=torch.channels_last), stored / 255):
        expected = augmentation.apply(source[places].contiguous(), numbers)
        assert torch.equal(augmentation.gather(source, places, numbers), expected)
    assert torch.equal(stored, kept)


@pytest.mark.parametrize(("padding", "height", "width"), [(4, 8, 6), (1, 3, 2), (9, 8, 6), (30, 20, 16)])
def test_crop_against_padding_and_slicing_by_hand(padding: int, height: int, width: int) -> None:
    images = torch.rand(100, 3, height, width)
    crop = RandomCrop(padding=padding)
    offsets = crop.draw(_KEY, torch.arange(100))
    out = crop.apply(images.clone(), offsets)
    padded = F.pad(images, (padding,) * 4)
    for i, (row, column) in enumerate(offsets.tolist()):
        assert torch.equal(out[i], padded[i, :, row : row + height, column : column + width])


def test_crop_offsets_are_uniform() -> None:
    offsets = RandomCrop(padding=4).draw(_KEY, torch.arange(20_000))
    counts = torch.bincount(offsets[:, 0] * 9 + offsets[:, 1], minlength=81)
    assert len(counts) == 81
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 0.001
    # and they differ from epoch to epoch
    again = RandomCrop(padding=4).draw(_KEY.fold(1), torch.arange(20_000))
    assert 0.005 < (offsets == again).all(dim=1).double().mean() < 0.02


@pytest.mark.parametrize(("strength", "height", "width"), [(1, 8, 6), (5, 6, 8), (6, 7, 9)])
def test_crop_shift_against_cutting_and_pasting_by_hand(strength: int, height: int, width: int) -> None:
    images = torch.rand(300, 3, height, width)
    shift = RandomCropShift(strength=strength)
    numbers = shift.draw(_KEY, torch.arange(300))
    out = shift.apply(images.clone(), numbers)
    for i, ((rows, top, down), (columns, left, right)) in enumerate(numbers.tolist()):
        assert 0 <= top <= rows
        assert 0 <= down <= rows
        assert 0 <= left <= columns
        assert 0 <= right <= columns
        assert rows + columns <= strength
        expected, kept = torch.zeros(3, height, width), (height - rows, width - columns)
        window = images[i, :, top : top + kept[0], left : left + kept[1]]
        expected[:, down : down + kept[0], right : right + kept[1]] = window
        assert torch.equal(out[i], expected)


def test_crop_shift_draws_what_it_says() -> None:
    numbers = RandomCropShift(strength=3).draw(_KEY, torch.arange(40_000))
    total = numbers[:, :, 0].sum(dim=1)
    assert scipy.stats.chisquare(torch.bincount(total, minlength=4).numpy()).pvalue > 0.001
    rows = numbers[total == 3, 0]
    assert scipy.stats.chisquare(torch.bincount(rows[:, 0], minlength=4).numpy()).pvalue > 0.001
    # rows and columns lose alike, and where a window comes from says nothing about where it goes
    places = numbers[(total == 2) & (numbers[:, 1, 0] == 1)]
    corners = ((places[..., 1] * 2 + places[..., 2]) * torch.tensor([4, 1])).sum(dim=1)
    assert scipy.stats.chisquare(torch.bincount(corners, minlength=16).numpy()).pvalue > 0.001


def test_flip_is_a_fair_coin() -> None:
    images = torch.arange(6.0).view(1, 1, 1, 6).expand(20_000, -1, -1, -1) / 6
    out = RandomFlip()(images, _KEY, torch.arange(20_000))
    flipped = (out[:, 0, 0, 0] > out[:, 0, 0, 5]).long()
    assert torch.equal(torch.where(flipped.view(-1, 1, 1, 1) == 1, images.flip(3), images), out)
    assert scipy.stats.binomtest(int(flipped.sum()), 20_000).pvalue > 0.001


def test_cutout_blackens_one_square_around_every_pixel_alike() -> None:
    out = RandomCutout(size=3)(torch.ones(5000, 2, 6, 6), _KEY, torch.arange(5000))
    black = (out == 0).float()
    assert torch.equal(black[:, 0], black[:, 1])
    areas = set(black[:, 0].sum(dim=(1, 2)).long().tolist())
    assert areas == {4, 6, 9}
    assert (out[black == 0] == 1).all()
    inner = black[:, 0, 1:5, 1:5].mean(dim=0)  # an inner pixel is hit by 9 of 36 centres
    assert (inner - 9 / 36).abs().max() < 0.03


def test_strong_augmentation_uses_every_operation_and_leaves_identity_alone() -> None:
    strong = StrongAugment(num_operations=1)
    images = torch.rand(600, 3, 8, 8)
    index = torch.arange(600)
    choice = (strong.draw(_KEY, index)[:, 0, 0] * len(OPERATIONS)).long()
    counts = torch.bincount(choice, minlength=len(OPERATIONS))
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 0.001
    out = strong(images, _KEY, index)
    same = (out == images).flatten(1).all(dim=1)
    assert same[choice == OPERATIONS.index("identity")].all()
    for name in OPERATIONS[1:]:
        assert not same[choice == OPERATIONS.index(name)].all(), name


def _strong(name: str, magnitude: float, images: torch.Tensor) -> torch.Tensor:
    numbers = torch.tensor([(OPERATIONS.index(name) + 0.5) / len(OPERATIONS), (magnitude + 1) / 2])
    return StrongAugment(num_operations=1).apply(images, numbers.expand(len(images), 1, 2))


def test_strong_operations_worked_out_by_hand() -> None:
    images = torch.rand(2, 3, 10, 10) * 0.5 + 0.2
    brighter = _strong("brightness", 0.5, images)
    torch.testing.assert_close(brighter, (images * 1.45).clamp(0, 1))
    stretched = _strong("autocontrast", 0.3, images)
    assert torch.equal(stretched.amin(dim=(2, 3)), torch.zeros(2, 3))
    torch.testing.assert_close(stretched.amax(dim=(2, 3)), torch.ones(2, 3))
    solarised = _strong("solarise", -0.5, images)
    torch.testing.assert_close(solarised, torch.where(images >= 0.5, 1 - images, images))
    shifted = _strong("translate_x", 1.0, images)  # 0.3 of 10 pixels: three
    torch.testing.assert_close(shifted, F.pad(images[..., 3:], (0, 3)))
    levels = (_strong("posterise", 1.0, torch.arange(256.0).view(1, 1, 16, 16) / 255) * 255).round().unique()
    assert levels.tolist() == [16.0 * k for k in range(16)]
    grey = images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    torch.testing.assert_close(_strong("saturation", 0.7, grey), grey)
    flat = torch.full((1, 3, 8, 8), 0.4)
    for name in ("contrast", "sharpness"):
        torch.testing.assert_close(_strong(name, 0.9, flat), flat)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(padding=0), "padding must be at least 1"),
        (lambda: RandomCropShift(strength=0), "strength must be at least 1"),
        (lambda: RandomCropShift(strength=7)(torch.rand(1, 1, 9, 7), _KEY, torch.arange(1)), "at most 6"),
        (lambda: RandomCutout(size=0), "size must be at least 1"),
        (lambda: StrongAugment(num_operations=0), "num_operations must be at least 1"),
        (lambda: StrongAugment(strength=1.5), "strength must be in"),
        (lambda: RandomCutout(size=9)(torch.rand(1, 1, 8, 8), _KEY, torch.arange(1)), "larger than the images"),
    ],
)
def test_bad_settings(make: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()  # type: ignore[operator]


def test_sheet(tmp_path: Path) -> None:
    images = torch.rand(5, 3, 16, 16)
    path = write_sheet(images, tmp_path / "new" / "sheet.png", columns=3)
    with Image.open(path) as sheet:
        assert sheet.size == (3 * 66, 2 * 66)
        assert sheet.getpixel((0, 0)) == (128, 128, 128)
        expected = tuple((images[4, :, 0, 0] * 255).round().long().tolist())
        assert sheet.getpixel((66 + 1, 66 + 1)) == expected
    assert [p.name for p in path.parent.iterdir()] == ["sheet.png"]
    with Image.open(write_sheet(torch.rand(2, 1, 8, 8), tmp_path / "grey.png")) as sheet:
        assert sheet.size == (2 * 66, 66)
    with pytest.raises(UsageError, match="1 or 3 channels"):
        write_sheet(torch.rand(2, 2, 8, 8), tmp_path / "no.png")
    with pytest.raises(DataError, match="cannot be written"):
        write_sheet(images, path / "below" / "a-file.png")
