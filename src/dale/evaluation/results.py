"""What an evaluation found: numbers with their intervals, budgets, seeds, versions and warnings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dale.certificates import clopper_pearson
from dale.errors import CheckpointError
from dale.files import read_json, write_json

FORMAT = 1
ALPHA = 0.05


@dataclass(frozen=True)
class Accuracy:
    """An accuracy with its exact 95% interval (Clopper and Pearson): `correct` of `n` examples."""

    correct: int
    n: int

    @property
    def value(self) -> float:
        """The share of correct predictions."""
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """The exact two-sided 95% interval for the probability of a correct prediction."""
        return clopper_pearson(self.correct, self.n, ALPHA)

    def to_plain(self) -> dict[str, Any]:
        """Counts, value and interval."""
        low, high = self.interval
        return {"correct": self.correct, "n": self.n, "accuracy": self.value, "lower": low, "upper": high}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Accuracy:
        """Read what `to_plain` wrote."""
        return Accuracy(int(plain["correct"]), int(plain["n"]))


@dataclass(frozen=True)
class AttackResult:
    """The accuracy under one attack, what the attack was allowed, and what it spent.

    `gradients` and `queries` of the budget are per example, at most; the ones spent are summed over all examples.
    `refuted` examples looked fallen to the search but were not, in the final pass; for `blind` ones a gradient was not
    finite, so that the attack was hampered there.
    """

    name: str
    accuracy: Accuracy
    per_class: tuple[Accuracy | None, ...]
    steps: int
    restarts: int
    gradients: int
    queries: int
    gradients_spent: int
    queries_spent: int
    seconds: float
    seed: int
    attack: Mapping[str, Any]
    white_box: bool = True
    refuted: int = 0
    blind: int = 0


@dataclass(frozen=True)
class Alarm:
    """One check against false robustness: whether it passed, what was seen, and what that means."""

    name: str
    passed: bool
    message: str


@dataclass(frozen=True)
class Loss:
    """The mean nominal loss, its standard error (None for one example), and the limit it is held to (None: none)."""

    mean: float
    standard_error: float | None
    rho: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the mean meets the limit."""
        return None if self.rho is None else self.mean <= self.rho


@dataclass(frozen=True)
class CurvePoint:
    """The accuracy at one radius."""

    epsilon: float
    accuracy: Accuracy


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a model under attacks: `print` it, or write it with `save`.

    Accuracy under attack is an upper bound on the true robust accuracy: a stronger attack can only lower it. The worst
    case counts an example as fallen if any attack fools the model on it. `examples` holds the outcome of each example
    (True: correct) by "clean", the attacks' names and "worst"; it stays in memory and is not written. `precision` is
    that of the search: "ieee", strict float32, or "tf32"; what is counted was confirmed in strict float32.
    """

    n: int
    perturbations: Mapping[str, Any]
    clean: Accuracy
    clean_per_class: tuple[Accuracy | None, ...]
    nominal_loss: Loss
    attacks: tuple[AttackResult, ...]
    worst: Accuracy
    worst_per_class: tuple[Accuracy | None, ...]
    seed: int
    batch_size: int
    seconds: float
    precision: str = "ieee"
    alarms: tuple[Alarm, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    fingerprint: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, name: str) -> AttackResult:
        """Return the result of the attack called `name`."""
        for result in self.attacks:
            if result.name == name:
                return result
        raise KeyError(name)

    @property
    def warnings(self) -> tuple[Alarm, ...]:
        """The checks that failed."""
        return tuple(alarm for alarm in self.alarms if not alarm.passed)

    def to_plain(self) -> dict[str, Any]:
        """Return mappings, lists and numbers for a JSON file."""
        plain: dict[str, Any] = {"format": FORMAT}
        for entry in dataclasses.fields(self):
            if entry.name != "examples":
                plain[entry.name] = _plain(getattr(self, entry.name))
        return plain

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Evaluation:
        """Read what `to_plain` wrote; the outcomes of single examples are not in it."""
        if plain.get("format") != FORMAT:
            raise CheckpointError(f"an evaluation of format {FORMAT} was expected, got {plain.get('format')!r}")
        # others add to the file, a certificate for instance
        known = {entry.name for entry in dataclasses.fields(Evaluation)}
        values = {key: value for key, value in plain.items() if key in known}
        for key in ("clean", "worst"):
            values[key] = Accuracy.from_plain(values[key])
            values[f"{key}_per_class"] = _per_class(values[f"{key}_per_class"])
        values["nominal_loss"] = Loss(**{k: v for k, v in values["nominal_loss"].items() if k != "holds"})
        values["attacks"] = tuple(
            AttackResult(
                **{**a, "accuracy": Accuracy.from_plain(a["accuracy"]), "per_class": _per_class(a["per_class"])}
            )
            for a in values["attacks"]
        )
        values["alarms"] = tuple(Alarm(**alarm) for alarm in values["alarms"])
        points = values["curve"]
        values["curve"] = tuple(CurvePoint(p["epsilon"], Accuracy.from_plain(p["accuracy"])) for p in points)
        for key in ("notes", "class_names"):
            values[key] = tuple(values[key])
        return Evaluation(**values)

    def save(self, path: str | Path) -> None:
        """Write a JSON file, all of it or nothing."""
        write_json(Path(path), self.to_plain())

    @staticmethod
    def load(path: str | Path) -> Evaluation:
        """Read a JSON file that `save` wrote."""
        try:
            return Evaluation.from_plain(read_json(Path(path)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not an evaluation file: {error}") from error

    def __str__(self) -> str:
        from dale.evaluation.table import as_text

        return as_text(self)


def _per_class(plain: list[Mapping[str, Any] | None]) -> tuple[Accuracy | None, ...]:
    return tuple(None if item is None else Accuracy.from_plain(item) for item in plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Accuracy):
        return value.to_plain()
    if isinstance(value, Loss):
        return {**dataclasses.asdict(value), "holds": value.holds}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
