"""The fast path is held to the plain one, on the CPU, where CI can see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

from dale import algorithms, random
from dale.batch import Batch
from dale.compiling import as_it_is
from dale.constraints import Dual
from dale.folding import Replica, replicate
from dale.models import create_model
from dale.objectives import Objective
from dale.perturbations import L2, Linf
from dale.random import Key
from dale.samplers import Chain, Langevin, Mixture, Sampler, fgsm, pgd
from dale.training import SGD, Averaging, TrainState
from dale.training.averaging import AveragedModel
from dale.training.fast import (
    COMPILERS,
    CapturedStep,
    FastStep,
    FilteredStep,
    _limit_compilers,
    _restore,
    _snapshot,
    make_step,
)
from dale.training.steps import PlainStep

CPU = torch.device("cpu")


def batch(size: int = 8) -> Batch:
    images = random.uniform(random.key(1), torch.arange(size), (3, 16, 16))
    return Batch.of(images, torch.arange(size) % 10)


def network(name: str = "resnet18") -> torch.nn.Module:
    """A network whose BatchNorm statistics are not the initial ones."""
    model = create_model(name, channels=3, size=16, num_classes=10)
    index = torch.arange(1)
    for number, module in enumerate(model.modules()):
        if isinstance(module, torch.nn.BatchNorm2d):
            key = random.key(number)
            module.running_mean.copy_(0.1 * random.normal(key, index, module.running_mean.shape)[0])
            module.running_var.copy_(random.uniform(key, index, module.running_var.shape, low=0.5, high=2.0)[0])
    return model


def state_of(model: torch.nn.Module, objective: Objective) -> TrainState:
    average = AveragedModel(model, Averaging())
    return TrainState(model, SGD(learning_rate=0.01).build(model), objective.initial_duals(10), average)


def test_gradients_of_the_replica_agree_to_float32_rounding() -> None:
    model = network()
    replica = replicate(model, channels_last=True)
    assert isinstance(replica, Replica)
    images = batch().images.requires_grad_(True)
    model.eval()
    gradients = [torch.autograd.grad(f(images).logsumexp(1).sum(), images)[0] for f in (model, replica)]
    assert torch.allclose(*gradients, rtol=1e-3, atol=1e-5 * float(gradients[0].abs().max()))
    assert float((gradients[0].sign() != gradients[1].sign()).float().mean()) < 1e-3


@pytest.mark.parametrize("ball", [Linf(epsilon=8 / 255), L2(epsilon=0.5)], ids=repr)
def test_perturbations_of_the_replica_agree_with_the_models(ball: Linf | L2) -> None:
    model = network()
    objective = algorithms.dale(ball, rho=0.5, loss="cross-entropy", noise_scale=0.0)
    replica = replicate(model, channels_last=True)
    assert isinstance(replica, Replica)
    plain, fast = (objective.perturb(f, batch(), 3) for f in (model, replica))
    assert plain is not None
    assert fast is not None
    # a coordinate whose gradient is zero up to rounding may take its step either way
    assert float(((plain - fast).abs() > 1e-4).float().mean()) < 0.01


@pytest.mark.parametrize("filtered", [True, False])
def test_one_training_step_agrees_with_the_plain_one(filtered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU where Winograd's method pays, and on one where it does not."""
    monkeypatch.setattr("dale.winograd.pays", lambda: filtered)
    objective = algorithms.pgd(Linf(epsilon=8 / 255), steps=3).for_run(10, 1)
    results = []
    for fast in ("off", "on"):
        model = network()
        step, line = make_step(model, (3, 16, 16), objective, torch.float32, CPU, fast)  # type: ignore[arg-type]
        assert line == ""
        assert type(step) is (PlainStep if fast == "off" else FilteredStep if filtered else FastStep)
        state = state_of(model.train(), objective)
        step(state, batch(), random.key(0))
        results.append(state)
    plain, quick = results
    assert float(quick.totals["loss"]) == pytest.approx(float(plain.totals["loss"]), rel=1e-3)
    for mine, theirs in zip(quick.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-3 * max(1.0, float(theirs.detach().abs().max())))


