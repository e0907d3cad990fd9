from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dale.errors import CheckpointError, UsageError
from dale.models import MODELS, ConvNet, create_model, save_weights


@dataclass
class Data:
    image_shape: tuple[int, int, int] = (1, 8, 8)
    num_classes: int = 10
    name: str = "digits"


def build(name: str, **options) -> nn.Module:
    return create_model(name, **{"channels": 3, "size": 8, "num_classes": 10, **options})


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_173_962),
        ("resnet34", 21_282_122),
        ("resnet50", 23_520_842),
        ("preact-resnet18", 11_171_146),
        ("wrn-28-10", 36_479_194),
        ("wrn-34-10", 46_160_474),
    ],
)
def test_parameter_counts_are_the_published_ones(name, count):
    with torch.device("meta"):  # the shapes without the work of filling them
        model = build(name, size=32)
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_papers_mnist_network():
    model = create_model("convnet", Data((1, 28, 28), 10, "mnist"))
    assert isinstance(model, ConvNet)
    assert sum(p.numel() for p in model.parameters()) == 1_199_882
    assert model.normalise.mean.item() == pytest.approx(0.1307)
    assert (model.dropout1.p, model.dropout2.p) == (0.25, 0.5)


def test_the_mnist_network_of_trades():
    model = create_model("smallcnn", Data((1, 28, 28), 10, "mnist"))
    assert sum(p.numel() for p in model.parameters()) == 312_202
    assert model.dropout.p == 0.5


def test_the_same_network_without_dropout_starts_from_the_same_weights():
    data = Data((1, 28, 28), 10, "mnist")
    for name in ("convnet", "smallcnn"):
        plain, dry = create_model(name, data, seed=3), create_model(f"{name}-nodropout", data, seed=3)
        rates = {m.p for m in dry.modules() if isinstance(m, nn.Dropout)}
        assert rates == {0.0}
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), dry.parameters(), strict=True))


SMALL = [name for name in MODELS if not name.startswith("wrn")]
LEAST = {"smallcnn": (17, 16), "smallcnn-nodropout": (17, 16)}  # it pools twice, after unpadded convolutions


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("name", SMALL)
def test_logits_gradients_and_memory_formats(name, activation):
    size = LEAST.get(name, (9, 8))
    model = create_model(name, Data((3, *size), 7, "own"), activation=activation).eval()
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logits = model(x)
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    (gradient,) = torch.autograd.grad(logits[:, 0].sum(), x)
    assert (gradient.flatten(1).abs().amax(1) > 0).all()
    with torch.no_grad():
        turned = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(turned, logits, rtol=1e-4, atol=1e-5)
        half = model.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
    assert any(isinstance(m, {"relu": nn.ReLU, "silu": nn.SiLU}[activation]) for m in model.modules())


@pytest.mark.parametrize("name", SMALL)
def test_training_and_tracing(name):
    size = LEAST.get(name, (8, 8))
    model = build(name, size=size)
    x = torch.rand(4, 3, *size, generator=torch.Generator().manual_seed(0))
    model.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.verify
@pytest.mark.parametrize("name", ["wrn-28-10", "wrn-34-10"])
def test_wide_networks_run(name):
    model = build(name, num_classes=100, activation="silu").eval()
    with torch.no_grad():
        logits = model(torch.rand(2, 3, 8, 8))
    assert logits.shape == (2, 100)
    assert logits.isfinite().all()


