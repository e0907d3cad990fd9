"""Training state is data: one `TrainState`, saved and restored as a whole. Nothing that matters hides elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dale.constraints import Dual
from dale.errors import CheckpointError
from dale.objectives import Duals
from dale.training.averaging import AveragedModel
from dale.training.selection import Selection

FORMAT = 1  # of checkpoints; raised when older ones can no longer be read


@dataclass
class TrainState:
    """Everything a run is, between two steps.

    Position: `epoch` and `batch` are the next ones to do. `totals` are the running sums of the epoch's metrics, on the
    device, and `seconds` those that the epoch took so far. `selection` holds the validated candidates.
    """

    model: nn.Module
    optimiser: torch.optim.Optimizer
    duals: Duals
    average: AveragedModel | None = None
    epoch: int = 0
    batch: int = 0
    totals: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    selection: Selection = field(default_factory=Selection)
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def shipped(self) -> nn.Module:
        """The model that will be shipped: the average where there is one."""
        return self.model if self.average is None else self.average.module

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, by name."""
        named: dict[str, Tensor] = {f"model/{k}": v for k, v in self.model.state_dict().items()}
        if self.average is not None:
            named |= {f"average/{k}": v for k, v in self.average.module.state_dict().items()}
        for number, slots in self.optimiser.state_dict()["state"].items():
            for slot, value in slots.items():
                if value is not None:
                    named[f"optimiser/{number}/{slot}"] = torch.as_tensor(value)
        for number, dual in enumerate(self.duals):
            named |= {f"dual/{number}/{slot}": value for slot, value in vars(dual).items()}
        return named | {f"totals/{k}": v for k, v in self.totals.items()}

    def facts(self) -> dict[str, Any]:
        """All of the state that is not tensors."""
        return {
            "format": FORMAT,
            "epoch": self.epoch,
            "batch": self.batch,
            "seconds": self.seconds,
            "updates": 0 if self.average is None else int(self.average.updates),
            "selection": self.selection.to_plain(),
            "history": list(self.history),
        }

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any], where: object = "checkpoint") -> None:
        """Take over a saved state; the model, optimiser and average must be built as for the run that saved it."""
        if facts.get("format") != FORMAT:
            raise CheckpointError(f"{where}: checkpoint format {facts.get('format')!r}, this version reads {FORMAT}")
        try:
            rooms: dict[str, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                room, _, rest = name.partition("/")
                rooms.setdefault(room, {})[rest] = value
            self.model.load_state_dict(rooms.get("model", {}))
            if self.average is not None:
                self.average.module.load_state_dict(rooms.get("average", {}))
                self.average.updates.fill_(int(facts["updates"]))
            self._restore_optimiser(rooms.get("optimiser", {}))
            self._restore_duals(rooms.get("dual", {}))
            self.epoch, self.batch, self.seconds = (
                int(facts["epoch"]),
                int(facts["batch"]),
                float(facts.get("seconds", 0.0)),
            )
            self.selection = Selection.from_plain(facts["selection"])
            self.history = list(facts["history"])
            device = next(self.model.parameters()).device
            self.totals = {name: value.to(device) for name, value in rooms.get("totals", {}).items()}
        except (KeyError, RuntimeError, ValueError, TypeError, OverflowError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{where} does not belong to this run's model and objective: {reason}") from error

    def _restore_optimiser(self, saved: dict[str, Tensor]) -> None:
        slots: dict[int, dict[str, Tensor]] = {}
        for name, value in saved.items():
            number, _, slot = name.partition("/")
            slots.setdefault(int(number), {})[slot] = value
        self.optimiser.load_state_dict({"state": slots, "param_groups": self.optimiser.state_dict()["param_groups"]})

    def _restore_duals(self, saved: dict[str, Tensor]) -> None:
        duals = []
        for number, dual in enumerate(self.duals):
            values = {slot: saved[f"{number}/{slot}"] for slot in vars(dual)}
            for slot, value in values.items():
                if value.shape != getattr(dual, slot).shape:
                    raise ValueError(f"dual {number} has {tuple(value.shape)} multipliers")
            duals.append(Dual(**values).to(dual.multiplier.device))
        self.duals = tuple(duals)
