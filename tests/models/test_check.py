from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from dale.errors import UsageError
from dale.models import check_model, create_model

SHAPE = (1, 8, 8)


class Base(nn.Module):
    """A sound model, for the faults below to spoil."""

    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(64, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1))


class ChangesInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5))


class InPlaceInside(Base):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x).exp()
        z += 1  # the backward pass of exp needs the value that this overwrites
        return z


class Softmax(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class BatchDependent(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class OrderDependent(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.arange(len(x)).view(-1, 1)


class RandomInEval(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class Quantised(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * 16).round())


class Detached(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class NotFinite(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.log())


class ReturnsTuple(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class ReturnsClasses(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).round().long()


class BranchesOnData(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() >= 0 else super().forward(-x)


class HasUnused(Base):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


class NothingToTrain(Base):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class TransientNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class ExtraState(Base):
    def get_extra_state(self) -> object:
        return {"not": "a tensor"}

    def set_extra_state(self, state: object) -> None:
        pass


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.fc


class RefusesOne(Base):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("too few images.\nmore about it")
        return super().forward(x)


class WaitsInTraining(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (max(float(x.detach().mean()), 1.0) if self.training else 1.0)


class OtherGradient(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = x.sigmoid()
        return super().forward(x * gate)


class _Once(torch.autograd.Function):
    """The backward pass of a compiled model gives its memory away: a graph serves once."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.used = False
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if ctx.used:
            raise RuntimeError("donated buffers")
        ctx.used = True
        return gradient


class GraphServesOnce(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Once.apply(x))


class AnswersInDouble(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class AnswersInHalf(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


class RoundsByPlace(Base):
    """As another order of summation does: it differs in the last digits that parameters in float32 have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double() * (1.0 + 1e-6 * torch.arange(len(x)).view(-1, 1))


class HalfDependent(Base):
    """One percent of its neighbours: less than half precision might compute, more than it rounds an output by."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 0.02 * x.mean(0, keepdim=True)).half()


class WorksOnce(Base):
    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "used"):
            raise RuntimeError("used up")
        self.used = True
        return super().forward(x)


class FailsInTraining(Base):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "check", "status", "words"),
    [
        (ChangesInput, "in-place", "fail", "changes its input in place"),
        (ChangesInput, "gradient", "fail", "an in-place operation"),
        (InPlaceInside, "gradient", "fail", "an in-place operation"),
        (Softmax, "logits", "warn", "leave out the final softmax"),
        (BatchDependent, "batch", "fail", "depend on the rest of the batch"),
        (OrderDependent, "batch", "fail", "depend on the rest of the batch"),
        (TransientNorm, "batch", "fail", "without running statistics"),
        (TransientNorm, "batchnorm", "warn", "1 of 1 BatchNorm layers keep no statistics"),
        (RefusesOne, "batch", "fail", "ValueError: too few images."),
        (RandomInEval, "determinism", "fail", "it is random"),
        (WorksOnce, "determinism", "fail", "RuntimeError: used up"),
        (RandomInEval, "gradient", "ok", "reach the input"),
        (Quantised, "gradient", "fail", "zero everywhere"),
        (Detached, "gradient", "fail", "does not reach the input"),
        (NotFinite, "output", "fail", "not finite"),
        (ReturnsTuple, "output", "fail", "is a tuple"),
        (ReturnsClasses, "output", "fail", "torch.int64"),
        (lambda: Base(4), "output", "fail", r"shape \(4, 4\), expected \(4, 3\)"),
        (lambda: nn.Conv2d(3, 3, 3), "output", "fail", r"shape \(4, 1, 8, 8\) in \[0, 1\] are refused: RuntimeError"),
        (BranchesOnData, "traceable", "warn", "^The fast path stays off"),
        (OtherGradient, "traceable", "warn", "^The fast path stays off: .* another gradient"),
        (WaitsInTraining, "traceable", "warn", "^On a GPU the fast path stays off: .* waited for"),
        (BranchesOnData, "gradient", "ok", "reach the input"),
        (GraphServesOnce, "gradient", "ok", "reach the input"),
        (AnswersInDouble, "batch", "ok", "do not depend"),
        (AnswersInHalf, "batch", "ok", "do not depend"),
        (RoundsByPlace, "batch", "ok", "do not depend"),
        (HalfDependent, "batch", "fail", "depend on the rest of the batch"),
        (HasUnused, "training", "warn", "2 parameters have no part in the output, first extra.weight"),
        (NothingToTrain, "training", "fail", "nothing to train"),
        (FailsInTraining, "training", "fail", "fails: RuntimeError"),
        (ExtraState, "weights", "fail", "_extra_state"),
        (Tied, "weights", "ok", "4 tensors"),
    ],
)
def test_each_fault_is_found_by_its_check(make, check, status, words):
    report = check_model(make(), SHAPE, 3)
    found = report[check]
    assert found.status == status, str(report)
    assert re.search(words, found.message), found.message
    assert found.message.count("\n") == 0
    assert report.ok == all(c.status != "fail" for c in report.checks)


@pytest.mark.parametrize("name", ["convnet", "resnet18", "preact-resnet18"])
def test_built_in_models_pass_every_check(name):
    model = create_model(name, channels=1, size=8, num_classes=3)
    report = check_model(model, SHAPE, 3)
    assert report.ok
    assert {check.status for check in report.checks} == {"ok"}, str(report)
    assert [check.name for check in report.checks] == [
        "output",
        "logits",
        "in-place",
        "gradient",
        "determinism",
        "batch",
        "traceable",
        "batchnorm",
        "dropout",
        "weights",
        "training",
    ]


def test_layers_are_counted():
    report = check_model(create_model("resnet18", channels=1, size=8, num_classes=3), SHAPE, 3)
    assert report["batchnorm"].message.startswith("20 BatchNorm layers")
    report = check_model(create_model("convnet", channels=1, size=8, num_classes=3), SHAPE, 3)
    assert report["batchnorm"].message.startswith("No BatchNorm")
    assert report["dropout"].message.startswith("2 dropout layers")


def test_the_table_can_be_read():
    text = str(check_model(Softmax(), SHAPE, 3))
    lines = text.splitlines()
    assert lines[0] == "Softmax for 1x8x8 images and 3 classes"
    assert "  warn  logits       The output looks like probabilities; leave out the final softmax." in lines
    assert lines[-1] == "ready for robust training: 0 failed, 1 warned, 11 checked"
    assert "not ready for robust training: 1 failed" in str(check_model(NotFinite(), SHAPE, 3))


class Counts(Base):
    """Replaces a buffer by another tensor in every pass, next to BatchNorm, which writes into its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return super().forward(self.norm(x))


def test_the_model_comes_back_as_it_was():
    model = Counts().train()
    model.norm.eval()
    model.fc.weight.grad = torch.ones(3, 64)
    passes = model.passes
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.no_grad():
        assert check_model(model, SHAPE, 3).ok
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    assert model.fc.training
    assert not model.norm.training
    assert model.passes is passes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.fc.weight.grad, torch.ones(3, 64))
    assert model.fc.bias.grad is None
    assert model.norm.weight.grad is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript itself
def test_a_scripted_model_comes_back_as_it_was():
    """The buffers of TorchScript modules are not kept in a dictionary of Python's."""
    model = torch.jit.script(nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 3)))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert check_model(model, SHAPE, 3).ok
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_models_that_cannot_be_looked_at_are_refused():
    with pytest.raises(UsageError, match=r"fc.weight is on meta; move it with model.to\('cpu'\)"):
        check_model(Base().to("meta"), SHAPE, 3)
    with pytest.raises(UsageError, match="has no shape yet"):
        check_model(nn.Sequential(nn.Flatten(), nn.LazyLinear(3)), SHAPE, 3)
