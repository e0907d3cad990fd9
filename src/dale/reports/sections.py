"""The parts of the page that are words and tables; every text from a file passes through `escape`."""

# ruff: noqa: RUF001 (Greek letters, as in the paper, are meant)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dale.reports import facts
from dale.reports.facts import percent
from dale.reports.runs import RunFiles, dig, mappings, number

SIGNS: dict[facts.Verdict, str] = {"proven": "✓", "met": "◐", "missed": "✗", "none": "○", "unknown": "…"}

OVERLAY = """<section class="panel charts"><h2>All runs, epoch by epoch</h2>
<div class="controls"><label>Show <select id="measure">
<option value="robust_accuracy">held-out robust accuracy</option>
<option value="clean_accuracy">held-out clean accuracy</option>
<option value="held_out_loss">held-out nominal loss</option><option value="nominal_loss">nominal loss</option>
<option value="robust_loss">robust loss</option><option value="multiplier">multiplier ν</option>
<option value="seconds">seconds per epoch</option></select></label></div>
<div class="chart" id="overlay"></div></section>"""

GALLERY = """<section class="panel charts long"><h2>Gallery</h2>
<p>Test images under PGD: clean, the perturbation with its contrast stretched (of grey images: red adds, blue takes
away), and the perturbed image with the prediction. Move the slider to give the attacker more room.</p>
<div class="controls"><input type="range" id="epsilon" min="0" max="1" value="0" aria-label="radius of the attack">
<output id="epsilon-value" for="epsilon"></output><span class="soft" id="standing"></span></div>
<div class="chart" id="gallery"></div></section>"""


def summary(run: RunFiles, many: bool) -> str:
    """The top: what was trained, is the constraint met and how surely, accuracies with intervals, alarms."""
    kind = facts.verdict(run)
    parts = [
        f"<h2>{escape(run.name)}</h2>" if many else "",
        f"<p>{escape(facts.description(run))}</p>",
        f'<div class="verdict {kind}"><span class="sign" aria-hidden="true">{SIGNS[kind]}</span>'
        f"<div><b>{escape(facts.headline(run))}{_limits(run)}</b><p>{escape(facts.confidence(run))}</p></div></div>",
        _tiles(run),
        _alarms(run),
    ]
    return "".join(parts)


def _limits(run: RunFiles) -> str:
    found = " and ".join(str(limit) for limit in facts.limits(run))
    return f": {escape(found)}" if found else ""


def _tiles(run: RunFiles) -> str:
    names = {"clean": "clean accuracy", "worst": "worst of all attacks"}
    tiles = []
    for score in facts.scores(run):
        interval = "" if score.lower is None else f"[{percent(score.lower)}, {percent(score.upper)}]"
        name = names.get(score.name, f"under {score.name}")
        tiles.append((name, percent(score.value), interval))
    loss, error = number(dig(run.evaluation, "nominal_loss", "mean")), dig(run.evaluation, "nominal_loss")
    if loss is not None:
        spread = number(dig(error, "standard_error"))
        tiles.append(("nominal loss, test", f"{loss:.3f}", "" if spread is None else f"± {spread:.3f} (std. error)"))
    dual = facts.multiplier(run)
    if dual is not None:
        tiles.append(("multiplier ν", f"{dual:.3g}", "at the end"))
    if not tiles:
        held = run.summary.get("validation") or dig(run.metrics, -1, "validation")
        for key, name in (("clean_accuracy", "held-out clean"), ("robust_accuracy", "held-out robust")):
            value = number(dig(held, key))
            if value is not None:
                tiles.append((name, percent(value), "validation split"))
    inner = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in tiles
    )
    shown = number(dig(run.evaluation, "n"))
    images = "" if shown is None else f"On {shown:.0f} test images, with exact 95% intervals in brackets. "
    line = f'<p class="soft">{images}{_BOUND}</p>' if facts.scores(run) else ""
    return f'<div class="tiles">{inner}</div>{line}' if tiles else ""


_BOUND = "An accuracy under attack is an upper bound on the true robust accuracy: a stronger attack can only lower it."


def _alarms(run: RunFiles) -> str:
    found = facts.alarms(run)
    failed = [alarm for alarm in found if not alarm.passed]
    passed = [alarm for alarm in found if alarm.passed]
    parts = [f"<li><b>⚠ {escape(alarm.name)}</b>{escape(alarm.message)}</li>" for alarm in failed]
    html = f'<ul class="alarms">{"".join(parts)}</ul>' if parts else ""
    if passed:
        rows = "".join(f'<li class="passed"><b>✓ {escape(a.name)}</b>{escape(a.message)}</li>' for a in passed)
        count = f"{len(passed)} check{'s' if len(passed) > 1 else ''} against false robustness passed"
        html += f'<details><summary>{count}</summary><ul class="alarms">{rows}</ul></details>'
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in facts.remarks(run))
    return html + notes


def _cell(text: str, value: Any, *, numeric: bool = True) -> str:
    shown = "" if value is None else escape(str(value))
    kind = ' class="n"' if numeric else ""
    return f'<td{kind} data-value="{shown}">{text}</td>'


