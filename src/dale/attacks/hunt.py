"""A hunt: a problem of the gradient loop that remembers the best it was asked for, and lets go of what has fallen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dale.losses import Margin
from dale.samplers import Problem, State

# Leaving examples out copies the state of the others: it is done when at least this share of the rows is in vain.
_SHED_SHARE = 0.1
# An accelerator is stopped by every look whether examples have fallen, and its library plans every new batch size anew:
# looks are rare (after 3 and 6 steps, when most fall, then every tenth), and the sizes few (multiples of a grain).
_EARLY_LOOKS = (3, 6)
_LOOK_EVERY = 10
_GRAIN = 256

_MARGIN = Margin()


@dataclass
class Found:
    """What a search found: for each example the perturbation of largest margin, and what it cost.

    The margin is max_{k != y} f_k - f_y: above zero the prediction is wrong. `blind` marks the examples for which a
    gradient was not finite. `gradients` and `queries` are summed over the examples.
    """

    delta: Tensor
    margin: Tensor
    blind: Tensor
    gradients: int = 0
    queries: int = 0

    def put(self, rows: Tensor, delta: Tensor, margin: Tensor, blind: Tensor) -> None:
        """Write what is known of some of the examples."""
        self.delta[rows], self.margin[rows], self.blind[rows] = delta, margin, blind


@dataclass
class Hunt(Problem):
    """A problem that remembers, for each example, the perturbation with the largest margin among all it was asked for.

    So every kernel of the gradient loop becomes an attack that keeps its best iterate. Examples whose margin exceeds
    `slack` times their largest logit have fallen for certain and are left out of the steps that follow; the slack
    covers the rounding between the model that is searched and the one that is judged. With `keep_best` off nothing is
    remembered but what `settle` is told: the last iterate. `guard` is for searches that leave the set: what lies
    outside is not remembered. `seen` holds the margins of the latest evaluation, `blind` the examples for which a
    gradient was not finite: where it is not, the search goes on with the coordinates that are.
    """

    keep_best: bool = True
    slack: float = 0.0
    guard: bool = False
    found: Found = field(init=False)
    rows: Tensor = field(init=False)
    best: Tensor = field(init=False)
    margin: Tensor = field(init=False)
    fallen: Tensor = field(init=False)
    blind: Tensor = field(init=False)
    seen: Tensor = field(init=False)
    looks: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        size, device = len(self.batch), self.x.device
        self.rows = torch.arange(size, device=device)
        self.best = self.zeros()
        self.margin = self.x.new_full((size,), -torch.inf)
        self.fallen = torch.zeros(size, dtype=torch.bool, device=device)
        self.blind = torch.zeros_like(self.fallen)
        self.seen = self.margin
        self.found = Found(self.best.clone(), self.margin.clone(), self.blind.clone())

    def _logits(self, x: Tensor, delta: Tensor) -> Tensor:
        """The model's logits on G(x, delta), in the images' precision, whichever the model answers in."""
        return self.model(self.perturbations.apply(x, delta)).to(x.dtype)

    def potential(self, delta: Tensor) -> Tensor:
        """U(delta) of each example; the margins at delta are remembered."""
        logits = self._logits(self.x, delta)
        assert self.loss is not None
        if self.keep_best:
            self.note(delta.detach(), logits.detach())
        return self.loss(logits, self.clean_logits, self.batch.labels, log=self.log)

    def value(self, delta: Tensor) -> Tensor:
        """U(delta) without a gradient: one query for each example."""
        self.found.queries += len(self.batch)
        return super().value(delta)

    def value_and_gradient(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """U(delta) and its gradient: one gradient for each example.

        What is not a number is set to zero in a gradient and to minus infinity in a value, and its example noted as
        blind: the sign of NaN is zero, so that an attack would stand still there and nobody would know.
        """
        self.found.gradients += len(self.batch)
        value, gradient = super().value_and_gradient(delta)
        # a sum is finite only where every term is: one pass over the gradient, and no copy
        blind = ~gradient.flatten(1).sum(dim=1).isfinite()
        self.blind = self.blind | blind
        if gradient.device.type != "cpu" or bool(blind.any()):  # an accelerator is not asked, but told
            gradient = gradient.nan_to_num(nan=0.0, posinf=1e15, neginf=-1e15)
            value = value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return value, gradient

    def cut_off(self, delta: Tensor) -> Tensor:
        """No gradient at all is a gradient of zero: the attack goes on as it can, and an alarm tells."""
        return torch.zeros_like(delta)

    def query(self, delta: Tensor) -> Tensor:
        """Return the logits at delta, remembering the margins."""
        self.found.queries += len(self.batch)
        with torch.no_grad():
            logits = self._logits(self.x, delta)
        self.note(delta, logits)
        return logits

    def query_rows(self, delta: Tensor, rows: Tensor) -> None:
        """Ask for some of the examples alone (places in this batch), remembering their margins."""
        self.found.queries += len(rows)
        moved, labels = delta[rows], self.batch.labels[rows]
        with torch.no_grad():
            logits = self._logits(self.x[rows], moved)
        margin = _MARGIN(logits, None, labels).nan_to_num(nan=torch.inf)
        better = (margin > self.margin[rows]).nonzero().squeeze(1)
        if len(better) > 0:
            places, margin = rows[better], margin[better]
            self.best = self.best.index_copy(0, places, moved[better])
            self.margin = self.margin.index_copy(0, places, margin)
            fallen = margin > self.slack * logits[better].abs().amax(dim=1)
            self.fallen = self.fallen.index_copy(0, places, self.fallen[places] | fallen)

    def note(self, delta: Tensor, logits: Tensor) -> None:
        """Remember delta where its margin is the largest so far."""
        margin = _MARGIN(logits, None, self.batch.labels).nan_to_num(nan=torch.inf)
        self.seen = margin
        if self.guard:
            margin = margin.masked_fill(~self.perturbations.contains(delta, self.x), -torch.inf)
        better = margin > self.margin
        self.margin = torch.where(better, margin, self.margin)
        self.best = torch.where(better.view(-1, *([1] * (delta.dim() - 1))), delta, self.best)
        self.fallen = self.fallen | (margin > self.slack * logits.abs().amax(dim=1))

    def shed(self, state: State) -> tuple[Hunt, State]:
        """Go on without the examples that have fallen."""
        self.looks += 1
        on_cpu = self.x.device.type == "cpu"
        due = on_cpu or self.looks in _EARLY_LOOKS or self.looks % _LOOK_EVERY == 0
        if not self.keep_best or not due:
            return self, state
        standing = (~self.fallen).nonzero().squeeze(1)
        if not on_cpu:
            standing = self._with_company(standing)
        if len(standing) >= (1.0 - _SHED_SHARE) * len(self.batch) and len(standing) > 0:
            return self, state
        return self.take(standing), {name: value[standing] for name, value in state.items()}

    def _with_company(self, standing: Tensor, grain: int = _GRAIN) -> Tensor:
        """Add fallen examples to those that stand up to a multiple of the grain (or to all), in order."""
        missing = -len(standing) % grain
        if len(standing) == 0 or missing == 0:
            return standing
        fallen = self.fallen.nonzero().squeeze(1)[:missing]
        return torch.cat([standing, fallen]).sort().values

    def take(self, part: Tensor) -> Hunt:
        """Return the hunt for some of the examples (places in this batch); what is found is written to the same book.

        Which of the two goes on to search is up to the caller; the other must not be asked any more.
        """
        self.settle()
        clean = None if self.clean_logits is None else self.clean_logits[part]
        rest = replace(self, batch=self.batch[part], clean_logits=clean)
        rest.rows, rest.best, rest.margin = self.rows[part], self.best[part], self.margin[part]
        rest.fallen, rest.blind = self.fallen[part], self.blind[part]
        rest.found, rest.looks = self.found, self.looks
        return rest

    def charge(self, other: Hunt) -> None:
        """Take over what a preliminary hunt for the same examples spent, and where it was blind, not what it found."""
        self.blind = self.blind | other.blind
        self.found.gradients += other.found.gradients
        self.found.queries += other.found.queries

    def settle(self, last: Tensor | None = None) -> None:
        """Write what was found to the book: the best, or without `keep_best` the `last` perturbation."""
        if not self.keep_best and last is not None:
            self.best = last
        self.found.put(self.rows, self.best, self.margin, self.blind)
