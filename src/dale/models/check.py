"""`check_model`: does a user's model have what robust training needs, and if not, why not?

Each check looks at one thing and says one plain sentence about it. The model comes back as it was: modes, parameters,
buffers (BatchNorm statistics too), gradients and the global random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dale import random
from dale.errors import DaleError, UsageError, told_of
from dale.faithful import unfaithful
from dale.models.weights import stored_tensors
from dale.modes import sampling_mode

Status = Literal["ok", "warn", "fail"]

_BATCH = 4


@dataclass(frozen=True)
class ModelCheck:
    """One check: its name, how it ended, and what that means."""

    name: str
    status: Status
    message: str


@dataclass(frozen=True)
class ModelReport:
    """What `check_model` found; `str(report)` is a table."""

    model: str
    image_shape: tuple[int, int, int]
    num_classes: int
    checks: tuple[ModelCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether the model can be trained: no check failed (warnings do not count)."""
        return all(check.status != "fail" for check in self.checks)

    def __getitem__(self, name: str) -> ModelCheck:
        """Return the check called `name`."""
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.image_shape))
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.model} for {shape} images and {self.num_classes} classes"]
        lines += [f"  {check.status:<4}  {check.name:<{width}}  {check.message}" for check in self.checks]
        count = {status: sum(check.status == status for check in self.checks) for status in ("fail", "warn")}
        verdict = "ready for robust training" if self.ok else "not ready for robust training"
        lines.append(f"{verdict}: {count['fail']} failed, {count['warn']} warned, {len(self.checks)} checked")
        return "\n".join(lines)


