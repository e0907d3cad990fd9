"""MALA and HMC against densities known exactly, with a bound that wrong samplers are shown to miss.

Every example of a batch runs a chain of its own on the same image, so the last states of a batch are independent draws
and a chi-square statistic has its textbook distribution. All draws are counted random numbers: nothing here is flaky.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as changed

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from dale import random
from dale.batch import Batch
from dale.errors import NumericsError, UsageError
from dale.lambda_star import grid
from dale.losses import KL, CrossEntropy, Loss
from dale.perturbations import L1, L2, Linf, PerturbationSet, Translation
from dale.samplers import Chain, Hmc, Langevin, Mala, Problem
from dale.samplers.exact import _Metropolis

NUM_DRAWS = 10_000
CENTRE, CORNER = (0.5, 0.5), (0.1, 0.95)  # of two pixels: away from the image box, and against two of its walls


@dataclass(frozen=True, kw_only=True)
class Ripple(Loss):
    """exp(4 a) (0.5 + sin^2(6 b)) of the two logits: steep at the border, with two modes."""

    def value(self, logits, clean, labels):
        return (4.0 * logits[:, 0]).exp() * (0.5 + (6.0 * logits[:, 1]).sin().square())


@dataclass(frozen=True, kw_only=True)
class Tilt(Loss):
    """exp(8 a - 5 b): truncated exponentials on a box."""

    def value(self, logits, clean, labels):
        return (8.0 * logits[:, 0] - 5.0 * logits[:, 1]).exp()


def network() -> nn.Module:
    """A small network of two pixels and three classes, whose loss has a valley in the square."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            rows = random.normal(random.key(5), torch.arange(len(parameter)) + 100 * number, parameter.shape[1:])
            parameter.copy_(2.5 * rows if number == 0 else rows)
    return model


@dataclass(frozen=True)
class Target:
    """A density proportional to loss^(1/T) (or exp(loss / T)) on a two-dimensional Delta."""

    perturbations: PerturbationSet
    loss: Loss
    pixels: tuple[float, ...] = CENTRE
    temperature: float = 1.0
    model: Callable[[Tensor], Tensor] = nn.Flatten()
    log: bool = True

    def batch(self, size: int) -> Batch:
        shape = (1, 1, 2) if len(self.pixels) == 2 else (1, 4, 4)
        images = torch.tensor(self.pixels).view(1, *shape).expand(size, *shape).contiguous()
        return Batch.of(images, torch.zeros(size, dtype=torch.int64))

    def exact(self, resolution: int = 400) -> tuple[Tensor, Tensor]:
        """Points (N, 2) of a fine grid over Delta and their probabilities, by lambda_star's grid."""
        radius = self.perturbations.radius

        def loss(points):
            batch = self.batch(len(points))
            moved = self.perturbations.apply(batch.images, self.shaped(points.float()))
            return self.loss(self.model(moved), None, batch.labels, log=False)

        cells = grid(loss, lower=[-radius] * 2, upper=[radius] * 2, resolution=resolution, gamma=math.inf)
        inside = self.perturbations.contains(self.shaped(cells.points.float()), self.batch(len(cells.points)).images)
        log_density = (cells.losses.log() if self.log else cells.losses) / self.temperature
        density = (log_density - log_density.max()).exp() * inside
        return cells.points, density / density.sum()

    def shaped(self, points: Tensor) -> Tensor:
        return points.view(-1, *self.perturbations.shape((1, 1, 2)))

    def sample(self, kernel, steps: int = 100, size: int = NUM_DRAWS) -> Tensor:
        chain = Chain(kernel=kernel, steps=steps, start="uniform", climb_log=self.log)
        return chain(self.model, self.batch(size), self.perturbations, self.loss, key=11)[0].view(size, 2)


