"""Tables from result files: ours, the paper's, the difference, the spread over seeds; Markdown, HTML and CSV.

Pure functions of the files: nothing is run, and what was not run is said to be so.
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dale.files import write_text
from dale.reports.series import paper
from dale.reproduction.catalogue import TABLES, TIMED, Row, chosen, rows_of
from dale.reproduction.recipes import Spec, default_model, paper_attack
from dale.reproduction.results import Result, Summary, find_results, is_current, summarise
from dale.reproduction.timing import find_timing, machine

MISSING = "not run"
OLD = "†"  # beside a row, a result of which was made by another recipe than today's
OLD_NOTE = f"{OLD} All or some of its results were made by another recipe than today's."
# the attacks of the paper's columns, and those it did not make, weakest first
NAMES = {
    "clean": "clean",
    "fgsm": "FGSM",
    "pgd10@0.1-last": "PGD-10",
    "pgd20-last": "PGD-20",
    "pgd20": "PGD-20, best iterate",
    "pgd20-margin": "PGD-20, margin",
    "pgd20x2": "PGD-20, 2 restarts",
    "pgd20x10": "PGD-20, 10 restarts",
    "autoattack-fast": "APGD-CE + APGD-T",
    "autoattack": "AutoAttack",
}


@dataclass(frozen=True)
class Table:
    """A table: what it is called, its columns, its rows as text, what a reader must know, and the numbers for a CSV.

    `values` has more columns than a page has room for.
    """

    name: str
    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    value_head: tuple[str, ...]
    values: tuple[tuple[str | float | None, ...], ...]

    @property
    def empty(self) -> bool:
        """Whether nothing in it was run."""
        return all(MISSING in row for row in self.rows)

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [
            "| " + " | ".join(_cell(name) for name in self.head) + " |",
            "|---|" + "---:|" * (len(self.head) - 1),
            *("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in self.rows),
        ]
        return "\n".join([f"**{self.title}**", "", *lines, "", *self.notes]) + "\n"

    def as_html(self) -> str:
        """The table as a page of its own."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.head)
        body = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        style = (
            "body{font:15px/1.5 system-ui,sans-serif;margin:2rem}table{border-collapse:collapse}"
            "th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right}"
            "th:first-child,td:first-child{text-align:left}caption{text-align:left;font-weight:600;padding:.5rem 0}"
        )
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
            f"<style>{style}</style></head><body>\n<table><caption>{html.escape(self.title)}</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>\n{notes}\n</body></html>\n"
        )

    def as_csv(self) -> str:
        """The numbers behind the table."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.value_head)
        writer.writerows(["" if value is None else value for value in row] for row in self.values)
        return text.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Write the three files."""
        written = []
        for suffix, text in (("md", self.markdown()), ("html", self.as_html()), ("csv", self.as_csv())):
            path = folder / f"{self.name}.{suffix}"
            write_text(path, text)
            written.append(path)
        return written


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _heading(table: str) -> str:
    return table.replace("table", "Table ") if table.startswith("table") else table.capitalize()


def make_table(
    table: str, dataset: str, model: str | None, budget: str, root: Path, names: Sequence[str] | None = None
) -> Table:
    """The table of a name from the results below `root`."""
    model = model or default_model(dataset)
    rows = chosen(rows_of(table, dataset, model), names)
    if table in TIMED:
        return _timing_table(table, dataset, model, budget, rows, root)
    return _accuracy_table(table, dataset, model, budget, rows, root)


