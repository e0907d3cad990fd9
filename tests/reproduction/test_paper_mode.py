"""Train mode, as the paper's code measured: an own copy of the model; the same numbers where the mode cannot matter."""

from __future__ import annotations

import torch
from torch import nn

from dale.data import Split
from dale.evaluation import evaluate
from dale.perturbations import Linf
from dale.reproduction import Spec
from dale.reproduction.paper_mode import train_mode_accuracies

SPEC = Spec("mnist", "convnet", "pgd", budget="smoke")


def split(count: int = 60) -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split.of(torch.rand(count, 1, 6, 6, generator=generator), torch.arange(count) % 2, 2)


def test_without_batchnorm_and_dropout_the_mode_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    found = train_mode_accuracies(model, split(), SPEC)["accuracies"]
    usual = evaluate(model, split(), Linf(epsilon=0.3), ["fgsm"], checks=False, progress=False)
    assert found["clean"]["correct"] == usual.clean.correct
    # an example that is wrong when clean stays wrong in an evaluation; here it may be right by accident
    assert found["fgsm"]["correct"] >= usual["fgsm"].accuracy.correct
    assert found["fgsm"]["correct"] <= found["clean"]["correct"]


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = train_mode_accuracies(model, split(), SPEC)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert train_mode_accuracies(model, split(), SPEC) == first  # dropout and starts are seeded
    assert "not comparable" in first["note"]