def excess(target: Target, draws: Tensor, bins: int = 10) -> float:
    """How far independent draws are from the target, as a multiple of what chance allows: the one bound of this file.

    The larger of (a) Pearson's chi-square over bins x bins cells, those with fewer than 10 expected draws taken
    together, over its 99.9% quantile, and (b) the largest deviation of the means of d_i and d_i d_j, over 4 standard
    errors. At most 1 for a right sampler.
    """
    points, mass = target.exact()
    draws = draws.double()
    radius = target.perturbations.radius

    def cell(values):
        place = ((values + radius) / (2 * radius) * bins).long().clamp(0, bins - 1)
        return place[:, 0] * bins + place[:, 1]

    expected = torch.zeros(bins**2, dtype=torch.float64).index_add(0, cell(points), mass) * len(draws)
    observed = torch.bincount(cell(draws), minlength=bins**2).double()
    large = expected >= 10
    expected = torch.cat([expected[large], expected[~large].sum().clamp_min(1e-9).view(1)])
    observed = torch.cat([observed[large], observed[~large].sum().view(1)])
    chi_square = float(((observed - expected).square() / expected).sum())
    ratio = chi_square / stats.chi2.ppf(0.999, len(expected) - 1)

    def features(d):
        return torch.stack([d[:, 0], d[:, 1], d[:, 0] ** 2, d[:, 1] ** 2, d[:, 0] * d[:, 1]], dim=1)

    exact = features(points)
    mean = mass @ exact
    error = ((mass @ exact.square() - mean.square()) / len(draws)).sqrt()
    return max(ratio, float(((features(draws).mean(dim=0) - mean) / error).abs().max()) / 4.0)


BOX = Target(Linf(epsilon=0.4), Ripple())
BALL = Target(L2(epsilon=0.4), Ripple())
PIXELS = tuple(((torch.arange(16) * 7 + 3) % 16 / 16.0).tolist())
IMAGE_NET = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
with torch.no_grad():
    IMAGE_NET[1].weight.copy_(3.0 * random.normal(random.key(2), torch.arange(3), (16,)))
    IMAGE_NET[1].bias.zero_()

TARGETS = {
    "box": BOX,
    "box in the corner of the image": changed(BOX, pixels=CORNER),
    "box, cold": changed(BOX, temperature=0.5),
    "box, exp(loss / T)": changed(BOX, log=False, temperature=12.0),
    "ball": BALL,
    "ball in the corner of the image": changed(BALL, pixels=CORNER),
    "l1 ball, hot": Target(L1(epsilon=0.4), Ripple(), temperature=2.0),
    "network on a box": Target(Linf(epsilon=0.4), CrossEntropy(), model=network()),
    "network on a ball, cold": Target(L2(epsilon=0.45), CrossEntropy(), temperature=0.5, model=network()),
    "network under translation": Target(Translation(fraction=0.3), CrossEntropy(), PIXELS, model=IMAGE_NET),
}


def kernels(target: Target) -> dict[str, _Metropolis]:
    """Steps that suit the set's size, so that 100 moves forget the start; shorter paths where none is reflected."""
    move = 0.35 * target.perturbations.radius
    temperature = target.temperature
    path = move if isinstance(target.perturbations, (Linf, Translation)) else move / 2
    return {
        "mala": Mala(step_size=move**2 / (2 * temperature), temperature=temperature),
        "hmc": Hmc(step_size=path, temperature=temperature, leapfrog_steps=3),
    }


@pytest.mark.parametrize("kernel", ["mala", "hmc"])
@pytest.mark.parametrize("name", TARGETS)
def test_draws_follow_the_exact_density(name, kernel):
    target = TARGETS[name]
    assert excess(target, target.sample(kernels(target)[kernel], steps=100 if kernel == "mala" else 50)) < 1.0


@pytest.mark.parametrize("kernel", ["mala", "hmc"])
def test_moments_of_a_truncated_exponential_in_closed_form(kernel):
    """exp(k d / T) on [-e, e], with z = k e / T: mean e (coth(z) - 1 / z), square e^2 (1 + 2 / z^2 - 2 coth(z) / z)."""
    target = Target(Linf(epsilon=0.4), Tilt(), temperature=2.0)
    draws = target.sample(kernels(target)[kernel]).double()
    for column, slope in enumerate((8.0, -5.0)):
        z = slope * 0.4 / 2.0
        mean = 0.4 / math.tanh(z) - 0.4 / z
        second = 0.16 * (1 + 2 / z**2 - 2 / (math.tanh(z) * z))
        error = math.sqrt((second - mean**2) / NUM_DRAWS)
        assert abs(draws[:, column].mean() - mean) < 4 * error
        assert abs(draws[:, column].square().mean() - second) < 4 * draws[:, column].square().std() / NUM_DRAWS**0.5


