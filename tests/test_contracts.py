"""What every component promises, driven by one table: a component without an entry fails the first test."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from dale import algorithms, random
from dale.aggregators import Aggregator, CVaR, LambdaStar, MaxOf, MeanOf, Tilted
from dale.attacks.apgd import AutoPGD, SparseAutoPGD
from dale.attacks.targeted import TargetedDLR, TargetMargin
from dale.batch import Batch
from dale.components import Component, dump_yaml, known, load_yaml
from dale.constraints import Constraint, accuracy_limit, loss_limit
from dale.losses import (
    DLR,
    KL,
    BoostedCrossEntropy,
    Clipped,
    CrossEntropy,
    ErrorProbability,
    FunctionLoss,
    KLReverse,
    LogitPairing,
    Loss,
    Margin,
    Mart,
    WeightedSum,
    ZeroOne,
)
from dale.objectives import Objective
from dale.perturbations import L1, L2, Composition, Linf, PerturbationSet, Rotation, Scaling, Translation
from dale.samplers import (
    Chain,
    CutoutNoise,
    GaussianNoise,
    GeneratorNoise,
    Hmc,
    Kernel,
    Langevin,
    Mala,
    Mixture,
    PatchNoise,
    Sampler,
    UniformNoise,
    fgsm,
    langevin,
    pgd,
)

# The table: every concrete component of these rooms, in at least one setting.
TABLE: dict[type, tuple[Component, ...]] = {
    PerturbationSet: (
        Linf(epsilon=0.1),
        L2(epsilon=0.8),
        L1(epsilon=3.0),
        L1(epsilon=3.0, active=1.0),
        Rotation(),
        Translation(),
        Scaling(),
        Composition(parts=(Rotation(degrees=10.0), Translation(), Scaling(limit=0.1))),
    ),
    Loss: (
        CrossEntropy(),
        CrossEntropy(label_smoothing=0.1),
        KL(),
        KLReverse(),
        ErrorProbability(),
        Margin(),
        DLR(),
        LogitPairing(),
        BoostedCrossEntropy(),
        Mart(),
        ZeroOne(),
        Clipped(loss=KL(), bound=0.5),
        WeightedSum(losses=(CrossEntropy(), LogitPairing()), weights=(1.0, 0.5)),
        FunctionLoss(path="contract_parts:squared"),
        TargetMargin(),
        TargetedDLR(rank=2),
    ),
    Kernel: (
        Langevin(),
        Langevin(noise_scale=0.1),
        Langevin(drift="gradient", noise="gaussian", temperature=1e-3, place="outside"),
        Mala(step_size=1e-4),
        Hmc(step_size=1e-2),
        AutoPGD(),
        SparseAutoPGD(),
    ),
    Sampler: (
        fgsm(0.1),
        pgd(3),
        langevin(3),
        Chain(steps=3, num_chains=2, keep="all", burn_in=1, kernel=Langevin(noise_scale=1e-2)),
        UniformNoise(num_samples=3),
        GaussianNoise(std=(0.1, 0.2, 0.3), num_samples=2),
        PatchNoise(size=3),
        CutoutNoise(size=3, fill=0.5),
        GeneratorNoise(generator="contract_parts:generator", latent=3),
        Mixture(samplers=(langevin(3), fgsm(0.1), UniformNoise()), shares=(2.0, 1.0, 1.0)),
    ),
    Aggregator: (MeanOf(), MaxOf(), CVaR(beta=0.3), Tilted(t=2.0), LambdaStar(gamma=0.1), LambdaStar(norm_budget=1.5)),
    Constraint: (
        loss_limit(0.1),
        loss_limit((0.1, 0.2), by="class", upper=3.0),
        accuracy_limit(0.9, frequency="epoch"),
    ),
    Objective: tuple(
        algorithms.build(name, Linf(epsilon=0.1), **({"rho": 0.2} if name in ("dale", "dale-optimal") else {}))
        for name in sorted(algorithms.ROWS)
    ),
}
# Kernels that belong to sets of another shape are tried on these.
HOME = {SparseAutoPGD: L1(epsilon=3.0)}


@pytest.mark.parametrize("base", TABLE, ids=lambda base: base.__name__)
def test_every_component_has_an_entry(base):
    missing = set(known(base).values()) - {type(entry) for entry in TABLE[base]}
    assert not missing, f"no entry in the table for {sorted(cls.__name__ for cls in missing)}"


ENTRIES = [entry for entries in TABLE.values() for entry in entries]
SETS, LOSSES, KERNELS, SAMPLERS = TABLE[PerturbationSet], TABLE[Loss], TABLE[Kernel], TABLE[Sampler]
AGGREGATORS, OBJECTIVES = TABLE[Aggregator], TABLE[Objective]
FREE = (GaussianNoise, PatchNoise, CutoutNoise, GeneratorNoise)


def short(entry: object) -> str:
    return entry.name if isinstance(entry, Objective) else repr(entry)[:60]


def squared(logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
    return (logits - clean).square().sum(dim=1)


class Generator(nn.Module):
    """Three numbers to an image."""

    def forward(self, z: Tensor) -> Tensor:
        return 0.2 * torch.stack([torch.sin(z.sum(dim=1) + i) for i in range(108)], dim=1).view(-1, 3, 6, 6)


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """The user's own function and module that the table names by import path."""
    module = types.ModuleType("contract_parts")
    module.squared, module.generator = squared, Generator()
    monkeypatch.setitem(sys.modules, "contract_parts", module)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """BatchNorm and dropout, in train mode but for one module that its owner froze."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(64, 5)
        )
    model[1].running_var.fill_(0.7)
    model.to(dtype).train()
    model[1].eval()
    return model


def make_batch(dtype: torch.dtype = torch.float64, count: int = 5) -> Batch:
    images = random.uniform(random.key(1), torch.arange(count), (3, 6, 6)).to(dtype)
    images[0, 0, 0, :3] = torch.tensor([0.0, 1.0, 0.5])
    index = torch.tensor([3, 17, 4, 1000, 8])[:count]
    return Batch(images, torch.arange(count) % 5, index, torch.arange(count) % 2)


@dataclass(frozen=True)
class Case:
    """A sampler, the set it draws from, and the loss it climbs."""

    sampler: Sampler
    perturbations: PerturbationSet
    loss: Loss

    def __call__(self, model, batch: Batch, key: int = 9) -> Tensor:
        return self.sampler(model, batch, self.perturbations, self.loss, key=key)


def cases() -> list[Case]:
    """Every sampler on the l-infinity ball, every kernel in a chain, every set under PGD, every loss climbed."""
    found = [Case(sampler, Linf(epsilon=0.1), CrossEntropy()) for sampler in SAMPLERS]
    found += [Case(Chain(kernel=k, steps=4), HOME.get(type(k), Linf(epsilon=0.1)), CrossEntropy()) for k in KERNELS]
    for perturbations in SETS:
        found += [Case(sampler, perturbations, KL()) for sampler in (pgd(3), langevin(3), UniformNoise(num_samples=2))]
    climbed = [loss for loss in LOSSES if not isinstance(loss, ZeroOne)]
    return found + [Case(pgd(2, start="gaussian"), L2(epsilon=0.5), loss) for loss in climbed]


CASES = cases()
every_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{short(c.sampler)}-{short(c.perturbations)}-{short(c.loss)}"
)


@pytest.mark.parametrize("entry", ENTRIES, ids=short)
def test_yaml_round_trip(entry):
    base = next(base for base in TABLE if isinstance(entry, base))
    assert load_yaml(dump_yaml(entry), base, trust=True) == entry
    assert hash(entry) == hash(load_yaml(dump_yaml(entry), base, trust=True))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
def test_draws_lie_in_their_support(case, dtype):
    batch = make_batch(dtype)
    delta = case(make_model(dtype), batch)
    assert delta.dtype == dtype
    assert delta.shape == (case.sampler.num_draws, 5, *case.perturbations.shape((3, 6, 6)))
    assert bool(delta.isfinite().all())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-9}[dtype]
    for draw in delta:
        moved = case.perturbations.apply(batch.images, draw)
        assert moved.shape == batch.images.shape
        assert moved.dtype == dtype
        assert bool(((moved >= -tolerance) & (moved <= 1 + tolerance)).all())
        if not isinstance(case.sampler, FREE):
            assert bool(case.perturbations.contains(draw, batch.images, tolerance).all())
    assert case.sampler.free == isinstance(case.sampler, FREE)


@every_case
def test_draws_depend_on_key_and_example_and_not_on_the_batch(case):
    model, batch = make_model(), make_batch()
    delta = case(model, batch)
    assert torch.equal(delta, case(model, batch))
    close = {"atol": 1e-9, "rtol": 0.0}  # in float64: a matrix product may sum in another order for another size
    split = torch.cat([case(model, batch[part]) for part in (slice(0, 2), slice(2, 3), slice(3, 5))], dim=1)
    torch.testing.assert_close(split, delta, **close)
    order = torch.tensor([4, 2, 0, 3, 1])
    torch.testing.assert_close(case(model, batch[order]), delta[:, order], **close)


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if s != fgsm(0.1)], ids=short)
def test_another_key_or_another_example_draws_anew(sampler):
    case, model, batch = Case(sampler, Linf(epsilon=0.1), CrossEntropy()), make_model(), make_batch()
    delta = case(model, batch)
    assert not torch.equal(case(model, batch, key=10), delta)
    renumbered = Batch(batch.images, batch.labels, batch.index + 1)
    assert not torch.equal(case(model, renumbered), delta)


class Failing(nn.Module):
    """A model that breaks down at its second call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("broken down")
        return self.inner(x)


