"""The model card: what a model is, how it was made, what is known about it and where that ends, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from dale.reports import facts
from dale.reports.facts import percent
from dale.reports.runs import RunFiles, dig, number
from dale.reports.tables import escape_markdown as text


def model_card(run: RunFiles, usage: str, files: Sequence[str] = ()) -> str:
    """Return the card of a run; `usage` is a block of Markdown that shows how to load the model."""
    parts = [
        f"# {text(facts.model(run))} trained on {text(facts.dataset(run))} by {text(facts.algorithm(run))}",
        text(facts.description(run)),
        "## Use",
        usage.strip(),
        "Input: images with values in [0, 1], shape (batch, channels, height, width). Output: logits. Normalisation is "
        "part of the model.",
        *(["Files: " + ", ".join(f"`{name}`" for name in files) + "."] if files else []),
        "## Data",
        _data(run),
        "## Method",
        _method(run),
        "## Constraint and certificate",
        _constraint(run),
        "## Evaluation",
        _evaluation(run),
        "## Limits",
        _limits(run),
        "## Repeating it",
        f"    {_code(facts.command(run))}",
        _versions(run),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _data(run: RunFiles) -> str:
    sizes = {part: number(dig(run.config, "data", f"{part}_size")) for part in ("train", "validation", "certification")}
    given = ", ".join(f"{size:.0f} for {part}" for part, size in sizes.items() if size is not None)
    names = run.evaluation.get("class_names")
    classes = [text(str(name)) for name in names] if isinstance(names, list) else []
    shown = ", ".join(classes[:20]) + (f" and {len(classes) - 20} more" if len(classes) > 20 else "")
    return (
        f"Trained on {text(facts.dataset(run))}" + (f" ({given})" if given else "") + ". The validation split selected "
        "the checkpoint, the certification split served the certificate alone, and the test split nothing but the "
        "evaluation below." + (f" Classes: {shown}." if classes else "")
    )


def _method(run: RunFiles) -> str:
    epochs, seed = dig(run.config, "training", "epochs"), dig(run.config, "training", "seed")
    optimiser = dig(run.config, "training", "optimiser", "type")
    attack = facts.perturbations(run)
    return (
        f"Row `{_code(facts.algorithm(run))}`, model `{_code(facts.model(run))}`, perturbations: {text(attack)}; "
        f"{text(str(epochs))} epochs of {text(str(optimiser))}, seed {text(str(seed))}. "
        "The full configuration is in `config.yaml`."
    )


def _constraint(run: RunFiles) -> str:
    found = " and ".join(str(limit) for limit in facts.limits(run))
    head = f"**{facts.headline(run)}**" + (f": {text(found)}." if found else ".")
    return f"{head} {text(facts.confidence(run))}"


def _evaluation(run: RunFiles) -> str:
    scores = facts.scores(run)
    if not scores:
        return "Not evaluated."
    names = {"clean": "none (clean)", "worst": "worst of all attacks"}
    rows = ["| attack | accuracy | exact 95% interval | images |", "| --- | ---: | ---: | ---: |"]
    for score in scores:
        interval = "-" if score.lower is None else f"{percent(score.lower)} to {percent(score.upper)}"
        name = text(names.get(score.name, score.name))
        rows.append(f"| {name} | {percent(score.value)} | {interval} | {'-' if score.n is None else score.n} |")
    failed = [f"- **{text(alarm.name)}**: {text(alarm.message)}" for alarm in facts.alarms(run) if not alarm.passed]
    warned = "\n\nWarnings:\n\n" + "\n".join(failed) if failed else ""
    return "\n".join(rows) + warned


def _limits(run: RunFiles) -> str:
    lines = [
        "An accuracy under attack is an upper bound on the true robust accuracy: a stronger attack can only lower it.",
        _against(text(facts.perturbations(run)), text(facts.measured(run))),
        "Certificate and intervals hold for data drawn as the certification and test data were; they do not carry over "
        "to other sources.",
    ]
    if dig(run.evaluation, "certificate", "clip") is not None:
        lines.append("The certificate bounds the loss clipped at the level that it states, not the unclipped loss.")
    if facts.verdict(run) == "missed":
        lines.append("The constraint is not met: do not rely on the nominal performance that was asked for.")
    return "\n".join(f"- {line}" for line in lines)


def _against(trained: str, measured: str) -> str:
    """What the robustness is about; a row that trains on clean images has a set that measures it and no other."""
    if measured == "none":
        return "Robustness was neither trained nor measured."
    if trained == "none":
        known = f"Robustness was not trained, only measured, and against one set only, the {measured}"
    elif trained == measured:
        known = f"Robustness was trained and measured against one set only, the {trained}"
    else:
        known = f"Robustness was trained against one set, the {trained}, and measured against another, the {measured}"
    return f"{known}; it says nothing about other norms, larger radii or changes of another kind."


def _versions(run: RunFiles) -> str:
    known = [
        f"{key} {text(str(run.environment[key]))}" for key in ("dale", "torch", "python") if key in run.environment
    ]
    return f"Made with {', '.join(known)}." if known else ""


def _code(name: str) -> str:
    """Text inside backticks: anything but a backtick or a line's end."""
    return " ".join(name.replace("`", "'").split())