def _accuracy_table(table: str, dataset: str, model: str, budget: str, rows: Sequence[Row], root: Path) -> Table:
    specs = [row.spec(dataset, model, budget, 0) for row in rows]
    found = [find_results(root, spec) for spec in specs]
    columns = ["clean", paper_attack(dataset, "fgsm"), paper_attack(dataset, "pgd")]
    stronger = [name for name in _attacks(specs) if name not in columns]
    printed = any(row.printed is not None for row in rows)
    head, value_head = ["row", "seeds"], ["row", "seeds", "result"]
    for name in columns:
        head += [NAMES[name], *(["paper (difference)"] if printed else [])]
        value_head += [*_of(name), f"{name} paper"]
    for name in stronger:
        head.append(NAMES.get(name, name))
        value_head += _of(name)
    head += ["held-out loss", "nu"]
    value_head += ["held-out loss", "nu", "feasible", "seconds", "of another recipe"]
    cells, values = [], []
    for row, spec, results in zip(rows, specs, found, strict=True):
        cells.append(tuple(_cells(row, spec, results, columns, stronger, printed)))
        values.append(tuple(_values(row, spec, results, columns, stronger)))
    name = "-".join([table, dataset, *([model] if model != default_model(dataset) else []), budget])
    title = f"{_heading(table)}, {dataset}, {model}, budget {budget}: {TABLES[table][1]}"
    return Table(name, title, tuple(head), tuple(cells), _notes(found, specs), tuple(value_head), tuple(values))


def _of(name: str) -> list[str]:
    """The columns of a CSV that an accuracy has."""
    return [name, *(f"{name} {what}" for what in ("spread", "seeds", "n", "lower", "upper"))]


def marked(label: str, spec: Spec, results: Sequence[Result]) -> str:
    """The label of a row, with a mark where a result behind it was made by another recipe than today's."""
    return label if all(is_current(result, spec) for result in results) else f"{label} {OLD}"


def _attacks(specs: Sequence[Spec]) -> list[str]:
    """The attacks of the recipes, in their order."""
    return list(dict.fromkeys(name for spec in specs for stage in spec.stages() for name in stage.attacks))


def _cells(
    row: Row, spec: Spec, results: Sequence[Result], columns: Sequence[str], stronger: Sequence[str], printed: bool
) -> Iterator[str]:
    yield marked(row.label, spec, results)
    yield str(len(results)) if results else MISSING
    for place, name in enumerate(columns):
        ours = summarise(results, name)
        yield _share(ours, len(results))
        if printed:
            theirs = None if row.printed is None else row.printed[place]
            gap = "" if theirs is None or ours is None else f" ({round(100 * ours.mean - theirs, 1) + 0.0:+.1f})"
            yield "" if theirs is None else f"{float(theirs)}{gap}"
    for name in stronger:
        yield _share(summarise(results, name), len(results))
    yield _average(results, "held_out_loss", 3)
    yield _average(results, "multipliers", 3)


def _values(
    row: Row, spec: Spec, results: Sequence[Result], columns: Sequence[str], stronger: Sequence[str]
) -> Iterator[str | float | None]:
    yield row.label
    yield len(results)
    yield f"{spec.dataset}/{spec.model}/{spec.slug.rpartition('-seed')[0]}"
    for place, name in enumerate((*columns, *stronger)):
        ours = summarise(results, name)
        first = results[0].accuracy(name) if len(results) == 1 else None
        yield None if ours is None else round(100 * ours.mean, 4)
        yield None if ours is None or ours.spread is None else round(100 * ours.spread, 4)
        yield None if ours is None else ours.seeds
        yield None if ours is None else ours.n
        # the exact interval belongs to one set of weights; over seeds the spread speaks
        yield None if first is None else round(100 * first["lower"], 4)
        yield None if first is None else round(100 * first["upper"], 4)
        if name in columns:
            yield None if row.printed is None else row.printed[place]
    yield _mean(results, "held_out_loss")
    yield _mean(results, "multipliers")
    verdicts = [result.plain["training"]["feasible"] for result in results]
    yield None if not verdicts or None in verdicts else sum(verdicts) / len(verdicts)
    yield _mean(results, "seconds")
    yield sum(not is_current(result, spec) for result in results)


def _share(summary: Summary | None, seeds: int) -> str:
    """An accuracy as it stands in a table: fewer seeds than the row's are named."""
    return percent(summary) + (
        f" ({summary.seeds} of {seeds})" if summary is not None and summary.seeds < seeds else ""
    )