@every_case
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("failing", [False, True], ids=["sound", "failing"])
def test_nothing_is_left_behind(case, mode, failing):
    """Modes module by module, gradients, flags, buffers, the input and the global generator are as they were."""
    batch, inner = make_batch(), make_model()
    model = Failing(inner) if failing else inner
    inner[5].weight.grad = torch.full_like(inner[5].weight, 2.0)
    inner[0].bias.requires_grad_(False)
    before = {
        "modes": [m.training for m in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "weights": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "images": batch.images.clone(),
        "generator": torch.get_rng_state(),
        "grad": torch.is_grad_enabled(),
    }
    asks_twice = case.sampler.needs_loss and (case.loss.needs_clean or getattr(case.sampler, "steps", 2) > 1)
    with pytest.raises(RuntimeError, match="broken down") if failing and asks_twice else nullcontext():
        replace(case, sampler=replace(case.sampler, mode=mode))(model, batch)
    assert [m.training for m in model.modules()] == before["modes"]
    assert [p.requires_grad for p in model.parameters()] == before["flags"]
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), before["weights"], strict=True))
    assert all(torch.equal(b, c) for b, c in zip(model.buffers(), before["buffers"], strict=True))
    assert torch.equal(batch.images, before["images"])
    assert not batch.images.requires_grad
    assert torch.equal(torch.get_rng_state(), before["generator"])
    assert torch.is_grad_enabled() == before["grad"]
    assert torch.equal(inner[5].weight.grad, torch.full_like(inner[5].weight, 2.0))
    assert all(p.grad is None for p in inner.parameters() if p is not inner[5].weight)


