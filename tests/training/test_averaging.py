"""The average against a loop by hand; BatchNorm statistics re-estimated; the collapse that it prevents."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import dale
from dale.errors import UsageError
from dale.files import read_tensors
from dale.training import SGD, Constant, Validation
from dale.training.averaging import AveragedModel, Averaging, live_batchnorm, reestimate_batchnorm


def test_the_average_against_a_loop_by_hand() -> None:
    model = nn.Linear(3, 2).double()
    average = AveragedModel(model, Averaging(decay=0.4))
    expected = model.weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 6):
        with torch.no_grad():
            model.weight.copy_(torch.randn(2, 3, generator=generator, dtype=torch.float64))
        average.update(model)
        decay = min(0.4, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * model.weight.detach()
        # torch rounds the weight of a fused lerp to single precision, also for doubles
        torch.testing.assert_close(average.module.weight.detach(), expected, rtol=1e-6, atol=1e-7)
    # 0.4 is reached at t = 5 and not before: both branches were taken
    assert (1 + 4) / (10 + 4) < 0.4 == (1 + 5) / (10 + 5)


def test_the_average_is_a_copy_without_gradients() -> None:
    model = nn.Linear(3, 2)
    average = AveragedModel(model, Averaging())
    before = average.module.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert torch.equal(average.module.weight, before)
    assert not any(p.requires_grad for p in average.module.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_decay_out_of_range_is_refused() -> None:
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(UsageError, match="decay lies in"):
            Averaging(decay=decay)


class _Normed(nn.Module):
    """A tiny residual network with BatchNorm and dropout."""

    def __init__(self, width: int = 8, num_classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width, momentum=0.2)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.first(x)))
        hidden = torch.relu(hidden + self.norm2(self.second(self.drop(hidden))))
        return self.head(hidden.mean(dim=(2, 3)))


class _Frozen(_Normed):
    """Its second layer of BatchNorm stays as it is, whatever mode the model is in: a usual way to fine-tune."""

    def train(self, mode: bool = True) -> _Frozen:
        super().train(mode)
        self.norm2.eval()
        return self


def test_statistics_that_training_leaves_alone_stay() -> None:
    torch.manual_seed(0)
    model = _Frozen().train()
    model.norm2.running_mean.fill_(0.5)
    model.norm2.running_var.fill_(0.02)
    before = {name: value.clone() for name, value in model.norm2.state_dict().items()}
    assert live_batchnorm(model) == [model.norm1]
    assert [m.training for m in (model, model.norm1, model.norm2)] == [True, True, False]
    reestimate_batchnorm(model, [lambda m: m(torch.rand(6, 1, 6, 6))])
    assert all(torch.equal(value, before[name]) for name, value in model.norm2.state_dict().items())
    assert model.norm1.num_batches_tracked == 1


def test_reestimated_statistics_equal_those_computed_by_hand() -> None:
    torch.manual_seed(0)
    model = _Normed().double()
    batches = [torch.rand(n, 1, 6, 6, dtype=torch.float64) for n in (4, 7, 5)]
    reestimate_batchnorm(model, [lambda m, x=x: m(x) for x in batches])
    assert not any(module.training for module in model.modules())
    assert (model.norm1.momentum, model.norm2.momentum) == (0.2, 0.1)
    means, variances = [], []
    with torch.no_grad():
        for x in batches:
            seen = model.first(x)
            means.append(seen.mean(dim=(0, 2, 3)))
            variances.append(seen.transpose(0, 1).flatten(1).var(dim=1))
    # the plain average over the batches, whatever was there before
    torch.testing.assert_close(model.norm1.running_mean, torch.stack(means).mean(dim=0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model.norm1.running_var, torch.stack(variances).mean(dim=0), rtol=1e-12, atol=0.0)
    # and dropout was off: a second time gives the same bits
    again = copy.deepcopy(model)
    reestimate_batchnorm(again, [lambda m, x=x: m(x) for x in batches])
    assert torch.equal(again.norm2.running_mean, model.norm2.running_mean)


def test_momentum_and_mode_are_put_back_when_a_batch_fails() -> None:
    model = _Normed()

    def fail(_: nn.Module) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        reestimate_batchnorm(model, [fail])
    assert (model.norm1.momentum, model.training) == (0.2, False)


def test_who_has_batchnorm() -> None:
    model = _Normed().eval()
    assert live_batchnorm(model) == [model.norm1, model.norm2]
    assert not any(module.training for module in model.modules())
    assert not live_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)))


@pytest.mark.parametrize("row", ["erm", "dale"])
def test_the_averaged_model_with_batchnorm_does_not_collapse(row: str, tmp_path: Path) -> None:
    data = dale.load_dataset("digits", train_size=512, validation_size=100)
    ball = dale.Linf(epsilon=0.05)
    objective = dale.algorithms.erm(ball) if row == "erm" else dale.algorithms.dale(ball, rho=0.5, steps=1)
    torch.manual_seed(0)
    run = dale.fit(
        _Normed(),
        objective,
        data,
        out=tmp_path / "run",
        progress=False,
        epochs=8,
        batch_size=32,
        optimiser=SGD(learning_rate=0.1),
        schedule=Constant(),
        averaging=Averaging(decay=0.98),
        validation=Validation(every=8, steps=1, examples=20),
    )
    # chance is a tenth: with statistics that do not belong to the averaged weights it was seen to end near there
    assert run.metrics()[-1]["validation"]["clean_accuracy"] > 0.7
    assert run.folder.newest is not None
    tensors, _ = read_tensors(run.folder.newest)
    # of its own: estimated over an eighth of an epoch of 16 batches, where the raw model has seen 8 epochs
    assert tensors["average/norm1.num_batches_tracked"] == 2
    assert tensors["model/norm1.num_batches_tracked"] == 128
    assert not torch.equal(tensors["average/norm1.running_var"], tensors["model/norm1.running_var"])
