"""Each alarm rings for the model it was made for, and not for an honest one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dale.data import Split
from dale.evaluation import Alarm, Evaluation, evaluate
from dale.evaluation.alarms import _noise, _steps
from dale.evaluation.judge import Expected
from dale.perturbations import Linf, Rotation

BALL = Linf(epsilon=0.15)
Victim = tuple[nn.Module, Split]


def alarms(model: nn.Module, split: Split, *attacks: str) -> tuple[Evaluation, dict[str, Alarm]]:
    e = evaluate(model, split.first(200), BALL, attacks or ["pgd10"], progress=False)
    return e, {alarm.name: alarm for alarm in e.alarms}


def test_an_honest_model_raises_none(victim: Victim) -> None:
    e, seen = alarms(*victim)
    names = ["deterministic", "batch", "finite gradients", "gradients", "more steps", "noise", "black box"]
    assert list(seen) == [*names, "large epsilon"]
    assert not e.warnings, e.warnings
    assert "8 of 8 passed" in str(e)


class Staircase(nn.Module):
    """Images in a few grey levels before the network: no gradient anywhere, and hardly more robust."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x * 8).round() / 8)


def test_masked_gradients(victim: Victim) -> None:
    e, seen = alarms(Staircase(victim[0]), victim[1])
    assert not seen["gradients"].passed
    assert "blind" in seen["gradients"].message
    assert not seen["black box"].passed
    assert not seen["large epsilon"].passed
    assert "warning: gradients" in str(e)


class CutOff(nn.Module):
    """No graph at all leads from the logits to the images."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "argmax":
            return nn.functional.one_hot(self.model(x).argmax(dim=1), 10)
        with torch.set_grad_enabled(self.how != "no_grad"):
            return self.model(x.detach())


@pytest.mark.parametrize("how", ["no_grad", "detach", "argmax"])
def test_a_model_without_a_backward_pass_is_told_by_the_alarm(victim: Victim, how: str) -> None:
    model, split = CutOff(victim[0], how), victim[1].first(40)
    attacks = ["fgsm", "pgd3", "apgd5-ce", "apgd5-t", "fab5-t", "square200", "transfer:other"]
    e = evaluate(model, split, BALL, attacks, sources={"other": model}, epsilons=[0.1], progress=False)
    alarm = {alarm.name: alarm for alarm in e.alarms}["gradients"]
    assert not alarm.passed
    assert alarm.message.startswith(f"{e.clean.correct} of {e.clean.correct} examples have a gradient that is zero")
    assert e["fgsm"].accuracy == e.clean
    assert how == "argmax" or e["square200"].accuracy.value < e.clean.value  # classes show no way to a search either


class Broken(nn.Module):
    """The same logits, but the backward pass gives NaN for images whose mean exceeds a level."""

    def __init__(self, model: nn.Module, level: float) -> None:
        super().__init__()
        self.model, self.level = model, level

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        mean = x.flatten(1).mean(dim=1, keepdim=True)
        fine = mean * (mean.detach() <= self.level)
        return logits + 0.0 * fine.square().sqrt()  # |fine|: zero times infinity in the backward pass, where it is 0


def test_gradients_that_are_not_finite_are_counted(victim: Victim) -> None:
    split = victim[1].first(200)
    level = split.convert(split.images).flatten(1).mean(dim=1).median().item()
    e, seen = alarms(Broken(victim[0], level), split, "pgd10", "noise")
    assert 100 <= e["pgd10"].blind < 200
    assert e["noise"].blind == 0
    alarm = seen["finite gradients"]
    assert not alarm.passed
    standing = int((e.examples["pgd10"]).sum())
    count = int(alarm.message.split("(")[1].split(" under pgd10")[0])
    assert 0 < count <= min(standing, e["pgd10"].blind)
    assert f"warning: finite gradients: {alarm.message}" in str(e)
    quiet = evaluate(Broken(victim[0], level), split, BALL, ["pgd10"], progress=False, checks=False)
    assert any("not finite" in note for note in quiet.notes)  # said even without the checks


class Dropping(nn.Module):
    """Dropout that stays on in eval mode."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(nn.functional.dropout(x, 0.3, training=True))


