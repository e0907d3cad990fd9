from __future__ import annotations

import pytest
import torch
from torch import nn

from dale.errors import UsageError
from dale.modes import evaluating, frozen, sampling_mode


def mixed_model() -> nn.Module:
    """A model in train mode with one module that its owner keeps in eval mode."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 2)))
    model.train()
    model[1].eval()
    model[2].training = False  # the container alone: its children stay in train mode
    return model


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize(("mode", "inside"), [("eval", False), ("train", True)])
def test_sampling_mode_sets_and_restores_every_flag(mode, inside):
    model = mixed_model()
    before = flags(model)
    assert len(set(before)) == 2
    with sampling_mode(model, mode):
        assert flags(model) == [inside] * len(before)
    assert flags(model) == before


def test_keep_leaves_the_mode_alone():
    model = mixed_model()
    before = flags(model)
    with sampling_mode(model, "keep"):
        assert flags(model) == before
        model.eval()
    assert flags(model) == before


def test_evaluating_restores_after_an_exception():
    model = mixed_model()
    before = flags(model)
    with pytest.raises(KeyError, match="False, False"), evaluating(model):
        raise KeyError(flags(model))
    assert flags(model) == before


def test_evaluating_nests():
    model = mixed_model()
    before = flags(model)
    with evaluating(model):
        with sampling_mode(model, "train"):
            assert all(flags(model))
        assert not any(flags(model))
    assert flags(model) == before


class StaysInEval(nn.Module):
    """A feature extractor that overrides train(), as fine-tuning code does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 2)

    def train(self, mode: bool = True) -> StaysInEval:
        super().train(mode)
        self.norm.eval()
        return self


def test_a_model_that_overrides_train_is_respected_and_restored():
    model = StaysInEval().train()
    with sampling_mode(model, "train"):
        assert not model.norm.training
        assert model.head.training
    model.norm.training = True
    with evaluating(model):
        assert not any(flags(model))
    assert model.norm.training
    assert model.head.training


class FailsToSwitch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Dropout()

    def train(self, mode: bool = True) -> FailsToSwitch:
        self.part.train(mode)
        raise RuntimeError("half way")


def test_a_switch_that_fails_half_way_is_undone():
    model = FailsToSwitch()
    with pytest.raises(RuntimeError, match="half way"), evaluating(model):
        pass
    assert flags(model) == [True, True]


class Exported(nn.Module):
    """An exported program: its flags say nothing, and its mode cannot be changed."""

    def train(self, mode: bool = True) -> Exported:
        raise NotImplementedError("Calling train() is not supported yet.")


def test_a_program_whose_mode_is_fixed_is_taken_as_it_is():
    model = nn.Sequential(Exported(), nn.Dropout())
    with evaluating(model):
        assert not any(flags(model))  # what comes after it is not left in train mode
    assert flags(model) == [True, True, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript itself
def test_a_frozen_script_has_no_mode():
    model = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()))
    assert not hasattr(model, "training")
    for mode in ("eval", "train", "keep"):
        with sampling_mode(model, mode):
            assert model(torch.ones(1, 2)).shape == (1, 2)
    assert not hasattr(model, "training")


def test_a_model_in_the_wanted_mode_is_not_asked_again():
    model = FailsToSwitch()
    model.training = model.part.training = False
    with evaluating(model):
        assert not any(flags(model))


def test_unknown_mode_is_named():
    with pytest.raises(UsageError, match="did you mean 'eval'"), sampling_mode(nn.Linear(1, 1), "evel"):
        pass


def test_frozen_restores_each_flag_and_touches_no_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    model[1].weight.grad = torch.full((1, 3), 7.0)
    before = [p.requires_grad for p in model.parameters()]
    x = torch.ones(2, 3, requires_grad=True)
    with frozen(model):
        assert not any(p.requires_grad for p in model.parameters())
        model(x).sum().backward()
    assert [p.requires_grad for p in model.parameters()] == before
    assert x.grad is not None
    assert model[0].weight.grad is None
    assert torch.equal(model[1].weight.grad, torch.full((1, 3), 7.0))


def test_frozen_restores_after_an_exception():
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), frozen(model):
        raise KeyError
    assert all(p.requires_grad for p in model.parameters())