@pytest.mark.verify
def test_compiles_without_graph_breaks():
    explain = torch._dynamo.explain(build("resnet18").eval())(torch.rand(2, 3, 8, 8))
    assert explain.graph_break_count == 0


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    first = build("convnet", seed=3).state_dict()
    assert torch.equal(torch.rand(2), expected)  # the global numbers were not touched
    again, other = build("convnet", seed=3).state_dict(), build("convnet", seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_data_can_be_overridden_or_left_out():
    assert create_model("convnet", Data(), num_classes=3).fc2.out_features == 3
    assert create_model("convnet", Data(), size=(10, 12)).fc1.in_features == 64 * 3 * 4
    assert create_model("convnet", Data(), channels=3).normalise.mean.flatten().tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet-18", {}, "unknown model 'resnet-18'; did you mean 'resnet18'"),
        ("WRN-28-10", {}, "did you mean 'wrn-28-10'"),
        ("resnet18", {"activation": "rleu"}, "did you mean 'relu'"),
        ("resnet18", {"num_classes": None}, "needs the data, or all of"),
        ("resnet18", {"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ("resnet18", {"channels": 0}, "channels must be at least 1, got 0"),
        ("resnet18", {"size": 0}, "size must be at least 1, got 0"),
        ("convnet", {"size": 5}, "at least 6x6 pixels, got 5x5"),
        ("no_such_package.nets:Net", {}, "cannot import 'no_such_package.nets:Net'"),
    ],
)
def test_bad_requests(name, options, words):
    with pytest.raises(UsageError, match=words):
        build(name, **options)


class Recorder(nn.Module):
    """Remembers what it was called with."""

    def __init__(self, given: dict[str, object]) -> None:
        super().__init__()
        self.given, self.fc = given, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


@pytest.fixture
def users(monkeypatch):
    """A package of the user's, importable as `users_nets`."""
    module = types.ModuleType("users_nets")
    module.everything = lambda channels, size, num_classes, activation: Recorder(
        {"channels": channels, "size": size, "num_classes": num_classes, "activation": activation}
    )
    module.nothing = lambda: Recorder({})
    module.wide = lambda num_classes=1000, width=2: Recorder({"num_classes": num_classes, "width": width})
    module.hands_on = lambda weights=None, **kwargs: Recorder(kwargs)
    module.by_class = lambda num_classes, activation=nn.ReLU: Recorder({"activation": activation})
    module.needs_more = lambda num_classes, vocabulary, *args, **kwargs: Recorder({})
    module.breaks = lambda num_classes: Recorder(1 // 0)
    module.number = lambda: 3
    module.constant = 3
    module.instance = Recorder({})
    module.Recorder = Recorder
    monkeypatch.setitem(sys.modules, "users_nets", module)
    return module


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("everything", {"channels": 3, "size": (8, 9), "num_classes": 10, "activation": "relu"}),
        ("nothing", {}),
        ("wide", {"num_classes": 10, "width": 2}),
        ("hands_on", {"num_classes": 10}),
        ("by_class", {"activation": nn.ReLU}),
    ],
)
def test_a_users_model_is_called_with_what_it_names(name, given):
    assert build(f"users_nets:{name}", size=(8, 9)).given == given


@pytest.mark.usefixtures("users")
def test_a_users_model_gets_an_int_for_square_images_and_a_seed():
    first, again = build("users_nets:everything", seed=2), build("users_nets:everything", seed=2)
    assert first.given["size"] == 8
    assert torch.equal(first.fc.weight, again.fc.weight)


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("needs_more", {}, "needs vocabulary, and dale gives only"),
        ("Recorder", {}, "needs given"),
        ("breaks", {}, r"could not be built with \(num_classes=10\): ZeroDivisionError"),
        ("number", {}, "returned int, expected an nn.Module"),
        ("constant", {}, "must be an nn.Module class or a function that returns one, got 3"),
        ("instance", {}, "must be an nn.Module class or a function that returns one"),
        ("absent", {}, "cannot import 'users_nets:absent'"),
        ("nothing", {"activation": "silu"}, "takes no activation by name"),
        ("by_class", {"activation": "silu"}, "takes no activation by name"),
    ],
)
def test_a_users_model_that_cannot_be_built(name, options, words):
    with pytest.raises(UsageError, match=words):
        build(f"users_nets:{name}", **options)


def test_fine_tuning_starts_from_the_file(tmp_path):
    source = build("convnet", seed=1)
    save_weights(source, tmp_path / "w.safetensors")
    model = build("convnet", seed=2, init=tmp_path / "w.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), model.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"fc2.weight is 10x128, expected 5x128; fc2.bias is 10, expected 5"):
        build("convnet", num_classes=5, init=tmp_path / "w.safetensors")
