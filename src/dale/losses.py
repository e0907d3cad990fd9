"""Losses: (logits on perturbed inputs, logits on clean inputs, labels) -> one value per example.

Only stable forms: everything is computed in float32 (float64 stays) from differences of logits. With

    d = logsumexp_{k != y} f_k - f_y

the cross-entropy is softplus(d), the error probability 1 - p_y is sigmoid(d), and their logarithms stay exact when p_y
rounds to 0 or 1, where a softmax has no digits left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dale.components import Component, code_path, import_object, import_path
from dale.errors import UsageError, require, require_non_negative, require_positive

LOG_FLOOR = 1e-7  # rounding can make a KL divergence zero or negative; its logarithm is taken no lower than here


@dataclass(frozen=True, kw_only=True)
class Loss(Component, ABC):
    """A per-example loss. `needs_clean`: it reads the clean logits. `non_negative`: its logarithm makes sense."""

    needs_clean: ClassVar[bool] = False
    non_negative: ClassVar[bool] = True

    @abstractmethod
    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The loss of each example, from logits in at least float32."""

    def log_value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The logarithm of the loss; below `LOG_FLOOR` its value is cut but its gradient keeps its direction."""
        value = self.value(logits, clean, labels)
        floored = value.detach().clamp_min(LOG_FLOOR)
        return floored.log() + (value - value.detach()) / floored

    @staticmethod
    def from_function(path: str) -> Loss:
        """Return the loss that a plain function, named by its import path, computes."""
        return FunctionLoss(path=path)

    def __call__(self, logits: Tensor, clean: Tensor | None, labels: Tensor, *, log: bool = False) -> Tensor:
        """Return one value per example, (B,); with `log`, its logarithm."""
        if clean is None:
            require(not self.needs_clean, f"{type(self).__name__} compares with clean predictions, and got none")
            clean = logits
        if log:
            require(self.non_negative, f"{type(self).__name__} can be negative: it has no logarithm; use log=False")
            return self.log_value(_full(logits), _full(clean), labels)
        return self.value(_full(logits), _full(clean), labels)


def _full(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _others(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits with the true class's at minus infinity."""
    true = torch.arange(logits.shape[1], device=logits.device) == labels.unsqueeze(1)
    return logits.masked_fill(true, -torch.inf)