class TestWrongSamplersMissTheBound:
    """Each of these differs from a right sampler in one place, and the same bound tells."""

    def test_no_acceptance(self):
        @dataclass(frozen=True, kw_only=True)
        class AcceptAll(Mala):
            def propose(self, problem, state, key):
                proposal, ratio = super().propose(problem, state, key)
                return proposal, torch.full_like(ratio, torch.inf)

        assert excess(BOX, BOX.sample(AcceptAll(step_size=0.02))) > 2.0
        assert excess(BOX, BOX.sample(Mala(step_size=0.02))) < 1.0

    def test_ratio_without_the_proposal_density(self):
        @dataclass(frozen=True, kw_only=True)
        class Symmetric(Mala):
            def propose(self, problem, state, key):
                proposal, _ = super().propose(problem, state, key)
                return proposal, (proposal["value"] - state["value"]) / self.temperature

        assert excess(BOX, BOX.sample(Symmetric(step_size=0.01))) > 2.0

    @pytest.mark.parametrize("target", [BOX, BALL], ids=["box", "ball"])
    def test_projection_at_the_border(self, target):
        @dataclass(frozen=True, kw_only=True)
        class Projected(Mala):
            def propose(self, problem, state, key):
                proposal, ratio = super().propose(problem, state, key)
                delta = problem.project(proposal["delta"])
                value, gradient = problem.value_and_gradient(delta)
                return {"delta": delta, "value": value, "gradient": gradient}, ratio

        assert excess(target, target.sample(Projected(step_size=0.01))) > 2.0

    @pytest.mark.parametrize("kernel", ["mala", "hmc"])
    def test_temperature_forgotten(self, kernel):
        cold = changed(BOX, temperature=0.5)
        assert excess(cold, cold.sample(kernels(BOX)[kernel])) > 2.0
        assert excess(cold, cold.sample(kernels(cold)[kernel])) < 1.0

    def test_reflection_that_keeps_the_momentum(self):
        @dataclass(frozen=True, kw_only=True)
        class Unturned(Linf):
            def reflect(self, delta, momentum, x):
                return super().reflect(delta, momentum, x)[0], momentum

        wrong = changed(BOX, perturbations=Unturned(epsilon=0.4))
        assert excess(wrong, wrong.sample(kernels(BOX)["hmc"])) > 2.0

    def test_clamping_along_the_leapfrog_path(self):
        @dataclass(frozen=True, kw_only=True)
        class Clamped(Linf):
            def reflect(self, delta, momentum, x):
                return self.project(delta, x), momentum

        wrong = changed(BOX, perturbations=Clamped(epsilon=0.4))
        assert excess(wrong, wrong.sample(kernels(BOX)["hmc"])) > 2.0

    def test_too_few_steps_from_the_start(self):
        assert excess(BOX, BOX.sample(Mala(step_size=0.0002), steps=20)) > 2.0


def test_unadjusted_langevin_comes_near_with_a_small_step_only():
    """Without acceptance, and projected at the border, the bias falls with the step: a looser bound, 1.5."""
    target = TARGETS["network on a box"]

    def langevin(step_size, steps):
        kernel = Langevin(step_size=step_size, drift="gradient", noise="gaussian", temperature=1.0, place="outside")
        return excess(target, target.sample(kernel, steps, size=4000))

    assert langevin(2e-4, 600) < 1.5
    assert langevin(5e-3, 100) > 3.0


