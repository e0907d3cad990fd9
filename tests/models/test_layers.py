from __future__ import annotations

import pytest
import torch

from dale.errors import UsageError
from dale.models.layers import Normalise, make_activation, normalisation


def test_normalise_per_channel():
    layer = Normalise((0.5, 0.25), (0.25, 0.5))
    images = torch.tensor([0.75, 0.75]).view(1, 2, 1, 1).expand(3, 2, 4, 5)
    expected = torch.tensor([1.0, 1.0]).view(1, 2, 1, 1).expand(3, 2, 4, 5)
    assert torch.equal(layer(images), expected)
    assert set(layer.state_dict()) == {"mean", "std"}
    assert list(layer.parameters()) == []
    assert repr(layer) == "Normalise(mean=[0.5, 0.25], std=[0.25, 0.5])"


def test_known_and_unknown_statistics():
    assert normalisation(1, "mnist").mean.item() == pytest.approx(0.1307)
    assert normalisation(1, "mnist").std.item() == pytest.approx(0.3081)
    assert normalisation(3, "cifar10").mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])
    # grey images of a colour set, and sets that nobody measured
    for layer, channels in ((normalisation(1, "cifar10"), 1), (normalisation(4), 4), (normalisation(2, "mine"), 2)):
        assert layer.mean.flatten().tolist() == layer.std.flatten().tolist() == [0.5] * channels


def test_the_statistics_of_digits_are_those_of_the_data():
    datasets = pytest.importorskip("sklearn.datasets")
    images = torch.tensor(datasets.load_digits().images) / 16
    layer = normalisation(1, "digits")
    assert layer.mean.item() == pytest.approx(images.mean().item(), abs=5e-5)
    assert layer.std.item() == pytest.approx(images.std().item(), abs=5e-5)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.0,)), ((0.5,), (0.5, 0.5))])
def test_bad_constants(mean, std):
    with pytest.raises(UsageError, match="as many means as positive stds"):
        Normalise(mean, std)


def test_activations():
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(make_activation("relu")(x), torch.tensor([0.0, 2.0]))
    assert torch.equal(make_activation("silu")(x), x * torch.sigmoid(x))
    assert not getattr(make_activation("relu"), "inplace", False)
    with pytest.raises(UsageError, match="unknown activation 'rely'; did you mean 'relu'"):
        make_activation("rely")
