"""The named rows: the identities between them, and each against its method written in a few plain lines."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dale import algorithms, random
from dale.algorithms import ROWS, build, find_row, options_of
from dale.algorithms.options import SAMPLING, overlay
from dale.batch import Batch
from dale.constraints import accuracy_limit, loss_limit
from dale.errors import UsageError
from dale.losses import CrossEntropy, Margin
from dale.objectives import Objective
from dale.perturbations import Linf, PerturbationSet, Rotation
from dale.samplers import Chain, GaussianNoise, Langevin, UniformNoise, fgsm, pgd

EPSILON = 0.1
BALL = Linf(epsilon=EPSILON)


def make_model() -> nn.Sequential:
    """Smooth, in float64, without BatchNorm and dropout: the identities hold to the bit."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 4)).double()


def make_batch() -> Batch:
    x = random.uniform(random.key(0), torch.arange(6), (1, 6, 6)).double()
    return Batch.of(x, torch.arange(6) % 4)


def pgd_start(x: Tensor, key: int) -> Tensor:
    """Uniform on ball and box, as the row starts."""
    low, high = (-x).clamp_min(-EPSILON), (1.0 - x).clamp_max(EPSILON)
    return low + (high - low) * random.uniform(random.key(key).fold("start"), torch.arange(len(x)), x.shape[1:]).to(x)


def small_start(x: Tensor, key: int) -> Tensor:
    noise = 1e-3 * random.normal(random.key(key).fold("start"), torch.arange(len(x)), x.shape[1:]).to(x)
    return torch.max(torch.min(noise, 1.0 - x), -x)


def attack(model, x, y, delta, loss, steps=10, step_size=EPSILON / 4) -> Tensor:
    """Projected sign ascent of a summed loss, in plain torch."""
    for _ in range(steps):
        delta = delta.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(loss(model(x + delta), y).sum(), delta)
        delta = (delta + step_size * gradient.sign()).clamp(-EPSILON, EPSILON)
        delta = torch.max(torch.min(delta, 1.0 - x), -x)
    return delta.detach()


def cross(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, reduction="none")


def kl_from(clean: Tensor):
    """KL(p(x) || p(x')) per example, clean predictions held fixed."""
    return lambda logits, y: F.kl_div(logits.log_softmax(1), clean.softmax(1), reduction="none").sum(1)


def descend(row: Objective | None, reference=None, steps: int = 5) -> list[Tensor]:
    """The weights after a few steps of gradient descent on a row, or on a loss written here."""
    model, batch = make_model(), make_batch()
    for k in range(steps):
        if row is not None:
            loss = row(model, batch.images, batch.labels, row.initial_duals(), key=k).loss
        else:
            loss = reference(model, batch.images, batch.labels, k)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), grads, strict=True):
                parameter.sub_(0.1 * gradient)
    return [p.detach() for p in model.parameters()]


def same(first: list[Tensor], second: list[Tensor], tolerance: float = 0.0) -> None:
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=0.0)


def plain_pgd_training(model, x, y, k) -> Tensor:
    delta = attack(model, x, y, pgd_start(x, k), cross)
    return cross(model(x + delta), y).mean()


def plain_erm(model, x, y, k) -> Tensor:
    return cross(model(x), y).mean()


def plain_fgsm(model, x, y, k) -> Tensor:
    delta = attack(model, x, y, torch.zeros_like(x), cross, steps=1, step_size=EPSILON)
    return cross(model(x + delta), y).mean()


def plain_trades(model, x, y, k) -> Tensor:
    with torch.no_grad():
        fixed = model(x)
    delta = attack(model, x, y, small_start(x, k), kl_from(fixed))
    clean = model(x)
    return cross(clean, y).mean() + 6.0 * kl_from(clean)(model(x + delta), y).mean()


def plain_mart(model, x, y, k) -> Tensor:
    delta = attack(model, x, y, small_start(x, k), cross)
    p, q = model(x).softmax(1), model(x + delta).softmax(1)
    rows = torch.arange(len(y))
    rival = q.scatter(1, y[:, None], 0.0).amax(1)
    boosted = -q[rows, y].log() - (1.0 - rival + 1e-4).log()
    return (boosted + 5.0 * (p * (p / q).log()).sum(1) * (1.0 - p[rows, y])).mean()