def test_one_leapfrog_step_is_mala():
    """Where nothing is reflected, s and eta = s^2 / (2 T) make the same chain, decision for decision."""
    target = changed(BALL, temperature=0.7)
    batch = target.batch(500)
    problem = Problem(target.model, batch, target.perturbations, target.loss, log=True)
    ends = []
    for kernel in (
        Hmc(step_size=0.15, temperature=0.7, leapfrog_steps=1),
        Mala(step_size=0.15**2 / 1.4, temperature=0.7),
    ):
        ends.append(Chain(kernel=kernel, steps=20, start="uniform").run(problem, random.key(3)))
    assert torch.equal(ends[0][1]["accepted"], ends[1][1]["accepted"])
    torch.testing.assert_close(ends[0][0], ends[1][0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kernel", [Mala(step_size=0.01), Hmc(step_size=0.1)], ids=["mala", "hmc"])
class TestState:
    def run(self, kernel, target=BOX, steps=12, size=50, dtype=torch.float32):
        batch = target.batch(size)
        batch = Batch(batch.images.to(dtype), batch.labels, batch.index)
        problem = Problem(target.model, batch, target.perturbations, target.loss, log=True)
        return problem, *Chain(kernel=kernel, steps=steps, start="uniform", keep="all").run(problem, random.key(1))

    def test_carries_value_gradient_and_count_of_where_it_is(self, kernel):
        problem, draws, state = self.run(kernel)
        value, gradient = problem.value_and_gradient(state["delta"])
        assert torch.equal(state["delta"], draws[-1])
        torch.testing.assert_close(state["value"], value)
        torch.testing.assert_close(state["gradient"], gradient)
        # from the second state on every acceptance is a move
        moves = (draws.diff(dim=0).flatten(2) != 0).any(dim=2).sum(dim=0)
        assert ((state["accepted"] - moves) >= 0).all()
        assert ((state["accepted"] - moves) <= 1).all()
        assert 0 < int(moves.sum()) < moves.numel() * 11

    def test_costs_one_gradient_a_move(self, kernel):
        problem, _, _ = self.run(kernel, steps=12)
        assert problem.evaluations == 1 + 12 * getattr(kernel, "leapfrog_steps", 1)

    @pytest.mark.parametrize("name", ["box", "ball", "box in the corner of the image", "network under translation"])
    def test_stays_in_the_set_to_the_last_bit(self, kernel, name):
        target = TARGETS[name]
        problem, draws, _ = self.run(kernel, target, steps=30, size=500)
        for delta in draws[5:]:
            assert target.perturbations.contains(delta, problem.x, tolerance=1e-7).all()
            # one unit in the last place is what 1 - x leaves open
            torch.testing.assert_close(problem.project(delta), delta, atol=6e-8, rtol=0)
        if "corner" not in name:
            assert torch.equal(problem.project(draws[-1]), draws[-1])

    def test_an_example_does_not_see_its_neighbours(self, kernel):
        problem, draws, _ = self.run(kernel, size=9)
        part = problem.batch[torch.tensor([7, 2])]
        alone = Problem(problem.model, part, problem.perturbations, problem.loss, log=True)
        chain = Chain(kernel=kernel, steps=12, start="uniform", keep="all")
        torch.testing.assert_close(chain.run(alone, random.key(1))[0], draws[:, [7, 2]])

    def test_double_precision(self, kernel):
        _, draws, state = self.run(kernel, dtype=torch.float64)
        assert draws.dtype == state["value"].dtype == torch.float64

    def test_a_proposal_without_a_density_is_rejected(self, kernel):
        def broken(images):
            logits = images.flatten(1)
            return torch.where(logits[:, :1] > 0.6, torch.nan, logits)

        problem, draws, state = self.run(kernel, changed(BOX, model=broken, perturbations=Linf(epsilon=0.09)), size=200)
        assert draws.isfinite().all()
        assert state["value"].isfinite().all()
        problem = Problem(broken, BOX.batch(200), Linf(epsilon=0.3), BOX.loss, log=True)
        draws, _ = Chain(kernel=kernel, steps=40, start="gaussian", keep="all").run(problem, random.key(1))
        assert (draws[:, :, 0, 0, 0] <= 0.1 + 1e-6).all()

    def test_start_without_a_density_is_refused(self, kernel):
        def broken(images):
            return images.flatten(1) * torch.nan

        with pytest.raises(NumericsError, match="at the start of chain 0 is nan"):
            self.run(kernel, changed(BOX, model=broken))

    def test_a_kl_divergence_from_its_zero(self, kernel):
        """At delta = 0 the loss is zero and its logarithm cut: the chain leaves all the same."""
        target = Target(Linf(epsilon=0.3), KL(), model=network())
        delta = Chain(kernel=kernel, steps=20, start="zero")(
            target.model, target.batch(64), target.perturbations, target.loss, key=0
        )
        assert (delta.flatten(2).abs().amax(dim=2) > 0).all()


def test_options_are_checked():
    with pytest.raises(UsageError, match="Mala: step_size must be a finite number above 0, got 0"):
        Mala(step_size=0)
    with pytest.raises(UsageError, match="Hmc: temperature must be"):
        Hmc(step_size=0.1, temperature=-1.0)
    with pytest.raises(UsageError, match="Hmc: leapfrog_steps must be a whole number of at least 1, got 0"):
        Hmc(step_size=0.1, leapfrog_steps=0)
