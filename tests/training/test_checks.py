"""What is said of a run's model and data before it begins; what is refused, before anything is written: test_fit.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dale
from dale.data import Split, split_dataset
from dale.training.checks import remarks


class _Linear(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))


def test_outputs_that_are_never_right_are_said() -> None:
    (line,) = remarks(_Linear(12), dale.load_dataset("digits"))
    assert line == "the model has 12 outputs for 10 classes: 2 are never right"


def test_classes_without_an_example_are_said() -> None:
    labels = torch.tensor([0, 2, 7] * 20)
    images = torch.zeros(60, 1, 8, 8, dtype=torch.uint8)
    gaps = split_dataset("gaps", Split.of(images, labels, 8), validation_size=10, certification_size=1, test_size=10)
    (line,) = remarks(_Linear(8), gaps)
    assert line == "5 of 8 classes have no training example: 1, 3, 4, 5, 6; labels count from 0"
    assert remarks(_Linear(10), dale.load_dataset("digits")) == []


def test_a_model_that_only_the_program_knows_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dale.load_dataset("digits")
    monkeypatch.setattr(_Linear, "__module__", "__main__")
    (line,) = remarks(_Linear(10), data)
    assert line.startswith("_Linear is defined in the program itself")