def test_a_random_model_gets_its_expectation_and_a_note(victim: Victim) -> None:
    state = torch.get_rng_state()
    split = victim[1].first(40)
    e, seen = alarms(Dropping(victim[0]), split)
    assert not seen["deterministic"].passed
    assert "random" in e.notes[0]
    again, _ = alarms(Dropping(victim[0]), split)
    assert torch.equal(e.examples["pgd10"], again.examples["pgd10"])
    assert e["pgd10"].accuracy.value < e.clean.value
    assert torch.equal(torch.get_rng_state(), state)


class Together(nn.Module):
    """Images less the mean of their batch, as a normalisation by the batch's own statistics does it."""

    def __init__(self, model: nn.Module, share: float) -> None:
        super().__init__()
        self.model, self.share = model, share

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x - self.share * (x.mean(dim=0) - 0.3))


class InRow(nn.Module):
    """A logit that depends on the image's place in the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) + torch.linspace(0.0, 1.0, len(x)).view(-1, 1)


class NeedsCompany(nn.Module):
    """BatchNorm in train mode refuses one image of one pixel in this way."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise ValueError("more than one value per channel, please")
        return self.model(x)


@pytest.mark.parametrize("size", [1, 64])
def test_logits_that_depend_on_the_company_ring(victim: Victim, size: int) -> None:
    model, split = victim[0], victim[1].first(64)
    for wrapped in (Together(model, 0.2), InRow(model)):
        e = evaluate(wrapped, split, BALL, ["noise"], batch_size=size, progress=False)
        seen = {alarm.name: alarm for alarm in e.alarms}
        assert not seen["batch"].passed
        assert "beside it in the batch" in seen["batch"].message
        assert seen["deterministic"].passed
    assert {alarm.name: alarm for alarm in alarms(NeedsCompany(model), split)[0].alarms}["batch"].message == (
        "the model refuses a batch of one image or of 4: "
        f"ValueError: more than one value per channel, please (test_alarms.py, line {_line_of_the_refusal()})"
    )


def _line_of_the_refusal() -> int:
    return NeedsCompany.forward.__code__.co_firstlineno + 2


class Halved(nn.Module):
    """Logits in half precision, rounded by one part in a thousand, are no sign of anything."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.to(torch.bfloat16).float()).bfloat16()


def test_rounding_is_not_company(victim: Victim) -> None:
    assert alarms(Halved(victim[0]), victim[1].first(64), "noise")[1]["batch"].passed


def test_a_random_model_is_not_compared(victim: Victim) -> None:
    alarm = alarms(Dropping(victim[0]), victim[1].first(20), "noise")[1]["batch"]
    assert alarm.passed
    assert "not compared" in alarm.message


def test_expected_prediction_is_the_mean_of_probabilities() -> None:
    model = nn.Dropout(0.5).train()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        x = torch.randn(4, 3)
        torch.manual_seed(1)
        expected = torch.stack([model(x).softmax(1) for _ in range(5)]).mean(0)
        torch.manual_seed(1)
        ours = Expected(model, 5)(x).softmax(1)
    assert torch.allclose(ours, expected, atol=1e-6)


def test_noise_that_breaks_what_the_gradient_does_not_rings() -> None:
    many, few, none, all_ = (torch.arange(64) >= n for n in (20, 10, 0, 64))
    alarm = _noise(many, few, 64)
    assert not alarm.passed
    assert alarm.message.startswith("10 of 64 examples stand against the gradient and fall to the worst of 10")
    assert _noise(few, many, 64).passed
    assert _noise(none, none, 64).passed
    assert _noise(all_, all_, 64).passed  # at a large radius everything falls to both
    assert _noise(torch.arange(64) >= 11, few, 64).passed  # one is luck
    assert not _noise(torch.arange(64).flip(0) >= 10, few, 64).passed  # as many, but others


def test_steps_that_still_help_ring() -> None:
    many, few = (torch.arange(64) >= n for n in (30, 10))
    assert not _steps(few, many, 64).passed
    assert _steps(many, many, 64).passed


def test_sets_without_a_radius(victim: Victim) -> None:
    e = evaluate(victim[0], victim[1].first(60), Rotation(degrees=30.0), ["pgd5", "grid9"], progress=False)
    assert "large epsilon" not in {alarm.name for alarm in e.alarms}
    assert e["grid9"].queries_spent > 0


def test_queries_that_beat_the_listed_gradients_ring(victim: Victim) -> None:
    """One gradient step against a search by queries: the comparison is made over all examples."""
    _, seen = alarms(victim[0], victim[1], "fgsm", "square300")
    assert not seen["black box"].passed