def plain_alp(model, x, y, k) -> Tensor:
    delta = attack(model, x, y, pgd_start(x, k), cross)
    moved = model(x + delta)
    return (cross(moved, y) + (moved - model(x)).square().sum(1).sqrt()).mean()


def plain_clp(model, x, y, k) -> Tensor:
    delta = attack(model, x, y, pgd_start(x, k), cross)
    clean = model(x)
    return (cross(clean, y) + (model(x + delta) - clean).square().sum(1).sqrt()).mean()


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("erm", plain_erm),
        ("fgsm", plain_fgsm),
        ("pgd", plain_pgd_training),
        ("alp", plain_alp),
        ("clp", plain_clp),
        ("trades", plain_trades),
        ("mart", plain_mart),
    ],
)
def test_every_named_method_is_the_method(name, reference):
    """Five training steps of the row end where the plain lines end, up to the order of float64 sums."""
    same(descend(build(name, BALL)), descend(None, reference), 1e-10)


def test_dale_with_nu_zero_and_no_noise_is_pgd_training():
    """Same start and loss; the log of the loss climbs along the same signs, so not a bit differs."""
    langevin = Chain(kernel=Langevin(noise_scale=0.0), start="uniform")
    assert langevin.climb_log
    fixed = algorithms.dale_fixed(BALL, nu=0.0, loss="cross-entropy", sampler=langevin)
    same(descend(fixed), descend(algorithms.pgd(BALL)))
    same(descend(fixed), descend(None, plain_pgd_training), 1e-10)
    small = algorithms.dale_fixed(BALL, nu=0.0, loss="cross-entropy", noise_scale=0.0)
    same(descend(small), descend(algorithms.pgd(BALL, sampler=pgd(start="gaussian"))))
    # the dual row with its multiplier at zero; the clean images ride along, which moves sums by a rounding
    dual = algorithms.dale(BALL, rho=100.0, loss="cross-entropy", sampler=langevin, dual_initial=0.0)
    same(descend(dual), descend(algorithms.pgd(BALL)), 1e-12)


def test_dale_with_noise_is_not_pgd():
    for row in (algorithms.dale_fixed, algorithms.dale):
        with pytest.raises(UsageError, match=r"noise_scale \(c\) or temperature \(T\), not both"):
            row(BALL, noise_scale=1e-3, temperature=1.0)
    noisy = algorithms.dale_fixed(BALL, nu=0.0, loss="cross-entropy", noise_scale=1.0)
    quiet = algorithms.dale_fixed(BALL, nu=0.0, loss="cross-entropy", noise_scale=0.0)
    assert not torch.equal(descend(noisy)[0], descend(quiet)[0])


def test_dale_at_a_fixed_multiplier_is_dale_fixed():
    """nu * (loss - rho) and nu * loss have the same gradient."""
    for loss in ("kl", "cross-entropy"):
        dual = algorithms.dale(BALL, rho=0.3, loss=loss, dual_initial=0.7)
        same(descend(dual), descend(algorithms.dale_fixed(BALL, nu=0.7, loss=loss)), 1e-8)


def test_trades_is_dale_fixed_without_noise():
    """KL to climb and to descend: TRADES with beta = 1 is DALE at nu = 1."""
    weights = descend(algorithms.trades(BALL, beta=1.0))
    quiet = algorithms.dale_fixed(BALL, nu=1.0, sampler=pgd(start="gaussian"))
    same(descend(quiet), weights)


def test_trades_with_weight_zero_is_erm():
    same(descend(algorithms.trades(BALL, beta=0.0)), descend(algorithms.erm()))
    assert algorithms.trades(BALL, beta=0.0).perturb(make_model(), make_batch(), 0) is None


def test_alp_without_pairing_is_pgd():
    same(descend(algorithms.alp(BALL, weight=0.0)), descend(algorithms.pgd(BALL)))
    tiny = descend(algorithms.alp(BALL, weight=1e-12))
    same(tiny, descend(algorithms.pgd(BALL)), 1e-9)


