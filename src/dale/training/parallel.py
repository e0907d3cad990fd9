"""A training step shared by several processes, and BatchNorm over all of them.

Each process differentiates the Lagrangian of its share of the batch; DistributedDataParallel averages the gradients.
With n_r of N examples on process r of W, its loss is scaled by W n_r / N, so that the average over processes is

    (1/W) sum_r (W n_r / N) grad L_r  =  grad of L on the whole batch,

for uneven shares too. Everything else that the processes must agree on (violations, metrics, BatchNorm's running
statistics) travels in one small message a step, so that the state, multipliers included, is the same on all.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from dale.batch import Batch
from dale.constraints import Violation
from dale.errors import NumericsError
from dale.modes import evaluating
from dale.objectives import Duals, Objective, Step
from dale.random import Key
from dale.training import distributed
from dale.training.state import TrainState
from dale.training.steps import PlainStep

# buffers travel with the violations, after the step and not before the next; torch 2.13 has a new name for the option
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


class Lagrangian(nn.Module):
    """A module whose one forward is the Lagrangian: what DistributedDataParallel wraps."""

    def __init__(self, objective: Objective, model: nn.Module) -> None:
        super().__init__()
        self.objective, self.model = objective, model

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        index: Tensor,
        groups: Tensor | None,
        delta: Tensor | None,
        duals: Duals,
    ) -> Step:
        """Evaluate the Lagrangian on a share of a batch."""
        return self.objective.lagrangian(self.model, Batch(images, labels, index, groups), delta, duals)


class DistributedStep(PlainStep):
    """The plain step, with its batch shared by all processes; the sampler runs on the bare module."""

    def __init__(
        self,
        objective: Objective,
        dtype: torch.dtype,
        device: torch.device,
        model: nn.Module,
        batch_size: int,
        *,
        unused: bool = False,
    ) -> None:
        super().__init__(objective, dtype, device)
        self.batch_size = batch_size  # of all processes together
        self.wrapped = DistributedDataParallel(
            Lagrangian(objective, model),
            device_ids=[device.index] if device.type == "cuda" else None,
            **_KEEP_BUFFERS,
            find_unused_parameters=unused,
            gradient_as_bucket_view=True,  # gradients lie where they are exchanged: no copy there and back
        )

    def perturb(self, model: nn.Module, batch: Batch, key: Key) -> Tensor | None:
        """Draw perturbations; where this process alone cannot, its loss is NaN, and all of them stop together."""
        try:
            return super().perturb(model, batch, key)
        except NumericsError:
            assert self.objective.perturbations is not None
            shape = self.objective.perturbations.shape(tuple(batch.images.shape[1:]))
            return batch.images.new_full((1, len(batch), *shape), torch.nan)

    def lagrangian(self, state: TrainState, batch: Batch, delta: Tensor | None) -> Step:
        """Evaluate the Lagrangian inside DistributedDataParallel."""
        step: Step = self.wrapped(batch.images, batch.labels, batch.index, batch.groups, delta, state.duals)
        return step

    def descend(self, state: TrainState, batch: Batch, delta: Tensor | None, weight: float, last: bool) -> Step:
        """Gradients of a part of our share, which counts as its size; they are exchanged with the last part."""
        weight = distributed.world_size() * len(batch) / self.batch_size
        with contextlib.nullcontext() if last else self.wrapped.no_sync():
            return super().descend(state, batch, delta, weight, last)

    @torch.no_grad()
    def collect(self, state: TrainState, step: Step) -> Step:
        """Add up what the processes saw: one message."""
        means = [step.loss.detach() * step.size, step.robust * step.size, step.nominal * step.size]
        counts = [step.clean_correct, step.robust_correct]
        seen = [tensor for violation in step.violations for tensor in vars(violation).values()]
        buffers = shared_buffers(state.model)
        sums = iter(distributed.total(*means, *counts, *seen, *(part for _, part in buffers)))
        loss, robust, nominal = (next(sums) / self.batch_size for _ in means)
        clean_correct, robust_correct = (next(sums) for _ in counts)
        violations = tuple(Violation(*(next(sums) for _ in vars(violation))) for violation in step.violations)
        for buffer, _ in buffers:
            buffer.copy_(next(sums))
        return Step(loss, robust, nominal, clean_correct, robust_correct, violations, self.batch_size)


def leaves_parameters_unused(model: nn.Module, images: Tensor) -> bool:
    """Tell whether some parameters have no part in the logits; DistributedDataParallel must then look for them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with evaluating(model), torch.enable_grad():
        gradients = torch.autograd.grad(model(images).sum(), parameters, allow_unused=True)
    return any(gradient is None for gradient in gradients)


def shared_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Buffers that a step may change, each with this process's part of a sum that makes them the same everywhere.

    Running statistics of BatchNorm are averaged over the processes; of other buffers the first process's is taken.
    """
    size, main = distributed.world_size(), distributed.is_main()
    if size == 1:
        return []
    found = []
    for module in model.modules():
        if isinstance(module, (SharedBatchNorm, nn.SyncBatchNorm)):
            continue  # the same already
        for buffer in module.buffers(recurse=False):
            if not buffer.is_floating_point():
                continue
            if isinstance(module, _BatchNorm):
                found.append((buffer, buffer / size))
            else:
                found.append((buffer, buffer.clone() if main else torch.zeros_like(buffer)))
    return found


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Make the buffers of a model the same on all processes."""
    buffers = shared_buffers(model)
    if buffers:
        for (buffer, _), value in zip(buffers, distributed.total(*(part for _, part in buffers)), strict=True):
            buffer.copy_(value)


class _Sum(torch.autograd.Function):
    """The sum over all processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return distributed.reduce_(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return distributed.reduce_(gradient.contiguous().clone())


def _sum(values: Tensor) -> Tensor:
    found: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return found


class SharedBatchNorm(_BatchNorm):
    """BatchNorm whose batch is that of all processes; torch's own works on GPUs only.

    mean = sum x / n and variance = sum (x - mean)^2 / n over all processes: one message each, forwards and backwards.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the statistics of the whole batch; in eval mode by the running ones."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        values = input.float()
        dims = [0, *range(2, input.dim())]
        shape = (1, -1, *[1] * (input.dim() - 2))
        here = values.new_full((1,), float(input.numel() // input.shape[1]))
        sums = _sum(torch.cat([values.sum(dims), here]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = values - mean.view(shape)
        variance = _sum(centred.square().sum(dims)) / count
        self._remember(mean.detach(), variance.detach(), count)
        scale = (variance + self.eps).rsqrt()
        output = centred * (scale if self.weight is None else scale * self.weight).view(shape)
        return (output if self.bias is None else output + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * count / (count - 1.0).clamp_min(1.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


@contextlib.contextmanager
def synchronised(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Let the BatchNorm layers of a model see the batch of all processes while inside; parameters stay where they are.

    Layers change their class and back, so that weights, optimiser and hooks know nothing of it.
    """
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = [m for m in model.modules() if type(m) in plain] if wanted and distributed.world_size() > 1 else []
    before = [type(layer) for layer in layers]
    for layer in layers:
        on_gpu = layer.weight is not None and layer.weight.is_cuda
        layer.__class__ = nn.SyncBatchNorm if on_gpu else SharedBatchNorm
        if on_gpu:
            layer.process_group = None  # type: ignore[assignment]  # all processes
    try:
        yield
    finally:
        for layer, kind in zip(layers, before, strict=True):
            layer.__class__ = kind