def check_model(
    model: nn.Module, image_shape: tuple[int, int, int], num_classes: int, device: torch.device | str = "cpu"
) -> ModelReport:
    """Check a model of the user's for images of `image_shape` (C, H, W) in [0, 1] on the device where it is.

    A model whose checks fail cannot be trained or judged as the mathematics supposes; a warning names something to
    know. Checks that need an output are left out when there is none.
    """
    device = torch.device(device)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(f"the model's {name} has no shape yet; pass a batch through the model first")
        if tensor.device.type != device.type:
            raise UsageError(f"the model's {name} is on {tensor.device}; move it with model.to({str(device)!r}) first")
    index = torch.arange(_BATCH, device=device)
    images = random.uniform(random.key(0).fold("check-model"), index, image_shape)
    images[0], images[1] = 0.0, 1.0  # the ends of the range belong to it
    with _as_it_was(model, device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a stranger's deprecations say nothing about robust training
        checks = tuple(_Examination(model, images, num_classes).run())
    return ModelReport(type(model).__name__, image_shape, num_classes, checks)


@contextmanager
def _as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put back parameters, buffers, modes and random numbers afterwards."""
    # a forward pass may write into a buffer, and may also put another tensor in its place
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    tensors = (*model.parameters(), *model.buffers())
    before = [tensor.detach().clone() for tensor in tensors]
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda), sampling_mode(model, "keep"), torch.enable_grad():
            yield
    finally:
        for module, own in buffers:
            for name, buffer in own.items():  # one by one: a TorchScript module's have no update()
                module._buffers[name] = buffer
        for tensor, value in zip(tensors, before, strict=True):
            if not torch.equal(tensor, value):
                tensor.detach().copy_(value)


@dataclass
class _Examination:
    """The checks in order, over one batch of images."""

    model: nn.Module
    images: Tensor
    num_classes: int
    seen: Tensor = field(init=False)
    logits: Tensor = field(init=False)

    def run(self) -> Iterator[ModelCheck]:
        """Yield the checks."""
        with sampling_mode(self.model, "eval"):
            output = self.output()
            yield output
            if output.status == "ok":
                yield self.scale()
                yield self.in_place()
                yield self.input_gradient()
                yield self.repeatable()
                yield self.batch_independent()
            yield self.traceable(output.status == "ok")
        yield self.batch_norm()
        yield self.dropout()
        yield self.storable()
        if output.status == "ok":
            # the last, since it moves the statistics of BatchNorm
            yield self.training_pass()

    def output(self) -> ModelCheck:
        """[0, 1] float images in, finite float logits of the right shape out."""
        name, self.seen = "output", self.images.clone()
        try:
            with torch.no_grad():
                logits = self.model(self.seen)
        except Exception as error:
            shape = tuple(self.images.shape)
            return ModelCheck(name, "fail", f"float32 images of shape {shape} in [0, 1] are refused: {told_of(error)}.")
        expected = (len(self.images), self.num_classes)
        if not isinstance(logits, Tensor):
            return ModelCheck(name, "fail", f"The output is a {type(logits).__name__}, expected a tensor of logits.")
        if tuple(logits.shape) != expected:
            return ModelCheck(name, "fail", f"The output has shape {tuple(logits.shape)}, expected {expected}.")
        if not logits.is_floating_point():
            return ModelCheck(name, "fail", f"The output is of type {logits.dtype}, expected floating-point logits.")
        if not bool(logits.isfinite().all()):
            return ModelCheck(name, "fail", "The output is not finite for some images in [0, 1].")
        self.logits = logits.clone()
        return ModelCheck(name, "ok", f"Images in [0, 1] give finite logits of shape {expected}.")

    def scale(self) -> ModelCheck:
        """Losses take logits: probabilities would be squashed twice."""
        sums = self.logits.float().sum(1)
        if bool((self.logits >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
            return ModelCheck("logits", "warn", "The output looks like probabilities; leave out the final softmax.")
        return ModelCheck("logits", "ok", "The output does not look like probabilities.")

    def in_place(self) -> ModelCheck:
        """The images are the same after the pass."""
        if not torch.equal(self.seen, self.images):
            return ModelCheck("in-place", "fail", "The model changes its input in place; work on a copy of it.")
        return ModelCheck("in-place", "ok", "The input is left unchanged.")

    def gradient(self) -> Tensor:
        """The input gradient of a fixed generic combination of the logits."""
        images = self.images.clone().requires_grad_()
        logits = self.model(images)
        weights = random.normal(
            random.key(1).fold("check-model"), torch.arange(len(logits), device=logits.device), logits.shape[1:]
        )
        (gradient,) = torch.autograd.grad((logits * weights).sum(), images)
        return gradient

    def input_gradient(self) -> ModelCheck:
        """Gradients reach every image, and another pass gives the same ones."""
        name = "gradient"
        try:
            first, again = self.gradient(), self.gradient()
        except Exception as error:
            line = told_of(error)
            cause = "an in-place operation" if "place" in line else "a graph that does not reach the input"
            return ModelCheck(name, "fail", f"The backward pass to the input fails ({cause}): {line}.")
        if not bool(first.isfinite().all()):
            return ModelCheck(name, "fail", "The gradient at the input is not finite for some images in [0, 1].")
        dead = int((first.flatten(1).abs().amax(1) == 0).sum())
        if dead == len(first):
            return ModelCheck(name, "fail", "The gradient at the input is zero everywhere: no attack can follow it.")
        if not self.close(again, first):
            return ModelCheck(
                name, "fail", "The gradient at the input differs between two passes over the same images."
            )
        if dead:
            return ModelCheck(
                name, "warn", f"The gradient at the input is zero for {dead} of {len(first)} test images."
            )
        return ModelCheck(name, "ok", "Gradients reach the input, and the backward pass can be repeated.")

    def repeatable(self) -> ModelCheck:
        """The same images give the same logits in eval mode."""
        try:
            with torch.no_grad():
                again = self.model(self.images.clone())
        except Exception as error:
            return ModelCheck("determinism", "fail", f"A second pass in eval mode fails: {told_of(error)}.")
        if not self.close(again, self.logits):
            return ModelCheck(
                "determinism", "fail", "Two passes over the same images differ in eval mode: it is random."
            )
        if not torch.equal(again, self.logits):
            return ModelCheck("determinism", "warn", "Two passes over the same images differ by rounding in eval mode.")
        return ModelCheck("determinism", "ok", "The same images give the same logits in eval mode.")

    def batch_independent(self) -> ModelCheck:
        """An image's logits in eval mode do not depend on its company in the batch."""
        name = "batch"
        try:
            with torch.no_grad():
                alone = torch.cat([self.model(image[None].clone()) for image in self.images])
                turned = self.model(self.images.flip(0)).flip(0)
        except Exception as error:
            return ModelCheck(name, "fail", f"A batch of one image is refused in eval mode: {told_of(error)}.")
        if self.close(alone, self.logits) and self.close(turned, self.logits):
            return ModelCheck(name, "ok", "An image's logits do not depend on the rest of the batch in eval mode.")
        own = "" if all(m.track_running_stats for m in self.norms()) else " (BatchNorm without running statistics)"
        return ModelCheck(name, "fail", f"An image's logits depend on the rest of the batch in eval mode{own}.")

    def training_pass(self) -> ModelCheck:
        """A forward and backward pass in train mode reaches every trainable parameter."""
        name = "training"
        trainable = {key: p for key, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            return ModelCheck(name, "fail", "No parameter asks for a gradient: there is nothing to train.")
        images = self.images.clone()
        try:
            with sampling_mode(self.model, "train"):
                loss = nn.functional.cross_entropy(self.model(images), torch.zeros_like(self.logits[:, 0]).long())
                gradients = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        except Exception as error:
            return ModelCheck(name, "fail", f"A pass in train mode fails: {told_of(error)}.")
        if not torch.equal(images, self.images):
            return ModelCheck(name, "fail", "The model changes its input in place in train mode.")
        if not all(bool(g.isfinite().all()) for g in gradients if g is not None):
            return ModelCheck(name, "fail", "A parameter gradient is not finite in train mode.")
        unused = [key for key, g in zip(trainable, gradients, strict=True) if g is None]
        if unused:
            return ModelCheck(name, "warn", f"{len(unused)} parameters have no part in the output, first {unused[0]}.")
        count = sum(p.numel() for p in trainable.values())
        return ModelCheck(name, "ok", f"Gradients reach all {count:,} trainable parameters in train mode.")

    def norms(self) -> list[nn.modules.batchnorm._BatchNorm]:
        """The BatchNorm layers."""
        return [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def batch_norm(self) -> ModelCheck:
        """How many BatchNorm layers there are."""
        norms = self.norms()
        without = sum(not norm.track_running_stats for norm in norms)
        if without:
            return ModelCheck("batchnorm", "warn", f"{without} of {len(norms)} BatchNorm layers keep no statistics.")
        if norms:
            return ModelCheck("batchnorm", "ok", f"{len(norms)} BatchNorm layers found: attacks use their statistics.")
        return ModelCheck("batchnorm", "ok", "No BatchNorm layers found.")

    def dropout(self) -> ModelCheck:
        """How many dropout layers there are."""
        count = sum(isinstance(m, nn.modules.dropout._DropoutNd) for m in self.model.modules())
        found = (
            f"{count} dropout layers found: off while attacking, unless asked for." if count else "No dropout found."
        )
        return ModelCheck("dropout", "ok", found)

    def storable(self) -> ModelCheck:
        """The state dict survives safetensors."""
        try:
            tensors = stored_tensors(self.model)
            back = safetensors.torch.load(safetensors.torch.save(tensors))
        except (DaleError, safetensors.SafetensorError, KeyError, ValueError) as error:
            return ModelCheck("weights", "fail", f"The state dict cannot be stored as safetensors: {told_of(error)}.")
        if not all(torch.equal(back[key], value) for key, value in tensors.items()):
            return ModelCheck("weights", "fail", "The state dict comes back changed from safetensors (or holds NaN).")
        return ModelCheck("weights", "ok", f"{len(tensors)} tensors are stored and read back as safetensors.")

    def traceable(self, has_output: bool) -> ModelCheck:
        """Whether the fast path is open: the model can be traced, and what is folded from that computes the same."""
        name = "traceable"
        if not has_output:
            return ModelCheck(name, "warn", "Without logits the fast path stays off.")
        for where, captured in (("The", False), ("On a GPU the", True)):
            reason = unfaithful(self.model, tuple(self.images.shape[1:]), captured=captured)
            if reason is not None:
                return ModelCheck(name, "warn", f"{where} fast path stays off: {reason}.")
        return ModelCheck(name, "ok", "A folded copy has its logits and gradient: the fast path is open.")

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Equal up to the rounding of another order of summation.

        Within sqrt(machine epsilon) of the largest value for all that was computed on the way, which is as exact as the
        coarsest of images and parameters whatever the output says; and a few units of the output's own last place.
        """
        inside = [self.images.dtype, *(p.dtype for p in self.model.parameters() if p.is_floating_point())]
        tolerance = max(max(torch.finfo(dtype).eps for dtype in inside) ** 0.5, 4 * torch.finfo(b.dtype).eps)
        scale = float(b.abs().max()) if b.numel() else 0.0
        return a.shape == b.shape and float((a - b).abs().max()) <= tolerance * scale
