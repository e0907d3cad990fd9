"""What a run's files say, in words and numbers that every form of report shares: page, figures, tables, model card."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dale.components import is_import_path
from dale.reports.runs import RunFiles, dig, mappings, number, numbers

Verdict = Literal["proven", "met", "missed", "none", "unknown"]

WORDS: dict[Verdict, str] = {
    "proven": "Constraint met, proven",
    "met": "Constraint met on held-out data, not proven",
    "missed": "Constraint NOT met",
    "none": "No constraint",
    "unknown": "Not finished",
}
BRIEF: dict[Verdict, str] = {
    "proven": "proven",
    "met": "met",
    "missed": "not met",
    "none": "none",
    "unknown": "unfinished",
}
# in the text of an objective: nothing in it sees a perturbed image
_CLEAN = re.compile(r"\b(?:sampler=None|robust_loss=None|robust_weight=0(?:\.0)?)(?=[,)])")


@dataclass(frozen=True)
class Score:
    """An accuracy with its exact interval: `name` is "clean", an attack, or "worst" of all attacks."""

    name: str
    value: float
    lower: float | None
    upper: float | None
    n: int | None
    seconds: float | None = None


def score(name: str, plain: Any, seconds: Any = None) -> Score | None:
    """Read an accuracy of an evaluation file."""
    value = number(dig(plain, "accuracy"))
    if value is None:
        return None
    n = number(dig(plain, "n"))
    lower, upper = number(dig(plain, "lower")), number(dig(plain, "upper"))
    return Score(name, value, lower, upper, None if n is None else int(n), number(seconds))


def scores(run: RunFiles) -> list[Score]:
    """Clean accuracy, accuracy under each attack, and the worst case where it is lower than under each alone."""
    attacks = [
        score(str(attack.get("name", "attack")), attack.get("accuracy"), attack.get("seconds"))
        for attack in mappings(run.evaluation.get("attacks"))
    ]
    under = [found for found in attacks if found is not None]
    worst = score("worst", run.evaluation.get("worst"))
    if worst is not None and under and worst.value >= min(found.value for found in under):
        worst = None
    clean = score("clean", run.evaluation.get("clean"))
    return [found for found in (clean, *under, worst) if found is not None]


def robust(run: RunFiles) -> Score | None:
    """The robust accuracy to quote: the lowest one measured."""
    return min((found for found in scores(run) if found.name != "clean"), key=lambda s: s.value, default=None)


def clean(run: RunFiles) -> Score | None:
    """The clean accuracy."""
    return score("clean", run.evaluation.get("clean"))


def algorithm(run: RunFiles) -> str:
    """The row's name."""
    return str(dig(run.config, "objective", "name") or "?")


def dataset(run: RunFiles) -> str:
    """The data set's name or file."""
    return str(dig(run.config, "data", "dataset") or "?")


def model(run: RunFiles) -> str:
    """The model's name."""
    return str(dig(run.config, "model", "name") or "?")


def describe_set(plain: Any) -> str:
    """A perturbation set in a few words: l-infinity ball of radius 0.25; Rotation(degrees=30)."""
    if not isinstance(plain, Mapping):
        return "none"
    kind = str(plain.get("type", "?"))
    norms = {"Linf": "l-infinity", "L2": "l2", "L1": "l1"}
    radius = number(plain.get("epsilon"))
    if kind in norms and radius is not None:
        whole = radius * 255
        shown = f"{whole:.0f}/255" if abs(whole - round(whole)) < 1e-6 and 0 < whole < 64 else f"{radius:.4g}"
        return f"{norms[kind]} ball of radius {shown}"
    fields = ", ".join(f"{key}={value}" for key, value in plain.items() if key != "type")
    return f"{kind}({fields})"


def perturbations(run: RunFiles) -> str:
    """The perturbation set that the run was trained against, in words; "none" of a row that trains on clean images.

    Such a row may name a set all the same, which then only measures it.
    """
    if _on_clean_images(run):
        return describe_set(None)
    return describe_set(dig(run.config, "objective", "perturbations") or run.evaluation.get("perturbations"))


def measured(run: RunFiles) -> str:
    """The perturbation set that the run's accuracies under attack are about, in words."""
    return describe_set(run.evaluation.get("perturbations") or dig(run.config, "objective", "perturbations"))


def _on_clean_images(run: RunFiles) -> bool:
    """Whether the row trains on clean images alone, as its objective's text says; a run without the text is not one."""
    text = run.environment.get("objective")
    return isinstance(text, str) and _CLEAN.search(text) is not None


@dataclass(frozen=True)
class Limit:
    """A constraint: mean nominal loss, or 0-1 error, of all examples or of each class or group, at most `values`."""

    name: str
    by: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        whom = "" if self.by == "all" else f" of every {self.by}"
        low, high = min(self.values), max(self.values)
        value = f"{low:.4g}" if low == high else f"{low:.4g}..{high:.4g}"
        if self.name == "error":
            if low == high:
                return f"clean accuracy{whom} ≥ {1 - self.values[0]:.4g}"
            return f"clean error{whom} ≤ {value}"
        return f"nominal loss{whom} ≤ {value}"


def limits(run: RunFiles) -> list[Limit]:
    """The constraints, as the log recorded them."""
    found = []
    for record in mappings(dig(run.metrics, -1, "constraints")):
        values = tuple(value for value in numbers(record.get("limit")) if value is not None)
        if values:
            found.append(Limit(str(record.get("name", "loss")), str(record.get("by", "all")), values))
    return found