def percent(summary: Summary | None) -> str:
    """An accuracy in per cent, with the standard deviation over seeds where there are several."""
    if summary is None:
        return "-"
    spread = "" if summary.spread is None else f" ± {100 * summary.spread:.1f}"
    return f"{100 * summary.mean:.1f}{spread}"


def _mean(results: Sequence[Result], key: str) -> float | None:
    found = []
    for result in results:
        value = result.plain["training"][key]
        while isinstance(value, list):  # multipliers: one list per constraint, of one value here
            value = value[0] if value else None
        if value is not None:
            found.append(float(value))
    return sum(found) / len(found) if found else None


def _average(results: Sequence[Result], key: str, digits: int) -> str:
    value = _mean(results, key)
    return "-" if value is None else f"{value:.{digits}f}"


def _notes(found: Sequence[Sequence[Result]], specs: Sequence[Spec]) -> tuple[str, ...]:
    counts: dict[str, set[int]] = {}
    for result in (result for results in found for result in results):
        for name in dict.fromkeys(name for stage in result.plain["stages"] for name in stage["accuracies"]):
            if name != "worst" and (shown := result.accuracy(name)) is not None:
                counts.setdefault(name, set()).add(shown["n"])
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, sizes in counts.items():
        groups.setdefault(tuple(sorted(sizes)), []).append(NAMES.get(name, name))
    parts = [
        f"On {' or '.join(f'{n:,}' for n in n_s)} test images: {'; '.join(names)}." for n_s, names in groups.items()
    ]
    machines = sorted({machine(result.plain["environment"]) for results in found for result in results})
    missing = sum(not results for results in found)
    partial = any(
        0 < sum(result.accuracy(name) is not None for result in results) < len(results)
        for results in found
        for name in counts
    )
    old = any(not is_current(result, spec) for spec, results in zip(specs, found, strict=True) for result in results)
    lines = ["Accuracy in per cent; ± is the standard deviation over seeds. Under attack it is an upper bound."]
    lines += parts
    if partial:
        lines.append("Seeds in brackets: an accuracy that not all results of its row have.")
    if old:
        lines.append(OLD_NOTE)
    if machines:
        lines.append(f"Made on {'; '.join(machines)}.")
    if missing:
        lines.append(f"{missing} of {len(specs)} rows were not run.")
    return tuple(lines)


def _timing_table(table: str, dataset: str, model: str, budget: str, rows: Sequence[Row], root: Path) -> Table:
    printed = paper()[f"{table}_{dataset}_seconds"]
    found = find_timing(root, dataset, model, budget)
    variants = list(found.get("variants", {}))
    head = ["row", "paper, batch", "paper, epoch"]
    for variant in variants:
        head += [f"{variant}, batch", f"{variant}, epoch"]
    cells, values = [], []
    for row in rows:
        theirs = printed[row.label]
        ours = [found["variants"][variant].get(row.label) for variant in variants]
        flat = [number for one in ours for number in (one or {"batch": None, "epoch": None}).values()]
        numbers: list[float | None] = [*theirs, *flat]
        cells.append((row.label, *(MISSING if n is None else f"{n:.3g}" for n in numbers)))
        values.append((row.label, *numbers))
    if not variants:
        cells = [(*cell, MISSING) for cell in cells]
        head.append("ours")
    notes = [
        "Seconds, the paper's on RTX 5000 GPUs; ours the median step after warm-up, alone on the device, at the batch "
        f"size of the paper ({found.get('batch_size', 128)}); an epoch is {found.get('batches', 0)} such steps."
        if found
        else "No timing was made yet.",
    ]
    if found:
        notes.append(f"Made on {machine(found['environment'])}.")
    name = "-".join([table, dataset, *(["smoke"] if budget == "smoke" else [])])
    title = f"{_heading(table)}, {dataset}, {model}: {TABLES[table][1]}"
    return Table(name, title, tuple(head), tuple(cells), tuple(notes), tuple(head), tuple(values))
