"""Adversarial weight perturbation (Wu et al., 2020): descend at weights moved to where the Lagrangian is higher.

    w <- w + gamma * ||w|| * g / ||g||   per weight tensor,   g = gradient of L;   gradients there;   w back

It flattens the loss around the weights, which narrows the gap between robust training and test accuracy. Any row may
use it, since it wraps the Lagrangian and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dale.components import Component
from dale.errors import require_positive


@dataclass(frozen=True, kw_only=True)
class WeightPerturbation(Component):
    """Perturb weight tensors (those with more than one dimension) by a share `gamma` of their norm."""

    gamma: float = 5e-3

    def __post_init__(self) -> None:
        require_positive(self, gamma=self.gamma)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Hold the weights moved along their present gradients while inside; they come back bit for bit."""
        moved = [p for p in model.parameters() if p.grad is not None and p.dim() > 1]
        weights: list[Tensor] = [p.detach() for p in moved]
        gradients: list[Tensor] = [p.grad.detach() for p in moved if p.grad is not None]
        with torch.no_grad():
            before = [w.clone() for w in weights]
            sizes, lengths = torch._foreach_norm(weights), torch._foreach_norm(gradients)
            # an all-zero gradient moves nothing
            factors = [self.gamma * s / n.clamp_min(1e-20) for s, n in zip(sizes, lengths, strict=True)]
            torch._foreach_add_(weights, torch._foreach_mul(gradients, factors))
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, before)
