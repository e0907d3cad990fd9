"""The fast path: the same step, at the speed of the hardware.

What it changes, and nothing else: the sampler climbs a frozen replica of the model (BatchNorm folded, the compute
dtype, channels-last, no parameter gradients), refreshed from the live weights before every step; on a GPU the keys, the
start, the potential and the moves of the chain, the Lagrangian, dual ascent and the sums are compiled, and the whole
step, from the batch to the average of the weights, is captured once as a CUDA graph and replayed. Nothing leaves the
device in between. Tests hold it to the plain path.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dale import winograd
from dale.batch import Batch
from dale.compiling import Compiler, as_it_is
from dale.constraints import Dual
from dale.errors import DaleError, told_of
from dale.faithful import unfaithful
from dale.folding import Replica, replicate
from dale.objectives import Objective, Step
from dale.random import Key
from dale.training.state import TrainState
from dale.training.steps import PlainStep

Fast = Literal["auto", "on", "off"]
WARMUP = 3  # steps before capture: they compile, choose kernels and allocate
# processes that compile kernels beside the one that writes them, which has most to do; more only stand in its way
COMPILERS = 6
# seconds a run would take operation by operation. Captured it takes half of them, compiled too less than a third (137,
# 65 and 40 ms a step; H200, ResNet-18, batch 512), and compiling up to 80, of which a cache saves most
COMPILING_PAYS = 300.0


class FastStep(PlainStep):
    """Perturb on a folded replica; everything else as in the plain path."""

    def __init__(self, objective: Objective, dtype: torch.dtype, device: torch.device, replica: Replica) -> None:
        super().__init__(objective, dtype, device)
        self.replica = replica

    def perturb(self, model: nn.Module, batch: Batch, key: Key) -> Tensor | None:
        """Draw perturbations with the replica, on the weights of this moment."""
        self.replica.refresh()
        return self.objective.perturb(self.replica, batch, key)


class FilteredStep(FastStep):
    """The replica, and wide convolutions of attack and training by Winograd's method: on a CPU where that pays."""

    def lagrangian(self, state: TrainState, batch: Batch, delta: Tensor | None) -> Step:
        """Evaluate the Lagrangian on a batch, or a part of one."""
        with winograd.MinimalFiltering():
            return super().lagrangian(state, batch, delta)