@every_case
def test_memory_layout_does_not_matter(case):
    model, batch = make_model(), make_batch()
    delta = case(model, batch)
    strided = torch.zeros(10, 3, 12, 6, dtype=torch.float64)[::2, :, ::2]
    strided.copy_(batch.images)
    turned = batch.images.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    last = batch.images.contiguous(memory_format=torch.channels_last)
    for images in (strided, turned, last):
        assert not images.is_contiguous()
        other = case(model, Batch(images, batch.labels, batch.index, batch.groups))
        torch.testing.assert_close(other, delta, atol=1e-9, rtol=0.0)


@every_case
def test_a_batch_of_one(case):
    model, batch = make_model(), make_batch()
    alone = case(model, batch[:1])
    assert alone.shape[1] == 1
    torch.testing.assert_close(alone, case(model, batch)[:, :1], atol=1e-9, rtol=0.0)


@pytest.mark.parametrize("perturbations", SETS, ids=short)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
def test_sets(perturbations, dtype):
    batch = make_batch(dtype)
    x, shape = batch.images, perturbations.shape((3, 6, 6))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-9}[dtype]
    drawn = perturbations.sample(x, random.key(0), batch.index)
    assert drawn.shape == (5, *shape)
    assert drawn.dtype == dtype
    assert bool(perturbations.contains(drawn, x, tolerance).all())
    assert bool(perturbations.contains(torch.zeros_like(drawn), x).all())
    torch.testing.assert_close(perturbations.project(drawn, x), drawn, atol=tolerance, rtol=0.0)
    far = (5.0 * random.normal(random.key(2), batch.index, shape)).to(dtype)
    kept = far.clone()
    projected = perturbations.project(far, x)
    assert torch.equal(far, kept)
    assert projected.dtype == dtype
    assert not bool(perturbations.contains(far, x, tolerance).any())
    assert bool(perturbations.contains(projected, x, tolerance).all())
    direction = perturbations.steepest(far)
    assert direction.shape == far.shape
    assert direction.dtype == dtype
    assert bool((direction.float() * far.float()).flatten(1).sum(dim=1).gt(0).all())
    assert not perturbations.steepest(torch.zeros_like(far)).any()
    back, momentum = perturbations.reflect(drawn, torch.ones_like(drawn), x)
    torch.testing.assert_close(back, drawn, atol=tolerance, rtol=0.0)
    assert torch.equal(momentum, torch.ones_like(drawn))
    assert perturbations.radius > 0
    # what one example's delta is, no other example's has a say in
    for part in (slice(0, 2), slice(2, 5)):
        torch.testing.assert_close(perturbations.project(far[part], x[part]), projected[part], atol=1e-6, rtol=1e-6)
        assert torch.equal(perturbations.sample(x[part], random.key(0), batch.index[part]), drawn[part])
        assert torch.equal(perturbations.steepest(far[part]), direction[part])