def verdict(run: RunFiles) -> Verdict:
    """Whether the constraint is met: proven by the certificate, met on held-out data, missed, or none given.

    Held-out data have the first word: the certificate bounds a clipped loss, which can lie below a limit that the loss
    itself, the one promised, is far above.
    """
    feasible = run.summary.get("feasible")
    if not run.summary:
        return "unknown"
    if feasible is None:
        return "none"
    if feasible is not True:
        return "missed"
    return "proven" if dig(run.evaluation, "certificate", "holds") is True else "met"


def proven(run: RunFiles) -> str:
    """What the certificate proves to keep its limit, by name, a loss with its clipping; nothing where it does not."""
    certificate = run.evaluation.get("certificate")
    level = number(dig(certificate, "clip"))
    clipped = "the nominal loss clipped at B" + ("" if level is None else f" = {level:.4g}")
    names = {"loss_holds": clipped, "accuracy_holds": "the clean accuracy"}
    return " and ".join(name for key, name in names.items() if dig(certificate, key) is True)


def headline(run: RunFiles) -> str:
    """The verdict in words; one that is proven says of what, which for a loss is less than was promised."""
    kind = verdict(run)
    of = proven(run) if kind == "proven" else ""
    return WORDS[kind] + (f" for {of}" if of else "")


def confidence(run: RunFiles) -> str:
    """What is known about the constraint and how surely, in a sentence or two."""
    kind = verdict(run)
    if kind == "unknown":
        return "The run has not finished: no weights were selected yet."
    if kind == "none":
        return "This row trains without a constraint: it promises nothing about nominal performance."
    parts = []
    if kind == "missed":
        excess = number(run.summary.get("violation"))
        parts.append(
            "On held-out data the constraint is violated"
            + (f" by {excess:.3g} beyond the standard error" if excess is not None and excess > 0 else "")
            + "; of the checkpoints within a tenth of the smallest violation the most robust was kept."
        )
        if proven(run):
            unclipped = dig(run.evaluation, "certificate", "loss_holds") is True
            parts.append(
                f"The certificate, from other images, proves the limit for {proven(run)}"
                + (" alone: the loss itself, which is what was promised, may lie above it." if unclipped else ".")
            )
    statement = dig(run.evaluation, "certificate", "statement")
    if statement:
        parts.append(str(statement))
    elif kind == "met":
        parts.append("Met within the standard error on the validation split; no certificate was computed.")
    return " ".join(parts)


@dataclass(frozen=True)
class Warned:
    """One check of the evaluation or the training, in plain words."""

    name: str
    passed: bool
    message: str


def alarms(run: RunFiles) -> list[Warned]:
    """The evaluation's alarms, its notes, the training's warnings, and files that could not be read."""
    found = [
        Warned(str(alarm.get("name", "check")), alarm.get("passed") is True, str(alarm.get("message", "")))
        for alarm in mappings(run.evaluation.get("alarms"))
    ]
    for source, name in ((run.summary.get("warnings"), "training"), (run.notes, "files")):
        if isinstance(source, (list, tuple)):
            found += [Warned(name, False, str(line)) for line in source]
    return found


def remarks(run: RunFiles) -> list[str]:
    """Remarks of the evaluation that are no alarms."""
    notes = run.evaluation.get("notes")
    return [str(note) for note in notes] if isinstance(notes, (list, tuple)) else []


def description(run: RunFiles) -> str:
    """What was trained, in one sentence."""
    epochs, seed = dig(run.config, "training", "epochs"), dig(run.config, "training", "seed")
    selected = number(run.summary.get("selected_epoch"))
    under = " and ".join(str(limit) for limit in limits(run))
    parts = [
        f"{algorithm(run)} trained {model(run)} on {dataset(run)} against perturbations from the {perturbations(run)}"
        if perturbations(run) != "none"
        else f"{algorithm(run)} trained {model(run)} on {dataset(run)} without perturbations",
        f"under {under}" if under else "",
        f"for {epochs} epochs (seed {seed})" if epochs is not None else "",
    ]
    sentence = ", ".join(part for part in parts if part) + "."
    if selected is not None:
        sentence += f" The weights of epoch {selected:.0f} were selected on held-out data."
    return sentence


def multiplier(run: RunFiles) -> float | None:
    """The largest multiplier at the end."""
    values = run.summary.get("multipliers")
    flat = [v for group in values for v in numbers(group)] if isinstance(values, list) else []
    return max((v for v in flat if v is not None), default=None)


def command(run: RunFiles) -> str:
    """The command that repeats the run."""
    trust = " --trust" if _names_code(run.config) else ""
    return f"dale train --config {shlex.quote(str(run.path / 'config.yaml'))}{trust}"


def _names_code(plain: Any, key: str = "", depth: int = 50) -> bool:
    if depth == 0:
        return False
    if isinstance(plain, Mapping):
        return any(_names_code(value, str(name), depth - 1) for name, value in plain.items())
    if isinstance(plain, (list, tuple)):
        return any(_names_code(value, key, depth - 1) for value in plain)
    return isinstance(plain, str) and key not in ("dataset", "data_dir", "init") and is_import_path(plain)


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage; a dash for nothing."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"
