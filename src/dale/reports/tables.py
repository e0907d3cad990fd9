"""Tables for a paper: the runs' results as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from dale.files import write_text
from dale.reports import facts
from dale.reports.facts import Score
from dale.reports.runs import RunFiles, dig, number


def results(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str | float | None]]]:
    """Return column names and one row of raw values per run: accuracies as shares, each with its interval."""
    attacks = list(dict.fromkeys(s.name for run in runs for s in facts.scores(run) if s.name != "clean"))
    head = ["run", "row", "model", "data", "perturbations", "limit", "constraint"]
    for name in ("clean", *attacks):
        head += [name, f"{name} lower", f"{name} upper"]
    head += ["held-out loss", "certified loss", "multiplier", "seconds", "seed", "n"]
    rows = []
    for run in runs:
        found = {score.name: score for score in facts.scores(run)}
        limits = " and ".join(str(limit) for limit in facts.limits(run))
        row: list[str | float | None] = [run.name, facts.algorithm(run), facts.model(run), facts.dataset(run)]
        row += [facts.measured(run), limits, facts.BRIEF[facts.verdict(run)]]
        for name in ("clean", *attacks):
            score = found.get(name)
            row += [None] * 3 if score is None else [score.value, score.lower, score.upper]
        row += [number(dig(run.summary, "validation", "nominal_loss")), _certified(run), facts.multiplier(run)]
        row += [number(run.summary.get("seconds")), number(dig(run.config, "training", "seed"))]
        row.append(number(run.evaluation.get("n")))
        rows.append(row)
    return head, rows


def _certified(run: RunFiles) -> float | None:
    return number(dig(run.evaluation, "certificate", "loss", "bound"))


def _images(run: RunFiles) -> str:
    n = number(run.evaluation.get("n"))
    return "-" if n is None else f"{n:,.0f}"


def _named(runs: Sequence[RunFiles]) -> list[tuple[str, list[str]]]:
    """What the runs differ in, or else the numbers of a column would pass for comparable: columns of a name each."""
    sets = [facts.measured(run) for run in runs]
    trained = {facts.perturbations(run) for run in runs} - {"none"}  # of a row that the set only measures
    data, images = [facts.dataset(run) for run in runs], [_images(run) for run in runs]
    differ = {
        "data": len(set(data)) > 1,
        "attacked in": len({*sets, *trained}) > 1,
        "test images": len({*images} - {"-"}) > 1,
    }
    return [(name, found) for (name, many), found in zip(differ.items(), (data, sets, images), strict=True) if many]


def _short(runs: Sequence[RunFiles]) -> tuple[list[str], list[list[str]], list[bool]]:
    """The columns that a page has room for, as text; and which of them are numbers."""
    attacks = list(dict.fromkeys(s.name for run in runs for s in facts.scores(run) if s.name != "clean"))
    named = _named(runs)
    head = ["run", "row", "limit", "constraint", *(name for name, _ in named)]
    texts = len(head)
    head += ["clean", *attacks, "held-out loss", "certified loss", "nu"]
    rows = []
    for place, run in enumerate(runs):
        found = {score.name: score for score in facts.scores(run)}
        limits = " and ".join(str(limit) for limit in facts.limits(run))
        held = number(dig(run.summary, "validation", "nominal_loss"))
        bound, dual = _certified(run), facts.multiplier(run)
        cells = [run.name, facts.algorithm(run), limits or "-", facts.BRIEF[facts.verdict(run)]]
        cells += [column[place] for _, column in named]
        cells += [_accuracy(found.get(name)) for name in ("clean", *attacks)]
        cells.append("-" if held is None else f"{held:.3f}")
        cells.append("-" if bound is None else _up(bound))
        rows.append([*cells, "-" if dual is None else f"{dual:.3f}"])
    return head, rows, [False] * texts + [True] * (len(head) - texts)


def _up(bound: float) -> str:
    """An upper bound with three digits, rounded to the side on which it stays true."""
    near = round(bound, 3)
    return f"{near if near >= bound else near + 0.001:.3f}"


def _accuracy(score: Score | None) -> str:
    if score is None:
        return "-"
    half = 0.0 if score.lower is None or score.upper is None else (score.upper - score.lower) / 2
    return f"{100 * score.value:.1f} ± {100 * half:.1f}" if half else f"{100 * score.value:.1f}"


def _note(runs: Sequence[RunFiles]) -> str:
    """What a reader of the table must know; the number of images where it is one for all."""
    counts = {_images(run) for run in runs} - {"-"}
    images = f"{counts.pop()} test images" if len(counts) == 1 else "test images"
    return (
        f"Accuracies in percent on {images}, ± half the width of the exact 95% interval; under attack they are upper "
        "bounds on the true robust accuracy. A certified loss bounds the nominal loss clipped at B, with the B and the "
        'confidence stated in the run\'s evaluation; of a limit on the loss "proven" says no more.'
    )


def markdown(runs: Sequence[RunFiles]) -> str:
    """The results as a Markdown table."""
    head, rows, numeric = _short(runs)
    lines = [
        "| " + " | ".join(map(escape_markdown, head)) + " |",
        "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
        *("| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows),
    ]
    return "\n".join([*lines, "", _note(runs)]) + "\n"


def escape_markdown(text: str) -> str:
    """Text that stays text: no column, tag, link or emphasis comes out of a run's name."""
    for sign in "\\`*_[]|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "<": r"$<$",
    ">": r"$>$",
}


def _latex(text: str) -> str:
    return " ".join("".join(_LATEX.get(sign, sign) for sign in text).split())


def latex(runs: Sequence[RunFiles]) -> str:
    """The results as a LaTeX tabular (with booktabs)."""
    head, rows, numeric = _short(runs)
    head = [r"$\nu$" if name == "nu" else _latex(name) for name in head]
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{tabular}{" + "".join("r" if right else "l" for right in numeric) + "}",
        "\\toprule",
        " & ".join(head) + r" \\",
        "\\midrule",
        *(" & ".join(map(_latex, row)) + r" \\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
        "% " + _note(runs),
    ]
    return "\n".join(lines) + "\n"


def comma_separated(runs: Sequence[RunFiles]) -> str:
    """All values as CSV, unrounded. Text that a spreadsheet would take for a formula is quoted with an apostrophe."""
    head, rows = results(runs)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(
            "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
            for value in row
        )
    return buffer.getvalue()


def write_tables(runs: Sequence[RunFiles], folder: str | Path) -> list[Path]:
    """Write results.md, results.tex and results.csv; returns their paths."""
    contents = {"results.md": markdown(runs), "results.tex": latex(runs), "results.csv": comma_separated(runs)}
    paths = []
    for name, text in contents.items():
        path = Path(folder) / name
        write_text(path, text.encode("utf-8", "replace").decode("utf-8"))
        paths.append(path)
    return paths