def _true(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(1, labels.unsqueeze(1)).squeeze(1)


def log_odds_of_error(logits: Tensor, labels: Tensor) -> Tensor:
    """d = logsumexp_{k != y} f_k - f_y = log((1 - p_y) / p_y)."""
    return _others(logits, labels).logsumexp(dim=1) - _true(logits, labels)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """-log p_y, or with label smoothing s: (1 - s) * (-log p_y) + s * mean_k(-log p_k)."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require(
            0.0 <= self.label_smoothing < 1.0,
            f"CrossEntropy: label_smoothing lies in [0, 1), got {self.label_smoothing!r}",
        )

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """softplus(d)."""
        plain = F.softplus(log_odds_of_error(logits, labels))
        if self.label_smoothing == 0.0:
            return plain
        spread = -logits.log_softmax(dim=1).mean(dim=1)
        return (1.0 - self.label_smoothing) * plain + self.label_smoothing * spread

    def log_value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """log softplus(d), which is d itself where softplus(d) underflows."""
        if self.label_smoothing > 0.0:
            return super().log_value(logits, clean, labels)
        odds = log_odds_of_error(logits, labels)
        small = odds < -15.0
        return torch.where(small, odds, F.softplus(odds.masked_fill(small, 0.0)).log())


@dataclass(frozen=True, kw_only=True)
class KL(Loss):
    """KL(p(x) || p(x')) = sum_k p_k(x) (log p_k(x) - log p_k(x')); gradients flow through both arguments."""

    needs_clean: ClassVar[bool] = True

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The divergence from clean to perturbed predictions."""
        return _kl(clean, logits)


@dataclass(frozen=True, kw_only=True)
class KLReverse(Loss):
    """KL(p(x') || p(x))."""

    needs_clean: ClassVar[bool] = True

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The divergence from perturbed to clean predictions."""
        return _kl(logits, clean)


def _kl(first: Tensor, second: Tensor) -> Tensor:
    log_p, log_q = first.log_softmax(dim=1), second.log_softmax(dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class ErrorProbability(Loss):
    """1 - p_y = sigmoid(d), whose logarithm is logsumexp_{k != y} f_k - logsumexp_k f_k."""

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """sigmoid(d)."""
        return log_odds_of_error(logits, labels).sigmoid()

    def log_value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """log sigmoid(d)."""
        return F.logsigmoid(log_odds_of_error(logits, labels))


@dataclass(frozen=True, kw_only=True)
class Margin(Loss):
    """max_{k != y} f_k - f_y (Carlini and Wagner); positive exactly when the prediction is wrong."""

    non_negative: ClassVar[bool] = False

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The best wrong logit over the true one."""
        return _others(logits, labels).amax(dim=1) - _true(logits, labels)


@dataclass(frozen=True, kw_only=True)
class DLR(Loss):
    """The margin over f_(1) - f_(3), the gap between the largest and the third largest logit.

    With two classes there is no third, and the loss is the margin itself.
    """

    non_negative: ClassVar[bool] = False

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The difference-of-logits ratio of Croce and Hein."""
        margin = _others(logits, labels).amax(dim=1) - _true(logits, labels)
        if logits.shape[1] < 3:
            return margin
        top = logits.topk(3, dim=1).values
        return margin / (top[:, 0] - top[:, 2] + 1e-12)


@dataclass(frozen=True, kw_only=True)
class LogitPairing(Loss):
    """||f(x') - f(x)||_2."""

    needs_clean: ClassVar[bool] = True

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The distance between perturbed and clean logits."""
        distance: Tensor = torch.linalg.vector_norm(logits - clean, dim=1)
        return distance


@dataclass(frozen=True, kw_only=True)
class BoostedCrossEntropy(Loss):
    """-log p_y(x') - log(1 - max_{k != y} p_k(x') + 1e-4)."""

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy plus MART's margin term."""
        rival = _others(logits, labels).argmax(dim=1)
        # 1 - p_rival as a sigmoid: subtracting from one would leave no digits beside 1e-4 where the rival is sure
        room = log_odds_of_error(logits, rival).sigmoid()
        return F.softplus(log_odds_of_error(logits, labels)) - torch.log(room + 1e-4)

    # the margin term may dip to -log(1.0001) when the rival has no mass left; the cross-entropy is then near zero too
    non_negative: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Mart(Loss):
    """BCE(x') + weight * KL(p(x) || p(x')) * (1 - p_y(x)); gradients flow through 1 - p_y(x) as well."""

    weight: float = 5.0
    needs_clean: ClassVar[bool] = True
    non_negative: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_non_negative(self, weight=self.weight)

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """MART's loss of one example."""
        boosted = BoostedCrossEntropy().value(logits, clean, labels)
        return boosted + self.weight * _kl(clean, logits) * log_odds_of_error(clean, labels).sigmoid()


@dataclass(frozen=True, kw_only=True)
class ZeroOne(Loss):
    """1 where the prediction is wrong, 0 where it is right: for constraints on accuracy; it has no gradient."""

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The 0-1 error."""
        return (logits.argmax(dim=1) != labels).to(logits.dtype)


@dataclass(frozen=True, kw_only=True)
class Clipped(Loss):
    """min(loss, bound): where a bounded loss is needed, as in certificates."""

    loss: Loss
    bound: float

    def __post_init__(self) -> None:
        require_positive(self, bound=self.bound)

    @property
    def needs_clean(self) -> bool:  # type: ignore[override]  # a constant of the class elsewhere, of the part here
        """As the loss inside."""
        return self.loss.needs_clean

    @property
    def non_negative(self) -> bool:  # type: ignore[override]
        """As the loss inside."""
        return self.loss.non_negative

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The smaller of loss and bound."""
        return self.loss.value(logits, clean, labels).clamp_max(self.bound)


@dataclass(frozen=True, kw_only=True)
class WeightedSum(Loss):
    """sum_i weights_i * losses_i."""

    losses: tuple[Loss, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        require(
            0 < len(self.losses) == len(self.weights),
            f"WeightedSum: as many weights as losses, got {len(self.weights)} for {len(self.losses)}",
        )
        require_non_negative(self, **{f"weights[{i}]": weight for i, weight in enumerate(self.weights)})

    @property
    def needs_clean(self) -> bool:  # type: ignore[override]
        """Whether any part does."""
        return any(loss.needs_clean for loss in self.losses)

    @property
    def non_negative(self) -> bool:  # type: ignore[override]
        """Whether all parts are."""
        return all(loss.non_negative for loss in self.losses)

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """The weighted sum."""
        terms = [w * loss.value(logits, clean, labels) for w, loss in zip(self.weights, self.losses, strict=True)]
        return torch.stack(terms).sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class FunctionLoss(Loss):
    """A function of the user's, (logits, clean_logits, labels) -> (B,), named by its import path.

    The function may carry attributes `needs_clean` (assumed true) and `non_negative` (assumed false).
    """

    path: str = code_path()

    @property
    def function(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The function itself."""
        found: Callable[[Tensor, Tensor, Tensor], Tensor] = import_object(self.path)
        return found

    @property
    def needs_clean(self) -> bool:  # type: ignore[override]
        """As the function says."""
        return bool(getattr(self.function, "needs_clean", True))

    @property
    def non_negative(self) -> bool:  # type: ignore[override]
        """As the function says."""
        return bool(getattr(self.function, "non_negative", False))

    def value(self, logits: Tensor, clean: Tensor, labels: Tensor) -> Tensor:
        """Call the function and check what it returns."""
        value = self.function(logits, clean, labels)
        require(
            value.shape == labels.shape,
            f"{self.path} returned shape {tuple(value.shape)}; a loss returns one value per example, {len(labels)}",
        )
        return value


def as_loss(loss: Loss | Callable[[Tensor, Tensor, Tensor], Tensor]) -> Loss:
    """Accept a loss, a loss class without options, or a plain function."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) and issubclass(loss, Loss):
        return loss()
    if callable(loss):
        return FunctionLoss(path=import_path(loss))
    raise UsageError(f"expected a loss or a function (logits, clean, labels) -> values, got {loss!r}")
