"""The gradient loop against plain loops written here, against steps worked out by hand, and against its target."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dale import random
from dale.batch import Batch
from dale.errors import UsageError
from dale.losses import DLR, KL, CrossEntropy, ErrorProbability, Loss, Margin
from dale.perturbations import L1, L2, Linf, ParameterBox, Rotation
from dale.samplers import Chain, Langevin, Problem, fgsm, langevin, pgd

EPSILON = 0.1


@pytest.fixture
def model():
    """A small smooth network in float64, without BatchNorm or dropout."""
    generator = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


@pytest.fixture
def batch():
    x = random.uniform(random.key(0), torch.arange(7), (1, 6, 6)).double()
    x[0, 0, 0] = torch.tensor([0.0, 1.0, 0.05, 0.97, 0.5, 1.0])  # some pixels at the walls of the box
    return Batch.of(x, torch.arange(7) % 4, index=torch.tensor([5, 2, 9, 100, 11, 3, 7]))


def plain_pgd(model, x: Tensor, y: Tensor, delta: Tensor, step_size: float, steps: int) -> Tensor:
    """Projected gradient ascent as everybody writes it."""
    for _ in range(steps):
        delta = delta.detach().requires_grad_(True)
        F.cross_entropy(model(x + delta), y, reduction="sum").backward()
        delta = (delta + step_size * delta.grad.sign()).clamp(-EPSILON, EPSILON)
        delta = torch.max(torch.min(delta, 1.0 - x), -x).detach()
    model.zero_grad()
    return delta


def test_one_step_of_size_epsilon_is_fgsm(model, batch):
    x = batch.images.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), batch.labels, reduction="sum"), x)
    expected = (batch.images + EPSILON * gradient.sign()).clamp(0.0, 1.0)
    ball = Linf(epsilon=EPSILON)
    for sampler in (
        fgsm(EPSILON),
        Chain(kernel=Langevin(step_size=EPSILON), steps=1, start="zero"),
        Chain(kernel=Langevin(step_size=EPSILON, noise="laplace", noise_scale=0.0), steps=1, start="zero"),
    ):
        delta = sampler(model, batch, ball, CrossEntropy(), key=1)
        torch.testing.assert_close(batch.images + delta[0], expected, atol=1e-15, rtol=0.0)
        assert torch.equal(delta[0].sign(), torch.where(delta[0] == 0, 0.0, gradient.sign()))


@pytest.mark.parametrize("start", ["zero", "gaussian", "uniform"])
@pytest.mark.parametrize("climb_log", [False, True], ids=["loss", "log"])
@pytest.mark.parametrize("noise", [{"noise": "none"}, {"noise_scale": 0.0}, {"temperature": 0.0, "noise": "gaussian"}])
def test_without_noise_the_sign_drift_is_pgd_to_the_bit(model, batch, start, climb_log, noise):
    ball, key = Linf(epsilon=EPSILON), random.key(4)
    chain = Chain(kernel=Langevin(step_size=0.03, **noise), steps=6, start=start, climb_log=climb_log)
    begin = {
        "zero": torch.zeros_like(batch.images),
        "uniform": ball.sample(batch.images, key.fold("start"), batch.index),
        "gaussian": 1e-3 * random.normal(key.fold("start"), batch.index, (1, 6, 6)).double(),
    }[start]
    begin = torch.max(torch.min(begin, 1.0 - batch.images), -batch.images)
    expected = plain_pgd(model, batch.images, batch.labels, begin, 0.03, 6)
    for loss in (CrossEntropy(), ErrorProbability()) if climb_log else (CrossEntropy(),):
        # log(1 - p_y) climbs along the same signs as the cross-entropy: both grow with the odds of an error
        assert torch.equal(chain(model, batch, ball, loss, key=key)[0], expected)


def test_pgd_and_langevin_rows_of_the_paper():
    assert pgd(7, 0.1).kernel == Langevin(step_size=0.1, noise="none")
    assert (pgd().start, pgd().climb_log, pgd(start="zero").start) == ("uniform", False, "zero")
    chain = langevin(10, 2 / 255)
    assert chain.kernel == Langevin(step_size=2 / 255, noise="laplace", noise_scale=1e-4, place="inside", drift="sign")
    assert (chain.start, chain.climb_log) == ("gaussian", True)
    assert langevin(temperature=0.5).kernel == Langevin(temperature=0.5)


def test_pgd_in_l2_follows_the_unit_gradient(model, batch):
    inner = Batch(0.4 + 0.2 * batch.images, batch.labels, batch.index)  # far from the walls: the ball alone matters
    delta = torch.zeros_like(inner.images)
    for _ in range(5):
        delta = delta.detach().requires_grad_(True)
        value = F.cross_entropy(model(inner.images + delta), inner.labels, reduction="sum")
        (gradient,) = torch.autograd.grad(value, delta)
        delta = delta + 0.1 * gradient / gradient.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        delta = delta * (0.3 / delta.flatten(1).norm(dim=1)).clamp_max(1.0).view(-1, 1, 1, 1)
    found = pgd(5, 0.1, start="zero")(model, inner, L2(epsilon=0.3), CrossEntropy(), key=0)
    torch.testing.assert_close(found[0], delta.detach(), atol=1e-12, rtol=0.0)


@dataclass(frozen=True, kw_only=True)
class Linear(Loss):
    """U = <weight, x'> by way of a model that returns x' itself: a potential with a known gradient."""

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        return logits @ WEIGHT.to(logits)


WEIGHT = torch.tensor([0.5, -2.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("drift", "noise", "place"),
    list(itertools.product(["sign", "gradient"], ["laplace", "gaussian"], ["inside", "outside"])),
)
@pytest.mark.parametrize("given", [{"noise_scale": 0.7}, {"temperature": 2.0}])
def test_one_step_by_hand(drift, noise, place, given):
    """Every choice of drift, noise and place against its formula, with the noise drawn here."""
    eta, epsilon = 0.05, 0.3
    x = torch.full((3, 4), 0.5, dtype=torch.float64)
    batch = Batch.of(x, torch.zeros(3).long(), index=torch.tensor([8, 1, 4]))
    key = random.key(11)
    step_key = key.fold("step").fold(0)
    xi = (random.laplace if noise == "laplace" else random.normal)(step_key, batch.index, (4,)).double()
    c = 0.7 if "noise_scale" in given else (2.0 * eta * 2.0) ** 0.5
    gradient = WEIGHT.double().expand(3, 4)
    direction = (lambda g: g.sign()) if drift == "sign" else (lambda g: g)
    move = eta * direction(gradient + c * xi) if place == "inside" else eta * direction(gradient) + c * xi
    kernel = Langevin(step_size=eta, drift=drift, noise=noise, place=place, **given)
    chain = Chain(kernel=kernel, steps=1, start="zero", climb_log=False)
    found = chain(nn.Identity(), batch, Linf(epsilon=epsilon), Linear(), key=key)[0]
    torch.testing.assert_close(found, move.clamp(-epsilon, epsilon), atol=1e-15, rtol=0.0)


def test_the_gradient_of_the_log_is_that_of_the_loss_over_the_loss(model, batch):
    ball, delta = Linf(epsilon=EPSILON), torch.full_like(batch.images, 0.01)
    value, plain = Problem(model, batch, ball, CrossEntropy(), log=False).value_and_gradient(delta)
    log_value, log = Problem(model, batch, ball, CrossEntropy(), log=True).value_and_gradient(delta)
    torch.testing.assert_close(log_value, value.log())
    torch.testing.assert_close(log, plain / value.view(-1, 1, 1, 1))


def test_a_quarter_of_the_radius_is_the_default_step(model, batch):
    for ball in (Linf(epsilon=0.2), L2(epsilon=0.2)):
        default = pgd(3, start="zero")(model, batch, ball, CrossEntropy(), key=0)
        assert torch.equal(default, pgd(3, 0.05, start="zero")(model, batch, ball, CrossEntropy(), key=0))


def test_every_state_in_order_chain_after_chain(model, batch):
    ball, loss, key = Linf(epsilon=EPSILON), CrossEntropy(), random.key(2)
    chain = Chain(kernel=Langevin(noise_scale=0.5), steps=5, num_chains=3, keep="all", burn_in=2)
    every = chain(model, batch, ball, loss, key=key)
    assert every.shape == (9, 7, 1, 6, 6)
    assert chain.num_draws == 9
    for number in range(3):
        last = Chain(kernel=chain.kernel, steps=3 + number, num_chains=3)(model, batch, ball, loss, key=key)
        assert torch.equal(every[number::3], last)
    # chain c of an example draws as the example numbered c * 2^40 further on
    for c in range(3):
        alone = Batch(batch.images, batch.labels, batch.index + c * (1 << 40))
        single = Chain(kernel=chain.kernel, steps=5)(model, alone, ball, loss, key=key)
        torch.testing.assert_close(every[3 * c + 2], single[0], atol=1e-12, rtol=0.0)
    assert float((every[2] - every[5]).abs().max()) > 0.01


def test_a_chain_goes_on_from_a_given_start(model, batch):
    ball = Linf(epsilon=EPSILON)
    chain = pgd(4, 0.02, start="zero")
    problem = Problem(model, batch, ball, CrossEntropy())
    half, _ = pgd(2, 0.02, start="zero").run(problem, random.key(0))
    rest, state = pgd(2, 0.02).run(problem, random.key(0), start=half[0])
    whole = chain(model, batch, ball, CrossEntropy(), key=0)
    assert torch.equal(rest, whole)
    assert torch.equal(state["delta"], whole[0])
    assert chain.with_steps(2) == pgd(2, 0.02, start="zero")
    # a start outside the set is brought into it
    far, _ = pgd(1, 1e-9).run(problem, random.key(0), start=torch.full_like(batch.images, 5.0))
    assert bool(ball.contains(far[0], batch.images).all())


def test_a_kl_divergence_needs_its_small_start(model, batch):
    ball = Linf(epsilon=EPSILON)
    problem = Problem(model, batch, ball, KL())
    assert float(problem.value_and_gradient(problem.zeros())[1].abs().max()) < 1e-15  # there is nothing to climb
    stuck = pgd(1, start="zero")(model, batch, ball, KL(), key=0)
    moved = pgd(5, start="gaussian")(model, batch, ball, KL(), key=0)

    def climbed(delta: Tensor) -> Tensor:
        return KL()(model(batch.images + delta), model(batch.images), batch.labels).detach()

    assert bool((climbed(moved[0]) > climbed(stuck[0])).all())
    assert bool((climbed(moved[0]) > 1e-4).all())
    assert bool((problem.value_and_gradient(1e-3 * torch.ones_like(moved[0]))[1].abs() > 1e-9).any())


def test_away_starts_where_the_label_gets_less_likely(model, batch):
    """By hand: noise and steepest direction at the start's scale, in the set; the noise is that of a Gaussian start."""
    ball, key = Linf(epsilon=EPSILON), random.key(4)
    problem = Problem(model, batch, ball, KL(), log=True)
    x = batch.images.clone().requires_grad_(True)
    F.cross_entropy(model(x), batch.labels, reduction="sum").backward()
    noise = random.normal(key, batch.index, (1, 6, 6)).double()
    begin = Chain(start="away").begin(problem, key)
    assert torch.equal(begin, ball.project(ball.project(1e-3 * noise, batch.images) + 1e-3 * x.grad.sign(), x.detach()))
    assert problem.evaluations == 1
    chain = Chain(kernel=Langevin(step_size=0.03, noise="none"), steps=4, start="away")
    assert chain.run(problem, key)[0].shape == (1, *batch.images.shape)
    assert problem.evaluations == 1 + 5  # one gradient more than steps


