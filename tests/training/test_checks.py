"""What is said of a run's model and data before it begins; what is refused, before anything is written: test_fit.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dale
from dale.data import Split, split_dataset
from dale.training.checks import empty, homeless


def test_classes_without_an_example_are_said() -> None:
    labels = torch.tensor([0, 2, 7] * 20)
    images = torch.zeros(60, 1, 8, 8, dtype=torch.uint8)
    gaps = split_dataset("gaps", Split.of(images, labels, 8), validation_size=10, certification_size=1, test_size=10)
    (line,) = empty(gaps)
    assert line == "5 of 8 classes have no training example: 1, 3, 4, 5, 6; labels count from 0"
    assert empty(dale.load_dataset("digits")) == []


def test_a_model_that_only_the_program_knows_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Sequential):
        pass

    assert homeless(Net()) == []
    monkeypatch.setattr(Net, "__module__", "__main__")
    (line,) = homeless(Net())
    assert line.startswith("Net is defined in the program itself")