@pytest.mark.parametrize("loss", LOSSES, ids=short)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
def test_losses(loss, dtype):
    logits, clean = (3.0 * random.normal(random.key(k), torch.arange(8), (5,)).to(dtype) for k in (1, 2))
    labels, copies = torch.arange(8) % 5, (logits.clone(), clean.clone())
    value = loss(logits, clean, labels)
    assert value.shape == (8,)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    assert bool(value.isfinite().all())
    assert torch.equal(logits, copies[0])
    assert torch.equal(clean, copies[1])
    for log in (False, True) if loss.non_negative else (False,):
        whole = loss(logits, clean, labels, log=log)
        parts = [loss(logits[i : i + 1], clean[i : i + 1], labels[i : i + 1], log=log) for i in range(8)]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)
        strided = logits.T.contiguous().T
        torch.testing.assert_close(loss(strided, clean, labels, log=log), whole, atol=1e-6, rtol=1e-6)
    assert not loss.non_negative or bool((value >= 0).all())


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=short)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=["f32", "bf16", "f64"])
def test_aggregators(aggregator, dtype):
    losses = random.normal(random.key(4), torch.arange(7), (5,)).abs().to(dtype).requires_grad_(True)
    weights = aggregator(losses)
    assert weights.shape == losses.shape
    assert weights.dtype == torch.promote_types(dtype, torch.float32)
    assert not weights.requires_grad
    assert bool((weights >= 0).all())
    torch.testing.assert_close(weights.sum(dim=0), torch.ones(5, dtype=weights.dtype))
    plain = losses.detach()
    for example in range(5):
        torch.testing.assert_close(aggregator(plain[:, example : example + 1]), weights[:, example : example + 1])
    torch.testing.assert_close(aggregator(plain.T.contiguous().T), weights)
    assert torch.equal(aggregator(plain[:1]), torch.ones_like(weights[:1]))
    value = (weights * plain).sum(dim=0)
    assert bool((value <= plain.amax(dim=0) + 1e-6).all())
    assert bool((value >= plain.mean(dim=0, dtype=weights.dtype) - 1e-5).all())


# bfloat16 with few rows only: from sixteen on, matrix products use instructions (AMX) that some virtual machines
# announce and then refuse, which kills the process
@pytest.mark.parametrize("objective", OBJECTIVES, ids=short)
@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.float32, 5), (torch.float32, 1), (torch.float64, 5), (torch.bfloat16, 1)]
)
def test_objectives(objective, dtype, count):
    model, batch = make_model(dtype), make_batch(dtype, count)
    state, kept = torch.get_rng_state(), batch.images.clone()
    delta = objective.perturb(model, batch, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    duals = objective.initial_duals(num_classes=5)
    step = objective.lagrangian(model.eval(), batch, delta, duals)
    assert step.loss.shape == ()
    assert bool(step.loss.isfinite())
    assert step.size == count
    step.loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert any(bool(p.grad.any()) for p in model.parameters())
    assert torch.equal(batch.images, kept)
    if delta is None:
        assert objective.name == "erm"
    else:
        assert delta.shape[1:] == batch.images.shape
        assert bool(step.robust.isfinite())
        again = objective.lagrangian(model, batch, objective.perturb(model, batch, 3), duals)
        assert torch.equal(again.loss, step.loss)
    for dual, moved in zip(duals, objective.ascend(duals, step), strict=True):
        assert bool((moved.multiplier >= 0).all())
        assert not torch.equal(moved.multiplier, dual.multiplier)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=short)
def test_the_mean_over_a_batch_is_that_over_its_parts(objective):
    """In eval mode the Lagrangian is a mean over examples: halves of equal size average to the whole."""
    model, batch = make_model().eval(), make_batch(count=4)
    duals = objective.initial_duals(num_classes=5)

    def value(part: Batch) -> Tensor:
        return objective.lagrangian(model, part, objective.perturb(model, part, 3), duals).loss

    torch.testing.assert_close((value(batch[:2]) + value(batch[2:])) / 2, value(batch), atol=1e-6, rtol=0.0)
