"""Data: embedded digits, official sets by name, the user's own; splits, batches and augmentation."""

from dale.data.augment import Augmentation, RandomCrop, RandomCropShift, RandomCutout, RandomFlip
from dale.data.load import DATASETS, load_dataset
from dale.data.loader import Loader
from dale.data.sheet import write_sheet
from dale.data.splits import Dataset, Split, split_dataset
from dale.data.strong import StrongAugment

__all__ = [
    "DATASETS",
    "Augmentation",
    "Dataset",
    "Loader",
    "RandomCrop",
    "RandomCropShift",
    "RandomCutout",
    "RandomFlip",
    "Split",
    "StrongAugment",
    "load_dataset",
    "split_dataset",
    "write_sheet",
]
