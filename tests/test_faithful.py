"""What a replica cannot stand for is refused, with a reason; what it can is not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dale import algorithms, random
from dale.batch import Batch
from dale.faithful import unfaithful
from dale.folded import Copied, FoldedConv
from dale.folding import Replica, replicate
from dale.models import create_model
from dale.perturbations import Linf
from dale.training.fast import CapturedStep, FastStep, make_step
from dale.training.steps import PlainStep

SHAPE = (3, 12, 12)
CPU = torch.device("cpu")


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return F.conv2d(x, weight / weight.std(), self.bias, padding=1)


class Masked(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * (weight > 0), bias)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Frozen(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(True)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.lock = threading.Lock()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        tokens = h.flatten(2).transpose(1, 2)
        mixed = self.attention(tokens, tokens, value=tokens, need_weights=False)[0]
        return mixed.transpose(1, 2).unflatten(2, h.shape[2:])


class Net(nn.Module):
    """Two convolutions, with what lies between them and the linear layer given by name."""

    def __init__(self, kind: str, first: nn.Module | None = None, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.first = first or nn.Conv2d(3, 8, 3, padding=1)
        self.norm = norm or nn.BatchNorm2d(8)
        self.relu, self.in_place = nn.ReLU(), nn.ReLU(inplace=True)
        self.second, self.point = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 10)
        if kind == "attention":
            self.attention = Attention()
        if kind == "locked":
            self.locked = Locked()
        if kind == "view":
            self.fc = nn.Linear(8 * 12 * 12, 10)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:  # noqa: PLR0912
        h = self.norm(self.first(x))
        match self.kind:
            case "in place":
                h.mul_(-1.0)
            case "in place, layer":
                self.in_place(h)
            case "in place, function":
                F.relu(h, inplace=True)
            case "alpha":
                h = self.relu(torch.add(self.second(h), self.point(h), alpha=0.1))
            case "twice":
                h = self.second(h)
                h = self.relu(h + h)
            case "by name":
                h = self.relu(input=self.second(input=h))
            case "broadcast":
                h = self.relu(self.second(h) + self.point(self.pool(h)))
            case "straight":
                h = Straight.apply(h)
            case "no gradient":
                with torch.no_grad():
                    gate = h.sigmoid()
                h = h * gate
            case "attention":
                h = self.attention(h)
            case "locked":
                h = self.locked(h.mean(dim=(2, 3)))[:, :, None, None]
            case "view":
                return self.fc(h.view(len(h), -1))  # type: ignore[no-any-return]
            case "float":
                h = self.relu(self.second(h.float()))
            case "reassigned":
                if self.training:
                    self.seen = 0.9 * self.seen + h.detach().mean(dim=(0, 2, 3))
            case "reads" if self.training:
                h = h * max(float(h.detach().mean()), 0.1)
            case "counts" if self.training:
                h = h - h[h > 0].mean()
        return self.fc(self.relu(h).mean(dim=(2, 3)))  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    model = Net("plain")
    model.norm.register_forward_hook(lambda module, given, out: out * 2)
    return model


def prepared() -> nn.Module:
    model = Net("plain")
    model.register_forward_pre_hook(lambda module, given: (given[0] - 0.5,))
    return model


def renewed() -> nn.Module:
    return Net("plain", nn.utils.weight_norm(nn.Conv2d(3, 8, 3, padding=1)))


def batch(size: int = 8) -> Batch:
    images = torch.rand(size, *SHAPE, generator=torch.Generator().manual_seed(0))
    return Batch.of(images, torch.arange(size) % 10)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Net("plain", norm=Frozen(8)), "norm stays in training mode"),
        (hooked, "norm has a hook"),
        (prepared, "the model has a hook"),
        (renewed, "first has a hook"),
        (lambda: Net("straight"), "another gradient"),
        (lambda: Net("no gradient"), "another gradient"),
        (lambda: Net("broadcast"), "cannot run"),
        (lambda: Net("locked"), "cannot be tried out"),
        (lambda: Net("view"), "view size"),
    ],
)
def test_what_its_replica_cannot_stand_for_takes_the_plain_path_and_says_why(make: Any, reason: str) -> None:
    model = make()
    flags = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step, line = make_step(model, SHAPE, algorithms.pgd(Linf(epsilon=0.1)), torch.float32, CPU, "on")
    assert type(step) is PlainStep
    assert reason in line
    # nothing of the model changed, its memory layout neither
    assert flags == [module.training for module in model.modules()]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.is_contiguous() for parameter in model.parameters())


FAITHFUL = [
    lambda: Net("plain"),
    lambda: Net("plain", Standardised(3, 8, 3)),
    lambda: Net("plain", Masked(3, 8, 3, padding=1)),
    lambda: Net("plain", norm=Activated(8)),
    lambda: Net("in place"),
    lambda: Net("in place, layer"),
    lambda: Net("in place, function"),
    lambda: Net("alpha"),
    lambda: Net("twice"),
    lambda: Net("by name"),
    lambda: Net("attention"),
    lambda: Net("float"),
    lambda: Net("plain", parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, padding=1))),
    lambda: Net("plain", parametrizations.weight_norm(nn.Conv2d(3, 8, 3, padding=1))),
    lambda: create_model("preact-resnet18", channels=3, size=12, num_classes=10),
    lambda: create_model("smallcnn", channels=3, size=28, num_classes=10),
]


@pytest.mark.parametrize("make", FAITHFUL)
def test_the_replica_of_an_unusual_model_computes_what_the_model_does(make: Any) -> None:
    """Before and after its weights have changed; looking at it changes nothing of the model."""
    model = make()
    shape = (
        (3, 28, 28)
        if not isinstance(model, Net) and any(isinstance(m, nn.MaxPool2d) for m in model.modules())
        else SHAPE
    )
    assert unfaithful(model, shape, captured=True) is None
    model.train()
    replica = replicate(model, channels_last=True)
    assert isinstance(replica, Replica)
    for scale in (1.0, 0.7):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        replica.refresh()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
        model.eval()
        ours, theirs = replica(x), model(x)
        model.train()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.detach().abs().max()))
        slopes = [torch.autograd.grad(out.square().sum(), x)[0] for out in (ours, theirs)]
        assert float((slopes[0] - slopes[1]).norm()) <= 1e-3 * float(slopes[1].norm())


def test_only_layers_of_torch_itself_are_folded() -> None:
    def kinds(model: nn.Module) -> list[type[nn.Module]]:
        replica = replicate(model)
        assert isinstance(replica, Replica)
        return [type(part) for part in replica.parts]

    assert kinds(Net("plain"))[0] is FoldedConv
    assert kinds(Net("plain", Standardised(3, 8, 3)))[0] is Copied
    assert kinds(Net("plain", norm=Activated(8)))[:2] == [FoldedConv, Copied]


def test_a_model_may_ask_for_another_precision_in_between() -> None:
    model = Net("float")
    replica = replicate(model, dtype=torch.bfloat16, channels_last=True)
    assert isinstance(replica, Replica)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = replica(batch().images)
    with torch.no_grad():
        expected = model.eval()(batch().images)
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Net("reads"), "reads a number from a tensor"),
        (lambda: Net("counts"), "reads a number from a tensor"),
        (lambda: Net("plain", norm=nn.BatchNorm2d(8, momentum=None)), "reads a number from a tensor"),
        (lambda: Net("reassigned"), "its buffer seen"),
    ],
)
def test_what_a_graph_cannot_repeat_is_not_captured(make: Any, reason: str) -> None:
    objective = algorithms.pgd(Linf(epsilon=0.1))
    step, line = make_step(make(), SHAPE, objective, torch.float32, torch.device("cuda"), "auto", 10)
    assert type(step) is PlainStep
    assert reason in line
    assert unfaithful(make(), SHAPE) is None  # a CPU repeats nothing
    step, line = make_step(make(), SHAPE, objective, torch.float32, CPU, "on")
    assert isinstance(step, FastStep)
    assert not isinstance(step, CapturedStep)


def test_trying_out_draws_no_random_number_of_the_program() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(432, 10))
    state = torch.random.get_rng_state()
    assert unfaithful(model, SHAPE, captured=True) is None
    assert torch.equal(state, torch.random.get_rng_state())


def test_perturbations_of_a_standardised_network_fool_the_network_itself() -> None:
    """The fast path used to attack another network than the one that is trained."""
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 10))
    losses = []
    for fast in ("off", "on"):
        step, _ = make_step(model, SHAPE, algorithms.pgd(Linf(epsilon=0.1), steps=5), torch.float32, CPU, fast)  # type: ignore[arg-type]
        delta = step.perturb(model, batch(64), random.key(0))
        assert delta is not None
        with torch.no_grad():
            losses.append(float(F.cross_entropy(model.eval()(batch(64).images + delta[0]), batch(64).labels)))
        model.train()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
