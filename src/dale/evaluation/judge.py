"""The judge: what is counted is decided here, in strict float32, in eval mode, at one batch shape."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dale.errors import DaleError, NumericsError, UsageError, told_of
from dale.perturbations import PerturbationSet

IN_SET_TOLERANCE = 1e-6


@contextmanager
def matmul_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Run a block with the accelerator's float32 products in `precision`: "ieee" (strict) or "tf32"."""
    if device.type != "cuda":
        yield
        return
    backends: Any = torch.backends  # these settings are made at run time, so that type checkers do not see them
    places = (backends.cuda.matmul, backends.cudnn.conv)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = precision
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.fp32_precision = value


@contextmanager
def planned_kernels() -> Iterator[None]:
    """Run a block in which cuDNN chooses by its own rules: trying algorithms out costs more where batches shrink."""
    before = torch.backends.cudnn.benchmark
    try:
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def quiet_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Run a block whose global random numbers come from `seed`, and put the generators back afterwards."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        yield


@contextmanager
def asking(who: str, images: Tensor) -> Iterator[None]:
    """Run a block that asks a model for the first time: whatever that raises becomes one line about `who`."""
    try:
        yield
    except (DaleError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model of the user's may raise anything
        shape = "x".join(map(str, images.shape[1:]))
        raise UsageError(f"{who} does not take images of {shape}, which these data have: {told_of(error)}") from error


def float32_model(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model itself where it is in float32 on the device, else such a copy."""
    tensors = [*model.parameters(), *model.buffers()]
    right = all(t.device == device and (not t.is_floating_point() or t.dtype == torch.float32) for t in tensors)
    return model if right else copy.deepcopy(model).to(device=device, dtype=torch.float32)


class Expected(nn.Module):
    """A random model's expected prediction: the log of the mean softmax over `passes` passes.

    Its gradient is the expectation over the model's randomness that an attack on a random model has to climb.
    """

    def __init__(self, model: nn.Module, passes: int) -> None:
        super().__init__()
        self.model, self.passes = model, passes

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the averaged prediction; each pass has the input to itself, to write into it even."""
        logs = torch.stack([self.model(x.clone()).float().log_softmax(dim=1) for _ in range(self.passes)])
        return logs.logsumexp(dim=0)


@dataclass
class Judge:
    """Predictions at one batch shape: the last batch is filled up, so that no prediction depends on how many there are.

    The model is in eval mode with frozen weights while the judge is at work (its caller sees to that).
    """

    model: nn.Module
    batch_size: int
    num_classes: int
    seed: int = 0
    who: str = "the model"

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of each image, in strict float32."""
        out = []
        with (
            torch.no_grad(),
            matmul_precision(images.device, "ieee"),
            quiet_randomness(images.device, self.seed),
            torch.autocast(images.device.type, enabled=False),
        ):
            for first in range(0, len(images), self.batch_size):
                part = images[first : first + self.batch_size]
                fill = self.batch_size - len(part)
                # a copy in any case: a model may write into its input
                full = torch.cat([part, part[:1].expand(fill, *part.shape[1:])]) if fill else part.clone()
                logits = self.model(full)
                self._check(logits)
                out.append(logits[: len(part)].float())
        return torch.cat(out) if out else images.new_zeros((0, self.num_classes))

    def correct(self, images: Tensor, labels: Tensor) -> Tensor:
        """Tell for each image whether it is classified as labelled; what is not finite is not a prediction."""
        logits = self.logits(images)
        return (logits.argmax(dim=1) == labels) & logits.isfinite().all(dim=1)

    def fooled(self, x: Tensor, labels: Tensor, delta: Tensor, perturbations: PerturbationSet) -> tuple[Tensor, int]:
        """Tell which perturbations lie in set and box and change the prediction, and how many lay outside."""
        if len(labels) == 0:
            return torch.zeros(0, dtype=torch.bool, device=labels.device), 0
        inside = perturbations.contains(delta, x, IN_SET_TOLERANCE) & delta.flatten(1).isfinite().all(dim=1)
        images = self.images(x, delta, perturbations)
        wrong = ~self.correct(images, labels)
        return wrong & inside, int((~inside).sum())

    @staticmethod
    def images(x: Tensor, delta: Tensor, perturbations: PerturbationSet) -> Tensor:
        """The perturbed images as they are judged: rounding may not carry them out of [0, 1]."""
        return perturbations.apply(x, delta).clamp(0.0, 1.0)

    def _check(self, logits: object) -> None:
        expected = f"expected logits ({self.batch_size}, {self.num_classes})"
        if not isinstance(logits, Tensor):
            raise UsageError(f"{self.who} returned a {type(logits).__name__} for {self.batch_size} images; {expected}")
        if logits.dim() != 2 or len(logits) != self.batch_size:
            raise UsageError(
                f"{self.who} returned shape {tuple(logits.shape)} for {self.batch_size} images; {expected}"
            )
        if logits.shape[1] < self.num_classes:
            raise UsageError(f"{self.who} has {logits.shape[1]} outputs for data of {self.num_classes} classes")


def check_finite(logits: Tensor) -> None:
    """Raise where clean logits are not finite."""
    if not bool(logits.isfinite().all()):
        count = int((~logits.isfinite().all(dim=1)).sum())
        raise NumericsError(f"the model's logits are not finite on {count} of {len(logits)} clean images")