def test_mart_and_clp_without_their_terms():
    assert algorithms.clp(BALL, weight=0.0).perturb(make_model(), make_batch(), 0) is None
    same(descend(algorithms.clp(BALL, weight=0.0)), descend(algorithms.erm()))
    model, batch = make_model(), make_batch()
    row = algorithms.mart(BALL, weight=0.0)
    delta = row.perturb(model, batch, 0)
    q = model(batch.images + delta[0]).softmax(1)
    rival = q.scatter(1, batch.labels[:, None], 0.0).amax(1)
    expected = (-q[torch.arange(6), batch.labels].log() - (1 - rival + 1e-4).log()).mean()
    torch.testing.assert_close(row.lagrangian(model, batch, delta, ()).loss, expected)


def test_rows_of_k_draws_are_ordered():
    """mean <= tilted and cvar and lambda* <= max, on the same draws."""
    model, batch = make_model(), make_batch()
    losses = {}
    for name, options in (
        ("augment", {"sampler": algorithms.worst_of_k(BALL).sampler}),
        ("term", {}),
        ("cvar", {}),
        ("worst-of-k", {}),
        ("dale-optimal", {"rho": 9.0, "loss": "cross-entropy", "candidates": "uniform", "num_samples": 10}),
    ):
        row = build(name, BALL, **options)
        losses[name] = row(model, batch.images, batch.labels, row.initial_duals(), key=3).robust.item()
    for middle in ("term", "cvar", "dale-optimal"):
        assert losses["augment"] < losses[middle] < losses["worst-of-k"]


def test_one_of_many_limits_are_equal():
    batch, model = make_batch(), make_model()
    value = {}
    for name, options in (
        ("worst-of-k", {}),
        ("cvar", {"beta": 0.05}),
        ("term", {"t": 1e6}),
        ("cvar-all", {"beta": 1.0}),
        ("term-zero", {"t": 0.0}),
    ):
        row = build(name.partition("-all")[0].partition("-zero")[0], BALL, **options)
        value[name] = row(model, batch.images, batch.labels, key=1).loss.item()
    assert value["worst-of-k"] == pytest.approx(value["cvar"]) == pytest.approx(value["term"])
    assert value["cvar-all"] == pytest.approx(value["term-zero"])


def test_constraints_of_the_dale_rows():
    row = algorithms.dale(BALL, rho=0.1, min_accuracy=0.9, dual_step_size=0.2, dual_upper=5.0, tighten=False)
    options = {"step_size": 0.2, "upper": 5.0, "tighten": False}
    assert row.constraints == (loss_limit(0.1, **options), accuracy_limit(0.9, **options))
    by_class = algorithms.dale(BALL, rho=(0.1, 0.2, 0.3, 0.4), by="class", dual_frequency="epoch")
    assert by_class.constraints == (loss_limit((0.1, 0.2, 0.3, 0.4), by="class", frequency="epoch"),)
    step = by_class(make_model(), *_xy(), by_class.initial_duals(num_classes=4), key=0)
    assert step.violations[0].members.tolist() == [2.0, 2.0, 1.0, 1.0]
    assert algorithms.dale_optimal(BALL, min_accuracy=(0.5,) * 4, by="class").constraints[0].on_accuracy
    for name in ("dale", "dale-optimal"):
        with pytest.raises(UsageError, match="give rho"):
            build(name, BALL)
    with pytest.raises(UsageError, match="did you mean 'kl'"):
        algorithms.dale(BALL, rho=0.1, loss="kll")
    # a loss of one's own, which cannot be climbed in the log, with a sampler that does not
    own = algorithms.dale(BALL, rho=0.1, loss=Margin(), sampler=pgd())
    assert own.robust_loss == own.perturbation_loss == Margin()
    with pytest.raises(UsageError, match="climb_log=False"):
        algorithms.dale(BALL, rho=0.1, loss=Margin())


def _xy() -> tuple[Tensor, Tensor]:
    return make_batch().images, make_batch().labels