class CapturedStep(FastStep):
    """The whole step as one CUDA graph, captured at the first call and replayed from then on.

    Everything that changes between two steps lives in tensors that stay where they are: the batch, the key, the
    learning rate, the multipliers, the totals. A batch of another size than the first takes the plain path. Given the
    number of `steps` of the run, one step is timed first, and a run too short to pay for compiling is captured as it
    is. So is one that cannot be compiled here (Triton needs a C compiler, say), which is said.
    """

    def __init__(
        self,
        objective: Objective,
        dtype: torch.dtype,
        device: torch.device,
        replica: Replica,
        *,
        compiled: bool = True,
        mode: str | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(objective, dtype, device, replica)
        self.compiled = compiled
        self.mode = mode
        self.steps = steps
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, state: TrainState, batch: Batch, key: Key) -> None:
        """Replay the captured step on a batch."""
        if self.graph is None:
            self._prepare(state, batch)
        if batch.images.shape != self.images.shape:
            self.word.fill_(int(key.word))  # there, as a number it would be compiled for
            super().__call__(state, batch, Key(self.word))
            return
        self._fill(batch, key)
        self._adopt(state)
        assert self.graph is not None
        self.graph.replay()

    @torch.no_grad()
    def _adopt(self, state: TrainState) -> None:
        """Bring values that the loop changed between two steps to where the graph reads them."""
        if state.duals is not self.duals:
            for mine, theirs in zip(self.duals, state.duals, strict=True):
                for here, value in zip(vars(mine).values(), vars(theirs).values(), strict=True):
                    here.copy_(value)
            state.duals = self.duals
        if state.totals is not self.totals:
            for name, total in self.totals.items():
                total.copy_(state.totals[name]) if name in state.totals else total.zero_()
            state.totals = self.totals

    def _fill(self, batch: Batch, key: Key) -> None:
        self.images.copy_(batch.images)
        self.labels.copy_(batch.labels)
        self.index.copy_(batch.index)
        if self.groups is not None and batch.groups is not None:
            self.groups.copy_(batch.groups)
        self.word.fill_(int(key.word))

    def _prepare(self, state: TrainState, batch: Batch) -> None:
        """Run the step a few times, put the state back as it was, and capture."""
        self.images = batch.images.clone(memory_format=torch.channels_last)
        self.labels, self.index = batch.labels.clone(), batch.index.clone()
        self.groups = None if batch.groups is None else batch.groups.clone()
        self.word = torch.zeros((), dtype=torch.int64, device=self.device)
        static = Batch(self.images, self.labels, self.index, self.groups)
        state.duals = tuple(Dual(*(t.clone() for t in vars(dual).values())) for dual in state.duals)
        saved, drawn = _snapshot(state), torch.cuda.get_rng_state(self.device)
        if self.compiled and self.steps is not None:
            self.compiled = self._seconds(state, static) * self.steps > COMPILING_PAYS
            _restore(state, saved)
        if self.compiled:
            _limit_compilers()
            self._compile_by(functools.cache(functools.partial(torch.compile, dynamic=False, mode=self.mode)))
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._warm_up(state, static, saved)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step_in_place(state, static)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise DaleError(
                f"the step cannot be captured as a CUDA graph, by {told_of(error)}. --fast off (fast='off') takes the "
                "plain path"
            ) from error
        self.graph = graph
        _restore(state, saved)
        torch.cuda.set_rng_state(drawn, self.device)  # dropout's masks are those of a run that was not warmed up
        self.duals, self.totals = state.duals, state.totals

    def _compile_by(self, compiler: Compiler) -> None:
        self.compiled = compiler is not as_it_is
        self.compiler = self.replica.compiler = compiler

    def _warm_up(self, state: TrainState, batch: Batch, saved: dict[int, Tensor]) -> None:
        """Run the step a few times and put the state back as it was; what cannot be compiled runs as it is."""
        try:
            for _ in range(WARMUP):
                self._step_in_place(state, batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not self.compiled:
                raise
            reason = told_of(getattr(error, "inner_exception", error))  # which torch wraps up
            self.say(f"fast path: captured but not compiled: the compiler failed here ({reason})")
            self._compile_by(as_it_is)
            _restore(state, saved)
            self._warm_up(state, batch, saved)
        _restore(state, saved)
        state.optimiser.zero_grad(set_to_none=True)

    def _seconds(self, state: TrainState, batch: Batch) -> float:
        """The time of one step, run operation by operation; the first one loads and chooses kernels."""
        for _ in range(2):
            torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            self._step_in_place(state, batch)
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - begin

    def _step_in_place(self, state: TrainState, batch: Batch) -> None:
        """One step that leaves every tensor of the state where it is."""
        duals = state.duals
        try:
            super().__call__(state, batch, Key(self.word))
        finally:  # a step that fails leaves them where they are as well
            moved, state.duals = state.duals, duals
        for old, new in zip(duals, moved, strict=True):
            for mine, fresh in zip(vars(old).values(), vars(new).values(), strict=True):
                mine.copy_(fresh)


def _limit_compilers() -> None:
    """Start at most COMPILERS processes, unless the environment says how many."""
    import torch._inductor.config as inductor  # half as long as importing torch, for those who compile alone

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = min(inductor.compile_threads or COMPILERS, COMPILERS)


def _tensors(state: TrainState) -> list[Tensor]:
    found: list[Tensor] = [*state.model.parameters(), *state.model.buffers(), *state.totals.values()]
    for dual in state.duals:
        found += vars(dual).values()
    if state.average is not None:
        found += [*state.average.module.parameters(), *state.average.module.buffers(), state.average.updates]
    for slots in state.optimiser.state.values():
        found += [value for value in slots.values() if isinstance(value, Tensor)]
    return found


def _snapshot(state: TrainState) -> dict[int, Tensor]:
    """Copies of all tensors of the state, by identity."""
    return {id(tensor): tensor.detach().clone() for tensor in _tensors(state)}


@torch.no_grad()
def _restore(state: TrainState, saved: dict[int, Tensor]) -> None:
    """Put the copies back; what was made since (totals, an optimiser's first buffers) starts from zero."""
    for tensor in _tensors(state):
        before = saved.get(id(tensor))
        if before is None:
            tensor.detach().zero_()
        else:
            tensor.detach().copy_(before)


def make_step(
    model: nn.Module,
    shape: tuple[int, ...],
    objective: Objective,
    dtype: torch.dtype,
    device: torch.device,
    fast: Fast,
    steps: int | None = None,
    *,
    by_trial: bool = True,
) -> tuple[PlainStep, str]:
    """Return the step for a run on images of a shape and a line that says which path it is and why.

    The fast one is taken where a copy of the model, tried out, has the replica's logits and gradient. `steps`: of the
    whole run.

    `by_trial`: what pays may be tried out by the clock; a run that promises its bits may not.
    """
    plain = PlainStep(objective, dtype, device)
    if fast == "off":
        return plain, ""
    reason = _obstacle(objective)
    if reason is None:
        reason = unfaithful(model, shape, captured=device.type == "cuda")
    if reason is None:
        filtered = by_trial and device.type == "cpu" and dtype == torch.float32 and winograd.pays()
        # fused convolutions: 43.6 ms a step against 46.5 (H200, ResNet-18, batch 512)
        replica = replicate(model, dtype=dtype, channels_last=True, minimal_filtering=filtered)
        if isinstance(replica, Replica):
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            if device.type != "cuda":
                return (FilteredStep if filtered else FastStep)(objective, dtype, device, replica), ""
            torch.backends.cudnn.benchmark = by_trial
            line = "fast path: capturing the step; where the run is long enough it is compiled first, in a minute or so"
            run = steps if by_trial and fast == "auto" else None
            return CapturedStep(objective, dtype, device, replica, steps=run), line
        reason = replica
    return plain, f"fast path off: {reason}" if fast == "on" or device.type == "cuda" else ""


def _obstacle(objective: Objective) -> str | None:
    """Why a row cannot take the fast path, or None."""
    sampler: Any = objective.sampler
    if not objective.robust or sampler is None:
        return None
    if sampler.mode != "eval":
        return "the sampler runs the model in train mode"
    return None