def test_a_divergence_grows_to_both_sides_and_away_takes_the_side_of_the_error():
    """On a linear model with two classes there are two sides: at random half of the chains get surer of their label."""
    count = 200
    net = nn.Sequential(nn.Flatten(), nn.Linear(144, 2, bias=False)).double()
    with torch.no_grad():
        weight = random.normal(random.key(1), torch.arange(1), (144,))[0].double()
        net[1].weight.copy_(torch.stack([weight, -weight]))
    x = 0.4 + 0.2 * random.uniform(random.key(2), torch.arange(count), (1, 12, 12)).double()
    batch, ball = Batch.of(x, torch.zeros(count, dtype=torch.int64)), Linf(epsilon=EPSILON)

    def surer(start) -> float:
        delta = langevin(5, 0.04, start=start)(net, batch, ball, KL(), key=0)[0]
        before, after = net(x).log_softmax(1)[:, 0], net(x + delta).log_softmax(1)[:, 0]
        return float((after > before).double().mean())

    assert 0.4 < surer("gaussian") < 0.6
    assert surer("away") == 0.0


@pytest.mark.parametrize("low", [0.3, 0.0], ids=["grey", "black"])
@pytest.mark.parametrize("ball", [L1(epsilon=1.0), L2(epsilon=0.5), Linf(epsilon=EPSILON)], ids=repr)
def test_away_leads_to_the_side_of_the_error_in_every_norm(ball, low):
    """In l1 and l2 the step is no longer than the noise, which may lead back; it is turned round there.

    At the walls of the box, too, where half of a black image's noise is cut off.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 3)).double()
    x = low + (0.4 if low else 0.0) * random.uniform(random.key(2), torch.arange(100), (1, 16, 16)).double()
    batch = Batch.of(x, torch.arange(100) % 3)
    problem = Problem(net, batch, ball, KL(), log=True)
    gradient = problem.away_from_label()
    begin = {start: Chain(start=start).begin(problem, random.key(0)) for start in ("away", "gaussian")}
    right = {start: ((delta * gradient).flatten(1).sum(1) > 0).double().mean().item() for start, delta in begin.items()}
    assert right["away"] == 1.0
    assert 0.35 < right["gaussian"] < 0.65
    if low:  # the noise itself is the same, up to its sign
        turned = (begin["away"] * begin["gaussian"]).flatten(1).sum(1) < 0
        assert bool(turned.any()) is not isinstance(ball, Linf)


def test_away_knows_the_side_of_a_model_so_sure_that_its_cross_entropy_is_zero():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
    with torch.no_grad():
        net[1].bias[0] += 300.0
    batch = Batch.of(0.3 + 0.4 * torch.rand(100, 1, 16, 16), torch.zeros(100, dtype=torch.int64))
    assert not CrossEntropy()(net(batch.images), None, batch.labels).any()
    delta = Chain(start="away").begin(Problem(net, batch, Linf(epsilon=EPSILON), KL(), log=True), random.key(0))
    others = net[1].weight[1:].mean(0) - net[1].weight[0]  # both others have nearly the same share
    assert bool((delta.flatten(1) @ others > 0).all())


@pytest.mark.parametrize("ball", [L1(epsilon=10.0), L2(epsilon=2.0), Linf(epsilon=EPSILON)], ids=repr)
def test_away_holds_where_the_box_cuts_off_both_signs_of_the_noise(ball):
    """In images that are mostly black; the noise is left out there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    drawn = random.uniform(random.key(3), torch.arange(500), (2, 28, 28))
    x = torch.where(drawn[:, :1] > 0.8, drawn[:, 1:], 0.0)
    problem = Problem(net, Batch.of(x, torch.arange(500) % 10), ball, KL(), log=True)
    begin = Chain(start="away").begin(problem, random.key(0))
    assert bool(((begin * problem.away_from_label()).flatten(1).sum(1) >= 0).all())
    assert bool((problem.project(begin) - begin).abs().max() < 1e-6)