def runs_table(runs: Sequence[RunFiles]) -> str:
    """Many runs: a table that sorts by a click on its head, with a filter; a click on a row shows that run below."""
    attacks = list(dict.fromkeys(s.name for run in runs for s in facts.scores(run) if s.name != "clean"))[:6]
    heads = [("run", "text"), ("row", "text"), ("data", "text"), ("limit", "text"), ("constraint", "text")]
    heads += [(name, "number") for name in ("clean", *attacks, "held-out loss", "ν", "seconds")]
    head = "".join(
        f'<th scope="col" data-kind="{kind}"{" class=n" if kind == "number" else ""}>'
        f'<button type="button">{escape(name)}</button></th>'
        for name, kind in heads
    )
    rows = "".join(_row(k, run, attacks) for k, run in enumerate(runs))
    options = "".join(f'<option value="{k}">{escape(run.name)}</option>' for k, run in enumerate(runs))
    return (
        '<section class="panel long"><h2>Runs</h2><p>Click a column to sort, a row to see that run below. '
        "The filter also chooses the curves that are drawn.</p>"
        '<div class="controls"><label>Filter <input type="search" id="filter" placeholder="words, all of which match">'
        f'</label><span class="soft" id="count">{len(runs)} of {len(runs)} runs</span>'
        f'<label>Run shown below <select id="focus">{options}</select></label></div>'
        f'<div class="scroll"><table><thead id="runs-head"><tr>{head}</tr></thead>'
        f'<tbody id="runs-body">{rows}</tbody></table></div></section>'
    )


def _row(k: int, run: RunFiles, attacks: Sequence[str]) -> str:
    found = {score.name: score for score in facts.scores(run)}
    kind = facts.verdict(run)
    limits = " and ".join(str(limit) for limit in facts.limits(run))
    held = number(dig(run.summary, "validation", "nominal_loss"))
    dual, seconds = facts.multiplier(run), number(run.summary.get("seconds"))
    texts = [(run.name, escape(run.name)), (facts.algorithm(run), escape(facts.algorithm(run)))]
    texts += [(facts.dataset(run), escape(facts.dataset(run))), (limits, escape(limits or "-"))]
    badge = facts.BRIEF[kind]
    texts.append((badge, f'<span class="badge {kind}">{SIGNS[kind]} {badge}</span>'))
    cells = [_cell(text, value, numeric=False) for value, text in texts]
    for name in ("clean", *attacks):
        score = found.get(name)
        cells.append(_cell(percent(score.value if score else None), score.value if score else None))
    for value, form in ((held, ".3f"), (dual, ".3g"), (seconds, ".0f")):
        cells.append(_cell("-" if value is None else format(value, form), value))
    return f'<tr data-row="{k}">{"".join(cells)}</tr>'


def timings(run: RunFiles) -> str:
    """Seconds of training, of an epoch, of the evaluation and of each attack, and on what machine."""
    rows: list[tuple[str, str]] = []
    total = number(run.summary.get("seconds"))
    epochs = [number(dig(record, "seconds", "total")) for record in run.metrics]
    known = [value for value in epochs if value is not None]
    if total is not None:
        rows.append(("training", f"{total:.1f}"))
    if known:
        rows.append((f"an epoch (median of {len(known)})", f"{sorted(known)[len(known) // 2]:.2f}"))
    evaluation = number(run.evaluation.get("seconds"))
    if evaluation is not None:
        rows.append(("evaluation", f"{evaluation:.1f}"))
    for attack in mappings(run.evaluation.get("attacks")):
        spent, gradients = number(attack.get("seconds")), number(attack.get("gradients_spent"))
        if spent is not None:
            cost = "" if gradients is None else f" ({gradients:.0f} gradients)"
            rows.append((f"attack {attack.get('name', '?')}{cost}", f"{spent:.2f}"))
    cells = "".join(f'<tr><td>{escape(name)}</td><td class="n">{escape(value)}</td></tr>' for name, value in rows)
    machine = _machine(run.environment)
    table = f"<table><tbody>{cells}</tbody></table>" if rows else '<p class="soft">Nothing was timed.</p>'
    return table + (f'<p class="soft">{escape(machine)}</p>' if machine else "")


def _machine(environment: Mapping[str, Any]) -> str:
    parts = [environment.get(key) for key in ("gpu", "cpu", "system")]
    cores = environment.get("cores")
    parts.append(f"{cores} cores" if cores is not None else None)
    versions = [f"{key} {environment[key]}" for key in ("dale", "torch", "python") if key in environment]
    return ", ".join(str(part) for part in (*parts, *versions) if part)


def configuration(run: RunFiles, k: int) -> str:
    """The command that repeats the run, its configuration and its environment."""
    import json

    environment = json.dumps(run.environment, indent=2, ensure_ascii=False, default=str)
    return (
        "<h2>Configuration</h2><p>This command repeats the run:</p>"
        f'<div class="command"><pre id="command-{k}">{escape(facts.command(run))}</pre>'
        f'<button type="button" class="copy" data-copy="command-{k}">Copy</button></div>'
        f"<h3>config.yaml</h3><pre>{escape(run.config_text)}</pre>"
        f"<details><summary>Environment</summary><pre>{escape(environment)}</pre></details>"
    )
