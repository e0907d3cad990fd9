"""What every network shares: normalisation as the first layer, and the choice of activation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dale.errors import UsageError, unknown

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "silu": nn.SiLU}

# Per-channel mean and standard deviation of the training images in [0, 1].
_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.3053,), (0.3761,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}


class Normalise(nn.Module):
    """(x - mean) / std per channel: the first layer, so that attacks and certificates live in [0, 1].

    Mean and std are buffers: they travel with the weights, and a network that is fine-tuned on other data keeps the
    normalisation it was trained with.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise UsageError(f"Normalise: expected as many means as positive stds, got {mean!r} and {std!r}")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images (B, C, H, W)."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """The constants, for printing."""
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def normalisation(channels: int, dataset: str | None = None) -> Normalise:
    """Return the normalisation of a named data set, or (x - 0.5) / 0.5 where its statistics are not known."""
    mean, std = _STATISTICS.get(dataset or "", ((), ()))
    if len(mean) != channels:
        mean, std = (0.5,) * channels, (0.5,) * channels
    return Normalise(mean, std)


def make_activation(name: str) -> nn.Module:
    """Return a new activation module; never in place: compilers fuse it anyway, and autograd may need its input."""
    if name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()