def test_a_run_that_promises_its_bits_tries_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock would decide between two ways to compute that agree to rounding only."""
    monkeypatch.setattr("dale.winograd.pays", lambda: pytest.fail("looked at the clock"))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # which it sets
    objective = algorithms.pgd(Linf(epsilon=8 / 255), steps=1)
    step, _ = make_step(network(), (3, 16, 16), objective, torch.float32, CPU, "on", 10, by_trial=False)
    assert type(step) is FastStep
    cuda = torch.device("cuda")
    captured, _ = make_step(network(), (3, 16, 16), objective, torch.float32, cuda, "auto", 10, by_trial=False)
    assert not torch.backends.cudnn.benchmark
    assert isinstance(captured, CapturedStep)
    assert captured.steps is None


@pytest.mark.parametrize(("fast", "steps"), [("auto", 10), ("on", None)])
def test_asked_for_the_fast_path_is_compiled_however_short_the_run(
    fast: Literal["auto", "on"], steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)  # which it sets
    objective = algorithms.pgd(Linf(epsilon=8 / 255), steps=1)
    step, line = make_step(network(), (3, 16, 16), objective, torch.float32, torch.device("cuda"), fast, 10)
    assert isinstance(step, CapturedStep)
    assert step.steps == steps  # None: not decided by the length
    assert "capturing" in line


def test_compilers_are_few_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "compile_threads", 32)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "32")
    _limit_compilers()
    assert inductor.compile_threads == 32
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    _limit_compilers()
    assert inductor.compile_threads == COMPILERS
    inductor.compile_threads = 2
    _limit_compilers()
    assert inductor.compile_threads == 2


def test_the_replica_follows_the_weights() -> None:
    objective = algorithms.pgd(Linf(epsilon=8 / 255), steps=1)
    model = network()
    step, _ = make_step(model, (3, 16, 16), objective, torch.float32, CPU, "on")
    assert isinstance(step, FastStep)
    before = step.replica(batch().images)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    step.perturb(model, batch(), random.key(0))
    after = step.replica(batch().images)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, model.eval()(batch().images), atol=1e-4 * float(after.abs().max()))


@pytest.mark.parametrize(
    "sampler",
    [
        Chain(kernel=Langevin(noise_scale=0.01)),
        pgd(3),
        Chain(start="away", steps=2),
        Mixture(samplers=(pgd(2), fgsm(8 / 255))),
    ],
    ids=["langevin with noise", "pgd", "away", "mixture"],
)
def test_compiled_functions_and_a_key_on_the_device_change_nothing(sampler: Sampler) -> None:
    """What a captured step uses: traced whole, without a graph break, and with the key as a tensor."""
    model = create_model("convnet", channels=3, size=16, num_classes=10)
    replica = replicate(model, channels_last=True)
    assert isinstance(replica, Replica)
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.5, sampler=sampler)
    plain = objective.perturb(replica, batch(), random.key(5))
    replica.compiler = functools.cache(functools.partial(torch.compile, backend="aot_eager", fullgraph=True))
    word = random.key(5).word
    assert isinstance(word, int)
    compiled = objective.perturb(replica, batch(), Key(torch.tensor(word)))
    assert plain is not None
    assert compiled is not None
    assert torch.equal(plain, compiled)


# dynamo looks at the logits' .grad behind a handler of its own, which a warning made an error does not reach
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_step_whose_parts_are_compiled_changes_nothing() -> None:
    """Passes, Lagrangian, ascent and sums, each traced whole; with the key on the device, nothing is compiled twice."""
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.5, steps=2).for_run(10, 1)
    calls = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal calls
        calls += 1
        return lookup_backend("aot_eager")(graph, inputs)

    states = []
    for compiled in (False, True):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            layers = (nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, 10))
            model = nn.Sequential(*layers)
        replica = replicate(model, channels_last=True)
        assert isinstance(replica, Replica)
        step = FastStep(objective, torch.float32, CPU, replica)
        if compiled:
            step.compiler = functools.cache(functools.partial(torch.compile, backend=backend, fullgraph=True))
            replica.compiler = step.compiler
        state = state_of(model, objective)
        for number in range(3):
            word = random.key(number).word
            step(state, batch(), Key(torch.tensor(word) if compiled else word))
            if compiled and number == 0:
                first = calls
        states.append(state)
    plain, quick = (state.tensors() for state in states)
    assert plain.keys() == quick.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, quick[name]), name
    assert calls == first > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_rows_and_limits_share_the_compiled_passes() -> None:
    """The large graph, of the network, is the same for all of them: a compile cache serves every row of a table."""
    ball, passes, losses = Linf(epsilon=8 / 255), [], []

    def backend(kept: list[str], graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        kept.append(graph.print_readable(print_output=False))
        return graph

    for objective in (
        algorithms.dale(ball, rho=0.5, steps=1),
        algorithms.dale(ball, rho=0.8, steps=1),
        algorithms.dale_fixed(ball, nu=0.3, steps=1),
        algorithms.trades(ball, steps=1),
    ):
        torch.compiler.reset()
        kept: dict[object, list[str]] = {}

        def compiler(function, kept=kept):  # type: ignore[no-untyped-def]
            own = functools.partial(backend, kept.setdefault(function, []))
            return torch.compile(function, backend=own, fullgraph=True)

        model = network("convnet")
        step = FastStep(objective.for_run(10, 1), torch.float32, CPU, replicate(model))  # type: ignore[arg-type]
        step.compiler = functools.cache(compiler)
        step(state_of(model, objective), batch(), random.key(0))
        passes.append(kept[Objective.predict])
        losses.append(kept[Objective.evaluate])
    assert len(passes[0]) == 1
    assert all(found == passes[0] for found in passes)
    assert losses[0] != losses[1]


def test_bfloat16_finds_perturbations_as_strong() -> None:
    model = network("convnet")
    data = batch(64)
    objective = algorithms.pgd(Linf(epsilon=16 / 255), steps=5)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        replica = replicate(model, dtype=dtype, channels_last=True)
        assert isinstance(replica, Replica)
        delta = objective.perturb(replica, data, 0)
        assert delta is not None
        with torch.no_grad():
            logits = model.eval()(data.images + delta[0])
        losses.append(float(torch.nn.functional.cross_entropy(logits, data.labels)))
    with torch.no_grad():
        clean = float(torch.nn.functional.cross_entropy(model(data.images), data.labels))
    assert losses[1] - clean > 0.9 * (losses[0] - clean) > 0.0


def test_the_state_comes_back_whole_after_the_warm_up_of_a_capture() -> None:
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.5, steps=1).for_run(10, 1)
    model = network("convnet").train()
    state = state_of(model, objective)
    step = PlainStep(objective, torch.float32, CPU)
    step(state, batch(), random.key(0))  # buffers and totals exist
    state.duals = tuple(Dual(*(t.clone() for t in vars(dual).values())) for dual in state.duals)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    saved = _snapshot(state)
    duals = state.duals
    step(state, batch(), random.key(1))
    state.duals = duals  # as a captured step does
    assert any(not torch.equal(before[name], tensor) for name, tensor in state.tensors().items())
    _restore(state, saved)
    after = state.tensors()
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name


@pytest.mark.parametrize("broken", ["potential", "predict", "_conclude", "_move"])
def test_where_the_compiler_fails_the_step_is_captured_as_it_is(broken: str) -> None:
    """Whichever part it fails at: that is said once, and the state is as if nothing had been tried."""
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.5, steps=1).for_run(10, 1)
    model = network("convnet").train()
    replica = replicate(model)
    assert isinstance(replica, Replica)
    step, said = CapturedStep(objective, torch.float32, CPU, replica), list[str]()
    step.say = said.append
    step.word = torch.zeros((), dtype=torch.int64)
    state = state_of(model, objective)
    before = {name: tensor.clone() for name, tensor in state.tensors().items()}
    duals = state.duals

    def no_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    def compiler(function: Callable[..., object]) -> Callable[..., object]:
        name = getattr(function, "func", function).__name__
        return torch.compile(function, backend=no_compiler) if name == broken else function

    step._compile_by(compiler)
    with torch.random.fork_rng([]):
        step._warm_up(state, batch(), _snapshot(state))
    assert len(said) == 1
    assert "Failed to find C compiler" in said[0]
    assert not step.compiled
    assert step.compiler is replica.compiler is as_it_is
    assert state.duals is duals
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before.get(name, torch.zeros_like(tensor))), name


def test_what_fails_without_a_compiler_fails() -> None:
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.5, steps=1).for_run(10, 1)
    model = network("convnet").train()
    replica = replicate(model)
    assert isinstance(replica, Replica)
    step = CapturedStep(objective, torch.float32, CPU, replica, compiled=False)
    step.word = torch.zeros((), dtype=torch.int64)
    state = state_of(model, objective)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        step._warm_up(state, Batch.of(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)), _snapshot(state))


def test_a_model_that_cannot_be_traced_takes_the_plain_path_and_says_why() -> None:
    class Branching(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3 * 16 * 16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            flat = x.flatten(1)
            return self.fc(flat if flat.mean() > 0 else -flat)  # type: ignore[no-any-return]

    objective = algorithms.pgd(Linf(epsilon=8 / 255))
    step, line = make_step(Branching(), (3, 16, 16), objective, torch.float32, CPU, "on")
    assert type(step) is PlainStep
    assert "cannot trace" in line
    in_train_mode = algorithms.pgd(Linf(epsilon=8 / 255), sampler=Chain(mode="train", climb_log=False))
    step, line = make_step(network("convnet"), (3, 16, 16), in_train_mode, torch.float32, CPU, "on")
    assert type(step) is PlainStep
    assert "train mode" in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captured steps need a GPU")
def test_the_captured_step_agrees_with_the_plain_one_on_a_gpu() -> None:
    device = torch.device("cuda")
    objective = algorithms.dale(Linf(epsilon=8 / 255), rho=0.5, steps=3).for_run(10, 1)
    losses = []
    for fast in ("off", "on"):
        model = network().to(device)
        step, _ = make_step(model, (3, 16, 16), objective, torch.float32, device, fast)  # type: ignore[arg-type]
        captured = isinstance(step, CapturedStep)
        assert captured == (fast == "on")
        state = TrainState(
            model.train(),
            SGD(learning_rate=0.01).build(model, captured=captured),
            objective.initial_duals(10, 0, device),
        )
        for number in range(3):
            step(state, batch(32).to(device), random.key(number))
        losses.append(float(state.totals["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
