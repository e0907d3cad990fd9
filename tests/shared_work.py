"""What the processes of a test do together; run by `processes.start`."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

import dale
from dale import algorithms, random
from dale.data import Loader
from dale.evaluation import evaluate
from dale.evaluation.team import Team, shared_by
from dale.training import distributed
from dale.training.averaging import AveragedModel, Averaging
from dale.training.parallel import DistributedStep, synchronised
from dale.training.state import TrainState
from dale.training.steps import PlainStep
from dale.training.validation import Validation, predict, validate

ROW: dict[str, Any] = {"rho": 0.5, "by": "class", "steps": 2, "dual_step_size": 0.1}


class Net(nn.Module):
    """Smooth, without dropout, and without a bias before BatchNorm, whose gradient would be rounding alone.

    Its weights may be of float64: then nothing but the sums that a test is about tells one process from two.
    """

    def __init__(self, channels: int = 1, num_classes: int = 10, norm: bool = False) -> None:
        super().__init__()
        middle = [nn.BatchNorm2d(8)] if norm else []
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False), *middle, nn.SiLU())
        self.head = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.to(self.head.weight.dtype)).flatten(1))


class Normed(Net):
    def __init__(self, channels: int = 1, num_classes: int = 10) -> None:
        super().__init__(channels, num_classes, norm=True)


def network(norm: bool) -> Net:
    torch.manual_seed(0)
    return Net(norm=norm)


def steps(
    count: int,
    norm: bool = False,
    sync: bool = False,
    accumulate: int = 1,
    batch: int = 31,
    frequency: str = "step",
    device: str = "cpu",
    double: bool = False,
) -> dict[str, Any]:
    """Train for `count` steps; the losses, multipliers and weights."""
    data = dale.load_dataset("digits", train_size=310)
    objective = algorithms.dale(dale.Linf(epsilon=0.1), dual_frequency=frequency, **ROW)
    model = network(norm).to(torch.float64 if double else torch.float32)
    with distributed.connected(device) as place, synchronised(model.to(place), sync):
        rank, size = distributed.rank(), distributed.world_size()
        loader = Loader(data.train, batch, seed=0, device=place, rank=rank, world_size=size)
        if distributed.active():
            step: PlainStep = DistributedStep(objective, torch.float32, place, model, batch)
        else:
            step = PlainStep(objective, torch.float32, place)
        step.accumulate = accumulate
        optimiser = torch.optim.SGD(model.parameters(), lr=0.005 if norm else 0.02, momentum=0.9)
        state = TrainState(
            model, optimiser, objective.initial_duals(10, device=place), AveragedModel(model, Averaging(decay=0.9))
        )
        losses, multipliers, shares = [], [], []
        model.train()
        for number in range(count):
            if number % len(loader) == 0:
                batches = loader.epoch(number // len(loader))
            part = next(batches)
            shares.append(len(part))
            state.totals = {}
            step(state, part, random.key(0).fold(number))
            losses.append(float(state.totals["loss"] / state.totals["size"]))
            multipliers.append(state.duals[0].multiplier.tolist())
        state.duals = objective.ascend_epoch(state.duals)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert state.average is not None
    average = {name: value.clone() for name, value in state.average.module.state_dict().items()}
    return {
        "losses": losses,
        "multipliers": multipliers,
        "weights": weights,
        "average": average,
        "shares": shares,
        "ascended": state.duals[0].multiplier.tolist(),
        "gradients": [p.grad for p in model.parameters()],
    }


def held_out(count: int) -> dict[str, Any]:
    """Predict and validate on `count` held-out examples, of 10 classes held to a limit each."""
    data = dale.load_dataset("digits", train_size=150, validation_size=200)
    objective = algorithms.dale(dale.Linf(epsilon=0.1), **ROW)
    model, split = network(True).eval(), data.validation.first(count)
    duals = objective.initial_duals(10)
    with distributed.connected("cpu") as place:
        logits, labels, groups = predict(model, split, 16, place)
        seen = validate(model, objective, duals, data.train, split, Validation(), key=random.key(0), batch_size=16)
    return {"logits": logits, "labels": labels, "groups": groups, "seen": seen}


def attacked(count: int) -> dict[str, Any]:
    """Evaluate under attacks on `count` examples in chunks of 16."""
    data = dale.load_dataset("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    labels = nn.functional.one_hot(data.train.labels, 10).float()
    images = data.train.convert(data.train.images).flatten(1)
    # better than chance, and well-posed, for some pixels are always dark
    model[1].weight.data = torch.linalg.solve(images.T @ images + torch.eye(64), images.T @ labels).T.contiguous()
    model[1].bias.data.zero_()
    with distributed.connected("cpu"):
        team = Team(distributed.rank(), distributed.world_size(), distributed.added)
        with shared_by(team):
            found = evaluate(
                model,
                data.test.first(count),
                dale.Linf(epsilon=0.02),
                ["fgsm", "pgd5x3"],
                batch_size=16,
                progress=False,
                checks=False,
            )
    outcomes = {name: outcome.tolist() for name, outcome in found.examples.items()}
    spent = [(a.accuracy.correct, a.gradients_spent, a.queries_spent, a.refuted) for a in found.attacks]
    return {"outcomes": outcomes, "spent": spent, "worst": found.worst.correct, "n": found.n}


def trained(out: str, resume: bool = False, **options: Any) -> dict[str, Any]:
    """`fit` in a folder; the selected weights."""
    data = dale.load_dataset("digits", train_size=100, validation_size=40)
    objective = algorithms.dale(dale.Linf(epsilon=0.1), **ROW)
    torch.manual_seed(os.getpid())  # every process starts elsewhere; the first one's start counts
    model = Net() if distributed.launched() and int(os.environ["RANK"]) else network(False)
    values = {"epochs": 4, "batch_size": 33, "averaging": Averaging(decay=0.9)} | options
    run = dale.fit(model, objective, data, out=out, device="cpu", progress=False, resume=resume, **values)
    return {"weights": {k: v.clone() for k, v in model.state_dict().items()}, "summary": run.summary}


def refused(message: str) -> list[str]:
    """Let the first process fail; the kind and the text of the error in every process."""
    from dale.errors import DaleError, UsageError

    def fail() -> None:
        raise UsageError(message)

    with distributed.connected("cpu"):
        try:
            distributed.first(fail)
        except DaleError as error:
            return [type(error).__name__, str(error)]
    return []


def too_small(out: str, **options: int) -> str:
    """Ask for batches of which a process has too few examples; the error."""
    from dale.errors import UsageError

    try:
        trained(out, **options)
    except UsageError as error:
        return str(error)
    return ""


def messages() -> dict[str, Any]:
    """Every kind of message once."""
    with distributed.connected("cpu"):
        rank = distributed.rank()
        rows = torch.arange(3 * rank, dtype=torch.float32).view(rank, 3)  # rank 0 has none
        agreement = distributed.Agreement()
        return {
            "total": [t.tolist() for t in distributed.total(torch.tensor(1.0 + rank), torch.full((2, 1), 10.0 * rank))],
            "added": distributed.added(torch.tensor([2**40 + rank])).tolist(),
            "agreed": distributed.agreed(15 if rank == 1 else 0),
            "late": [
                agreement(7 * (rank == 2)),
                agreement(0),
                agreement(rank),
                agreement.settled(),
                agreement.settled(),
            ],
            "gathered": distributed.gathered(rows).tolist(),
            "told": distributed.told("naïve" if rank == 0 else ""),
            "silence": distributed.told(""),
            "first": distributed.first(lambda: "done"),
        }
