"""What every sampler promises: the model, its gradients and the random state are as they were."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.errors import NumericsError, UsageError
from dale.losses import KL, CrossEntropy
from dale.perturbations import L2, Linf
from dale.random import Key
from dale.samplers import Problem, Sampler, UniformNoise, pgd


def make_batch(count: int = 4) -> Batch:
    images = torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return Batch.of(images, torch.arange(count) % 3, groups=torch.arange(count) % 2)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 3)
    )


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.sizes, self.modes = inner, [], []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.modes.append(self.training)
        return self.inner(x)


@dataclass(frozen=True, kw_only=True)
class Fixed(Sampler):
    """Draws what it is told."""

    what: str

    def draw(self, problem: Problem, key: Key) -> Tensor:
        delta = problem.zeros().unsqueeze(0)
        if self.what == "nan":
            return delta + torch.nan
        if self.what == "far":
            return delta + 0.5
        if self.what == "flat":
            return delta.flatten(2)
        return delta


def test_what_is_drawn_is_checked():
    batch, ball = make_batch(), Linf(epsilon=0.1)
    assert not Fixed(what="zero")(nn.Identity(), batch, ball, key=0).any()
    with pytest.raises(NumericsError, match="not finite"):
        Fixed(what="nan")(nn.Identity(), batch, ball, key=0)
    with pytest.raises(NumericsError, match="outside Linf"):
        Fixed(what="far")(nn.Identity(), batch, ball, key=0)
    with pytest.raises(UsageError, match=r"drew shape \(1, 4, 16\), expected \(K, 4, 1, 4, 4\)"):
        Fixed(what="flat")(nn.Identity(), batch, ball, key=0)


@pytest.mark.parametrize(("scale", "shift"), [(2.0, -1.0), (255.0, 0.0)])
def test_images_outside_the_box_are_what_is_named(scale, shift):
    """And not the sampler, which cannot bring them back into it."""
    batch = Batch.of(scale * torch.rand(4, 1, 6, 6) + shift, torch.zeros(4, dtype=torch.int64))
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    with pytest.raises(UsageError, match=r"images must lie in \[0, 1\], got .* normalisation belongs into the model"):
        pgd(2)(model, batch, Linf(epsilon=0.1), CrossEntropy(), key=0)


def test_a_model_that_returns_nan_is_noticed():
    with pytest.raises(NumericsError, match="not finite"):
        pgd(2)(lambda x: x.flatten(1)[:, :3] * torch.nan, make_batch(), L2(epsilon=0.1), CrossEntropy(), key=0)


def test_a_model_that_writes_into_its_input_is_given_its_own():
    weight = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    batch = make_batch()
    images = batch.images.clone()
    inside, plain = lambda x: x.sub_(0.5).flatten(1) @ weight, lambda x: (x - 0.5).flatten(1) @ weight
    found = [pgd(2, start="gaussian")(model, batch, Linf(epsilon=0.1), KL(), key=0) for model in (inside, plain)]
    assert torch.equal(batch.images, images)
    assert torch.equal(*found)


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "detach"])
def test_a_model_through_which_no_gradient_leads_is_refused(grad):
    """Zeros in its place would train against noise, and nobody would know."""
    weight = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)).requires_grad_(True)

    def model(x: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad):
            return x.detach().flatten(1) @ weight

    with pytest.raises(UsageError, match="no gradient leads from the model's output back to its input"):
        pgd(2)(model, make_batch(), Linf(epsilon=0.1), CrossEntropy(), key=0)
    # where nothing is climbed, none is needed
    UniformNoise(num_samples=2)(model, make_batch(), Linf(epsilon=0.1), CrossEntropy(), key=0)


def test_clean_logits_are_computed_once_and_only_where_needed():
    batch, ball = make_batch(), Linf(epsilon=0.1)
    model = Counting(make_model())
    pgd(5, start="gaussian")(model, batch, ball, KL(), key=0)
    assert model.sizes == [4] * 6  # one clean pass, five steps
    model.sizes.clear()
    pgd(5)(model, batch, ball, CrossEntropy(), key=0)
    assert model.sizes == [4] * 5
    model.sizes.clear()
    UniformNoise(num_samples=3)(model, batch, ball, CrossEntropy(), key=0)
    assert model.sizes == []
    assert model.modes == [False] * 11


def test_chains_share_the_clean_logits():
    problem = Problem(make_model().eval(), make_batch(), Linf(epsilon=0.1), KL())
    wide = problem.repeat(3)
    assert wide.batch.labels.tolist() == problem.batch.labels.tolist() * 3
    assert wide.batch.groups.tolist() == problem.batch.groups.tolist() * 3
    assert torch.equal(wide.x, torch.cat([problem.x] * 3))
    assert torch.equal(wide.clean_logits, torch.cat([problem.clean_logits] * 3))
    assert wide.index.tolist() == [i + c * (1 << 40) for c in range(3) for i in range(4)]
    assert problem.repeat(1) is problem


def test_potentials_are_summed_and_never_averaged():
    """The gradient of an example is its own: it does not shrink when others join the batch."""
    model, batch, ball = make_model().double().eval(), make_batch(), Linf(epsilon=0.1)
    batch = Batch(batch.images.double(), batch.labels, batch.index)
    delta = torch.full_like(batch.images, 0.01)
    problem = Problem(model, batch, ball, CrossEntropy(), log=True)
    value, gradient = problem.value_and_gradient(delta)
    alone_value, alone = Problem(model, batch[:1], ball, CrossEntropy(), log=True).value_and_gradient(delta[:1])
    torch.testing.assert_close(gradient[:1], alone)
    torch.testing.assert_close(value[:1], alone_value)
    torch.testing.assert_close(problem.value(delta), value)
    assert problem.evaluations == 2


def test_train_mode_leaves_statistics_and_the_random_state_alone():
    model, batch, ball = make_model(), make_batch(), Linf(epsilon=0.1)
    model.eval()
    model[3].train()  # an odd mixture of modes, to be found again
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    flags, state = [m.training for m in model.modules()], torch.get_rng_state()
    sampler = pgd(3, start="zero")
    trained = type(sampler)(kernel=sampler.kernel, steps=3, start="zero", climb_log=False, mode="train")
    first = trained(model, batch, ball, CrossEntropy(), key=1)
    assert torch.equal(first, trained(model, batch, ball, CrossEntropy(), key=1))
    assert not torch.equal(first, sampler(model, batch, ball, CrossEntropy(), key=1))
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_plain_functions_are_models_too():
    weight = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    delta = pgd(3)(lambda x: x.flatten(1) @ weight, make_batch(), Linf(epsilon=0.1), CrossEntropy(), key=0)
    assert delta.shape == (1, 4, 1, 4, 4)


def test_a_chain_without_a_loss_says_so():
    with pytest.raises(UsageError, match="climbs a loss"):
        pgd(1)(make_model(), make_batch(), Linf(epsilon=0.1), key=0)