def test_away_is_gaussian_where_nothing_changes_the_label():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    with torch.no_grad():
        flat[1].weight.zero_()
    batch = Batch.of(torch.full((2, 1, 4, 4), 0.5, dtype=torch.float64), torch.tensor([0, 1]))
    problem = Problem(flat, batch, Linf(epsilon=EPSILON), KL(), log=True)
    starts = [Chain(start=start).begin(problem, random.key(0)) for start in ("away", "gaussian")]
    assert torch.equal(*starts)
    assert bool((starts[0] != 0).any())


def test_ascent_climbs_for_every_loss(model, batch):
    ball = Linf(epsilon=EPSILON)
    for loss in (CrossEntropy(), Margin(), DLR(), ErrorProbability()):
        delta = pgd(5, start="zero")(model, batch, ball, loss, key=0)[0]
        before = loss(model(batch.images), None, batch.labels)
        assert bool((loss(model(batch.images + delta), None, batch.labels) > before).all())


def test_losses_that_can_be_negative_refuse_the_log(model, batch):
    for loss in (Margin(), DLR()):
        with pytest.raises(UsageError, match="can be negative"):
            langevin()(model, batch, Linf(epsilon=0.1), loss, key=0)


@dataclass(frozen=True, kw_only=True)
class Offset(ParameterBox):
    """One parameter, handed to the model as it is."""

    num_parameters: ClassVar[int] = 1

    def apply(self, x: Tensor, delta: Tensor) -> Tensor:
        return x + delta


