"""The loop of adversarial training as public code writes it: what `fast.py` is compared with.

Float32 with TF32 off, eager, channels-first, the model itself in eval mode for the attack, clean logits computed again
at each step of it, clean and perturbed images in two passes, a Python loop for the average, numbers read at each step.
Data and augmentation are cheap here, on the device, so that what is compared is the training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON, STEP_SIZE, NOISE = 8 / 255, 2 / 255, 1e-4


def kl(first: Tensor, second: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(first, 1), F.softmax(second, 1), reduction="none").sum(1)


def augmented(x: Tensor) -> Tensor:
    padded, side = F.pad(x, (4, 4, 4, 4)), x.shape[-1]
    i, j = (int(torch.randint(0, 9, ())) for _ in range(2))
    cropped = padded[:, :, i : i + side, j : j + side]
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, cropped.flip(3), cropped)


def plain_loop(model: nn.Module, images: Tensor, labels: Tensor, size: int, steps: int) -> Callable[[], None]:
    """Return a function that does one step: DALE with KL on random batches of `images`, which are bytes."""
    average = copy.deepcopy(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    noise = torch.distributions.Laplace(torch.zeros((), device=images.device), torch.ones((), device=images.device))
    nu, log = 1.0, []

    def step() -> None:
        nonlocal nu
        places = torch.randint(0, len(images), (size,), device=images.device)
        x, y = augmented(images[places].float() / 255), labels[places]
        model.eval()
        delta = 1e-3 * torch.randn_like(x)
        for _ in range(steps):
            delta.requires_grad_(True)
            value = kl(model(x + delta), model(x)).clamp_min(1e-7).log().sum()
            (gradient,) = torch.autograd.grad(value, delta)
            delta = delta.detach() + STEP_SIZE * (gradient + NOISE * noise.sample(x.shape)).sign()
            delta = (x + delta.clamp(-EPSILON, EPSILON)).clamp(0, 1) - x
        model.train()
        optimiser.zero_grad()
        clean, robust = model(x), model(x + delta)
        violation = F.cross_entropy(clean, y) - 0.8
        loss = kl(robust, clean).mean() + nu * violation
        loss.backward()
        optimiser.step()
        nu = max(0.0, nu + 1e-3 * violation.item())
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(0.995).add_(theirs, alpha=0.005)
        log.append(loss.item())

    return step