def test_rows_by_name():
    assert find_row("dale_fixed") is find_row("DALE-Fixed") is algorithms.dale_fixed
    with pytest.raises(UsageError, match="did you mean 'trades'"):
        find_row("tradse")
    with pytest.raises(UsageError, match="did you mean 'beta'"):
        build("trades", BALL, betta=3.0)
    assert options_of(find_row("trades"))["beta"] is float
    assert all(build(n, BALL, **({"rho": 0.1} if "rho" in options_of(ROWS[n]) else {})).name == n for n in ROWS)


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"erm"}))
def test_rows_that_need_a_set_say_so(name):
    options = {"rho": 0.1} if "rho" in options_of(ROWS[name]) else {}
    with pytest.raises(UsageError, match="needs a perturbation set"):
        build(name, None, **options)


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if {*SAMPLING} & {*options_of(row)}])
def test_what_a_row_makes_its_own_sampler_of_is_refused_beside_another(name: str) -> None:
    valid = options_of(ROWS[name])
    promise = {"rho": 0.1} if "rho" in valid else {}
    values = {"start": "zero", "candidates": "uniform", "num_samples": 2, "steps": 5}
    build(name, BALL, sampler=pgd(), **promise)  # alone it is taken
    for option in [o for o in SAMPLING if o in valid]:
        build(name, BALL, **promise, **{option: values.get(option, 0.1)})  # and so is the option
        with pytest.raises(UsageError, match=f"{option} would do nothing beside a sampler"):
            build(name, BALL, sampler=pgd(), **promise, **{option: values.get(option, 0.1)})


def test_options_on_top_of_a_recipe_replace_what_they_are_given_instead_of() -> None:
    usual = {"steps": 7, "step_size": 0.1, "noise_scale": 1e-3, "rho": 0.5, "tighten": False}
    assert overlay(usual, {}) == usual
    assert overlay(usual, {"steps": 3}) == usual | {"steps": 3}
    assert overlay(usual, {"sampler": pgd()}) == {"rho": 0.5, "tighten": False, "sampler": pgd()}
    assert overlay(usual, {"temperature": 0.1, "min_accuracy": 0.9}) == {
        "steps": 7,
        "step_size": 0.1,
        "tighten": False,
        "temperature": 0.1,
        "min_accuracy": 0.9,
    }
    # what is given together stays together, for the row to judge
    both = {"rho": 0.1, "min_accuracy": 0.9, "sampler": pgd(), "steps": 3}
    assert overlay(usual, both) == {"tighten": False} | both
    assert overlay({"norm_budget": 2.0}, {"gamma": 0.1}) == {"gamma": 0.1}
    assert overlay(usual, {"candidates": "chain"}) == usual | {"candidates": "chain"}
    assert overlay(usual, {"candidates": "uniform"}) == {"rho": 0.5, "tighten": False, "candidates": "uniform"}


def test_a_chain_is_refused_where_candidates_are_uniform() -> None:
    row = build("dale-optimal", BALL, rho=0.1, candidates="uniform", num_samples=3)
    assert row.sampler == UniformNoise(num_samples=3)
    with pytest.raises(UsageError, match="steps, start would do nothing beside candidates='uniform'"):
        build("dale-optimal", BALL, rho=0.1, candidates="uniform", steps=5, start="zero")


def my_row(perturbations: PerturbationSet, *, strength: float = 2.0) -> Objective:
    return Objective(
        name="mine",
        perturbations=perturbations,
        sampler=fgsm(perturbations.radius),
        perturbation_loss=CrossEntropy(),
        robust_loss=CrossEntropy(),
        robust_weight=strength,
    )


def not_a_row(perturbations: PerturbationSet) -> float:
    return 3.0


def test_a_row_of_ones_own_by_its_import_path(monkeypatch):
    monkeypatch.setitem(sys.modules, "rows_of_mine", sys.modules[__name__])
    row = build("rows_of_mine:my_row", Rotation(), strength=3.0)
    assert row == my_row(Rotation(), strength=3.0)
    with pytest.raises(UsageError, match="did you mean 'strength'"):
        build("rows_of_mine:my_row", Rotation(), strenght=3.0)
    with pytest.raises(UsageError, match="a row returns a dale"):
        build("rows_of_mine:not_a_row", Rotation())
    with pytest.raises(UsageError, match="cannot import"):
        build("rows_of_mine:nothing", Rotation())


def test_augmentation_takes_any_fixed_noise():
    row = build("augment", BALL, sampler=GaussianNoise(std=0.2))
    assert row(make_model(), *_xy(), key=0).loss.isfinite()