@dataclass(frozen=True, kw_only=True)
class Ramp(Loss):
    """loss(delta) = 1.1 + delta on [-1, 1]."""

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        return 1.1 + logits[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_the_chain_targets_the_loss_to_the_power_one_over_t(temperature):
    """Raw gradient, Gaussian noise outside, log: E[delta] and E[delta^2] under loss^(1/T), by quadrature."""
    count = 4000
    batch = Batch.of(torch.zeros(count, 1), torch.zeros(count).long())
    kernel = Langevin(step_size=0.004, drift="gradient", noise="gaussian", place="outside", temperature=temperature)
    steps = int(2.5 / (0.004 * temperature))
    delta = Chain(kernel=kernel, steps=min(steps, 800), start="uniform")(nn.Identity(), batch, Offset(), Ramp(), key=5)[
        0
    ]
    grid = torch.linspace(-1, 1, 20_001, dtype=torch.float64)
    density = (1.1 + grid) ** (1.0 / temperature)
    density = density / density.sum()
    for power in (1, 2):
        expected = float((density * grid**power).sum())
        # 4000 independent chains, and a bias of the order of the step at the walls
        assert float((delta.double() ** power).mean()) == pytest.approx(expected, abs=0.04)


def test_transformations_are_climbed_as_well(model, batch):
    turned = Rotation(degrees=30.0)
    delta = pgd(10, 0.25)(model, batch, turned, CrossEntropy(), key=0)
    assert delta.shape == (1, 7, 1)
    start = turned.sample(batch.images, random.key(0).fold("start"), batch.index)
    losses = [
        F.cross_entropy(model(turned.apply(batch.images, angle)), batch.labels).item() for angle in (start, delta[0])
    ]
    assert losses[1] > losses[0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Langevin(noise_scale=1.0, temperature=1.0), "not both"),
        (lambda: Langevin(noise="none", noise_scale=1.0), "takes no noise_scale"),
        (lambda: Langevin(step_size=0.0), "above 0"),
        (lambda: Langevin(noise_scale=-1.0), "at least 0"),
        (lambda: Langevin(drift="signs"), "did you mean 'sign'"),
        (lambda: Langevin(noise="laplacian"), "did you mean 'laplace'"),
        (lambda: Langevin(place="within"), "unknown Langevin.place"),
        (lambda: Chain(keep="first"), "unknown Chain.keep"),
        (lambda: Chain(keep="all", burn_in=10), "less than steps=10"),
        (lambda: Chain(start_scale=-1.0), "at least 0"),
    ],
)
def test_bad_options(build, message):
    with pytest.raises(UsageError, match=message):
        build()
