"""An evaluation as a table that a person reads."""

from __future__ import annotations

from dale.evaluation.results import Accuracy, Evaluation

FOOTER = (
    "Accuracy under attack is an upper bound on the true robust accuracy: a stronger attack can only lower it.\n"
    "Intervals are exact (Clopper-Pearson, 95%) and speak of new examples of the same kind, not of stronger attacks."
)


def as_text(evaluation: Evaluation) -> str:
    """Return the table, the warnings and the footer."""
    e = evaluation
    options = ", ".join(f"{k}={_number(v)}" for k, v in e.perturbations.items() if k != "type")
    lines = [f"{e.n} examples, {e.perturbations['type']}({options}), seed {e.seed}", ""]
    header = f"{'':<24}{'accuracy':>9}  {'95% interval':<16}{'gradients':>10}{'queries':>9}{'seconds':>9}"
    lines += [header, "-" * len(header), _row("clean", e.clean)]
    for a in e.attacks:
        lines.append(_row(a.name, a.accuracy, f"{a.gradients:>10}{a.queries:>9}{a.seconds:>9.1f}"))
    if len(e.attacks) > 1:
        lines.append(_row("worst case", e.worst))
    if e.attacks:
        lines.append("gradients and queries: the most for one example")
    lines += ["", _loss(e)]
    lines += _classes(e)
    if e.curve:
        lines += ["", f"{'epsilon':<24}{'accuracy':>9}  {'95% interval':<16}"]
        lines += [_row(f"{point.epsilon:.6g}", point.accuracy) for point in e.curve]
    if e.notes:
        lines += ["", *(f"note: {note}" for note in e.notes)]
    if e.alarms:
        passed = sum(alarm.passed for alarm in e.alarms)
        lines += ["", f"checks against false robustness: {passed} of {len(e.alarms)} passed"]
        lines += [f"warning: {alarm.name}: {alarm.message}" for alarm in e.warnings]
    if e.attacks:
        lines += ["", FOOTER]
    return "\n".join(lines)


def _row(name: str, accuracy: Accuracy, rest: str = "") -> str:
    low, high = accuracy.interval
    interval = f"[{100 * low:.2f}, {100 * high:.2f}]"
    return f"{name:<24}{100 * accuracy.value:>8.2f}%  {interval:<16}{rest}".rstrip()


def _loss(e: Evaluation) -> str:
    loss = e.nominal_loss
    error = "unknown" if loss.standard_error is None else f"{loss.standard_error:.4f}"
    text = f"nominal loss {loss.mean:.4f} (standard error {error})"
    if loss.rho is None:
        return text
    verdict = "at most" if loss.holds else "NOT at most"
    return f"{text}, {verdict} rho = {loss.rho:g} on these examples"


def _classes(e: Evaluation) -> list[str]:
    if not e.attacks or len(e.clean_per_class) > 20:
        return []
    lines = ["", f"{'class':<24}{'clean':>9}{'worst':>9}"]
    for number, (clean, worst) in enumerate(zip(e.clean_per_class, e.worst_per_class, strict=True)):
        name = e.class_names[number] if number < len(e.class_names) else str(number)
        if clean is not None and worst is not None:
            lines.append(f"{name[:23]:<24}{100 * clean.value:>8.1f}%{100 * worst.value:>8.1f}%")
    return lines


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
