"""A sampler draws perturbations: lambda(delta | x, y), by a chain that climbs a loss or from a fixed distribution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor, nn

from dale.batch import Batch
from dale.compiling import Compiler, as_it_is
from dale.components import Component
from dale.errors import NumericsError, UsageError, require, require_choice
from dale.losses import CrossEntropy, Loss
from dale.modes import sampling_mode
from dale.perturbations import PerturbationSet
from dale.random import Key
from dale.random import key as make_key

Classifier = Callable[[Tensor], Tensor]

# Chains of one example are told apart by the example's number: chain c of example i draws as example i + c * 2^40.
_CHAIN_STRIDE = 1 << 40


def potential(
    model: Classifier,
    perturbations: PerturbationSet,
    loss: Loss,
    log: bool,
    x: Tensor,
    delta: Tensor,
    clean: Tensor | None,
    labels: Tensor,
) -> Tensor:
    """U(delta) of each example: the loss, or its logarithm, of the model on G(x, delta)."""
    return loss(model(perturbations.apply(x, delta)), clean, labels, log=log)


def _logits(model: Classifier, x: Tensor) -> Tensor:
    return model(x.clone())  # a model may write into its input, and x is still needed


@dataclass
class Problem:
    """What a sampler may ask while it draws: the potential U(delta), its gradient, and the set.

    A model may bring a `compiler`, a function that speeds tensor functions up; the potential, the start, the keys and
    the kernels' moves go through it. The fast path does so, and changes nothing else.

    U is the perturbation loss (or its logarithm) of each example. Gradients are per example: the potentials are summed
    over the batch, never averaged, so that a temperature does not depend on the batch size. The clean logits, constant
    during the draw, are computed once, and only where the loss compares with them.
    """

    model: Classifier
    batch: Batch
    perturbations: PerturbationSet
    loss: Loss | None
    log: bool = False
    clean_logits: Tensor | None = None
    evaluations: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.compiler: Compiler = getattr(self.model, "compiler", as_it_is)
        self._ones: Tensor | None = None
        if self.loss is not None and self.loss.needs_clean and self.clean_logits is None:
            with torch.no_grad():
                self.clean_logits = self.compiler(_logits)(self.model, self.batch.images).detach()

    @property
    def x(self) -> Tensor:
        """The clean images."""
        return self.batch.images

    @property
    def index(self) -> Tensor:
        """The examples' numbers, for random draws."""
        return self.batch.index

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example's delta."""
        return self.perturbations.shape(tuple(self.x.shape[1:]))

    def zeros(self) -> Tensor:
        """Return the perturbation that does nothing, one per example."""
        return self.x.new_zeros((len(self.batch), *self.shape))

    def project(self, delta: Tensor) -> Tensor:
        """Return the nearest point of the set."""
        return self.perturbations.project(delta, self.x)

    def repeat(self, count: int) -> Problem:
        """Return the problem with every example taken `count` times: (count * B), chain after chain."""
        if count == 1:
            return self
        b = self.batch
        offsets = torch.arange(count, device=b.index.device).repeat_interleave(len(b)) * _CHAIN_STRIDE
        groups = None if b.groups is None else b.groups.repeat(count)
        images = b.images.repeat(count, *([1] * (b.images.dim() - 1)))
        batch = Batch(images, b.labels.repeat(count), b.index.repeat(count) + offsets, groups)
        clean = None if self.clean_logits is None else self.clean_logits.repeat(count, 1)
        return Problem(self.model, batch, self.perturbations, self.loss, self.log, clean)

    def shed(self, state: dict[str, Tensor]) -> tuple[Problem, dict[str, Tensor]]:
        """Return the problem and the state of the examples worth going on with: here, all of them."""
        return self, state

    def potential(self, delta: Tensor) -> Tensor:
        """U(delta) of each example, (B,)."""
        require(self.loss is not None, "this sampler climbs a loss, and the objective gives it none")
        assert self.loss is not None
        value: Tensor = self.compiler(potential)(
            self.model, self.perturbations, self.loss, self.log, self.x, delta, self.clean_logits, self.batch.labels
        )
        return value

    def away_from_label(self) -> Tensor:
        """The gradient of the label's cross-entropy at the clean images, whatever the potential is: of its logarithm.

        It has the same direction, and does not vanish where the model is so sure that the cross-entropy does.
        """
        self.evaluations += 1
        return Problem(self.model, self.batch, self.perturbations, CrossEntropy(), True).value_and_gradient(
            self.zeros()
        )[1]

    def value(self, delta: Tensor) -> Tensor:
        """U(delta) without a gradient."""
        self.evaluations += 1
        with torch.no_grad():
            return self.potential(delta)

    def value_and_gradient(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """U(delta) and its gradient, per example. Parameter gradients are neither computed nor touched."""
        self.evaluations += 1
        with torch.enable_grad():
            delta = delta.detach().requires_grad_(True)
            value = self.potential(delta)
            gradient: Tensor | None = None
            if value.requires_grad:
                if self._ones is None:
                    self._ones = torch.ones_like(value)
                (gradient,) = torch.autograd.grad(value, delta, self._ones, allow_unused=True)
        return value.detach(), self.cut_off(delta) if gradient is None else gradient

    def cut_off(self, delta: Tensor) -> Tensor:
        """What stands for a gradient where none leads from the potential back to delta: here nothing does."""
        del delta
        raise UsageError(
            "no gradient leads from the model's output back to its input (torch.no_grad, detach or argmax cut it off): "
            "no perturbation can climb a loss of this model, nor can it be trained against one; see dale check-model"
        )


@contextmanager
def _set_aside(module: nn.Module, key: Key) -> Iterator[None]:
    """Keep BatchNorm's running statistics and the global random state as they were around draws in train mode."""
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = sorted({buffer.device.index or 0 for buffer in module.parameters() if buffer.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(key.fold("dropout").word) & 0x7FFFFFFFFFFFFFFF)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in saved:
                    buffer.copy_(before)


@dataclass(frozen=True, kw_only=True)
class Sampler(Component, ABC):
    """Draws K perturbations per example, (K, B, *shape).

    The call is final: it sets the model's mode and puts it back module by module whatever happens, computes no
    parameter gradient, and checks that what comes out is finite and lies in the declared support: the set, or for
    free noise (`free`) the image box. On an accelerator the check would stop the pipeline, and the training loop's own
    check of the loss takes its place. A sampler of your own writes `draw`.
    """

    mode: Literal["eval", "train"] = "eval"

    def __post_init__(self) -> None:
        require_choice(self, ("eval", "train"), mode=self.mode)

    @property
    def free(self) -> bool:
        """Whether draws may leave the set and are held to the image box alone."""
        return False

    @property
    def num_draws(self) -> int:
        """K, the number of perturbations per example."""
        return 1

    @property
    def log(self) -> bool:
        """Whether the sampler climbs the logarithm of the loss."""
        return False

    @property
    def needs_loss(self) -> bool:
        """Whether the sampler climbs a loss at all."""
        return False

    @abstractmethod
    def draw(self, problem: Problem, key: Key) -> Tensor:
        """Return the perturbations, (K, B, *shape)."""

    @final
    def __call__(
        self,
        model: Classifier,
        batch: Batch,
        perturbations: PerturbationSet,
        loss: Loss | None = None,
        *,
        key: Key | int,
    ) -> Tensor:
        """Draw perturbations of a batch for a model."""
        key = make_key(key)
        module = model if isinstance(model, nn.Module) else nn.Module()
        aside = _set_aside(module, key) if self.mode == "train" else nullcontext()
        with aside, sampling_mode(module, self.mode), torch.no_grad():
            problem = Problem(model, batch, perturbations, loss if self.needs_loss else None, self.log)
            delta = self.draw(problem, key).detach()
        if delta.device.type == "cpu":
            self._check(delta, batch, perturbations)
        return delta

    def _check(self, delta: Tensor, batch: Batch, perturbations: PerturbationSet) -> None:
        expected = (len(batch), *perturbations.shape(tuple(batch.images.shape[1:])))
        require(
            tuple(delta.shape[1:]) == expected,
            f"{type(self).__name__} drew shape {tuple(delta.shape)}, expected (K, {', '.join(map(str, expected))})",
        )
        if not bool(delta.isfinite().all()):
            raise NumericsError(f"{type(self).__name__} drew perturbations that are not finite")
        tolerance = 1e-5 if delta.dtype in (torch.float32, torch.float64) else 1e-2
        for draw in delta:
            if self.free:
                moved = perturbations.apply(batch.images, draw)
                inside = bool(((moved >= -tolerance) & (moved <= 1.0 + tolerance)).all())
            else:
                inside = bool(perturbations.contains(draw, batch.images, tolerance).all())
            if not inside:
                low, high = float(batch.images.min()), float(batch.images.max())
                require(
                    low >= -tolerance and high <= 1.0 + tolerance,
                    f"images must lie in [0, 1], got {low:.4g} .. {high:.4g}; normalisation belongs into the model",
                )
                raise NumericsError(f"{type(self).__name__} drew perturbations outside {perturbations!r}")
