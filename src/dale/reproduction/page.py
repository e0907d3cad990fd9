"""`docs/results.md`: the page of all results, generated from the files, so that no number is typed by hand.

Beside the page lies its template, `results.md.in`: prose by hand, with marks that are replaced:

    {{ table table1 mnist short }}            a table;  {{ table table6 cifar10 short resnet50 }} for another model
    {{ claims cifar10 short }}                the claims with their numbers and verdicts
    {{ trends cifar10 short resnet18 }}       Table 6's trends
    {{ value cifar10/resnet18/trades-short autoattack-fast }}    one number, over the seeds on file
    {{ mode cifar10 short }}                  the paper's columns in eval and in train mode
    {{ figure figure1 }}                      a figure, where it is drawn
    {{ zoo }}                                 the stored models
    {{ certificates }}                        what the test images prove of their promises
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil, floor
from pathlib import Path

from dale.errors import UsageError, unknown
from dale.files import read_text, write_text
from dale.reproduction.catalogue import TABLES, rows_of
from dale.reproduction.claims import claims_table, trends
from dale.reproduction.recipes import DATASETS, default_model, paper_attack
from dale.reproduction.results import find_results, read_result, summarise, summary_of
from dale.reproduction.tables import MISSING, OLD, OLD_NOTE, make_table, marked, percent
from dale.zoo import entries

_MARK = re.compile(r"\{\{ *([a-z]+)((?: +[^ }]+)*) *\}\}")


def template_of(page: Path) -> Path:
    """Where the template of a page lies."""
    return page.with_name(page.name + ".in")


def write_page(root: Path, page: Path) -> Path:
    """Generate the page from its template and the results."""
    template = template_of(page)
    if not template.is_file():
        raise UsageError(f"{page} is generated from {template}, which is not there")
    write_text(page, render(read_text(template), root))
    return page


def render(template: str, root: Path) -> str:
    """Replace every mark of a template."""
    kinds: dict[str, Callable[..., str]] = {
        "table": _table,
        "claims": lambda root, dataset, budget: claims_table(root, dataset, budget).rstrip("\n"),
        "trends": lambda root, dataset, budget, model: "\n".join(trends(root, model, budget)),
        "value": _value,
        "mode": _mode,
        "figure": _figure,
        "zoo": _zoo,
        "certificates": _certificates,
    }

    def replaced(match: re.Match[str]) -> str:
        name, words = match[1], match[2].split()
        if name not in kinds:
            raise unknown("mark of the template", name, kinds)
        try:
            return kinds[name](root, *words)
        except TypeError as error:
            raise UsageError(f"{match[0]}: a mark of the template with the wrong number of words") from error

    return _MARK.sub(replaced, template)


def _table(root: Path, table: str, dataset: str, budget: str, model: str | None = None) -> str:
    made = make_table(table, dataset, model, budget, root)
    return f"*{made.title}: {MISSING}.*" if made.empty else made.markdown().rstrip("\n")


def _value(root: Path, row: str, attack: str) -> str:
    paths = sorted((root / row).parent.glob(f"{(root / row).name}-seed*.json"))
    summary = summarise([read_result(path) for path in paths], attack)
    return MISSING if summary is None else percent(summary)


def _mode(root: Path, dataset: str, budget: str) -> str:
    """Table 1 in eval mode and, where a run measured it, with perturbed images in train mode."""
    lines = [
        "| row | FGSM, eval | FGSM, train | paper | PGD, eval | PGD, train | paper |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows_of("table1", dataset):
        spec = row.spec(dataset, default_model(dataset), budget, 0)
        results = [result for result in find_results(root, spec) if "paper_mode" in result.plain]
        if not results or row.printed is None:
            continue
        cells = [marked(row.label, spec, results)]
        for place, name in ((1, "fgsm"), (2, "pgd")):
            trained = [result.plain["paper_mode"]["accuracies"][name] for result in results]
            cells += [percent(summarise(results, paper_attack(dataset, name))), percent(summary_of(trained))]
            cells.append(str(float(row.printed[place])))
        lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 2:
        return f"*{dataset}, {budget}: {MISSING}.*"
    return "\n".join([*lines, *(["", OLD_NOTE] if any(OLD in line for line in lines) else [])])


def _figure(root: Path, name: str) -> str:
    """A figure, by its place from the folder of the page; both lie in one checkout."""
    if not (root / "figures" / f"{name}.svg").is_file():
        return f"*{TABLES[name][1]}: {MISSING}.*"
    return f"![{TABLES[name][1]}](../{root.name}/figures/{name}.svg)"


def _zoo(root: Path) -> str:
    """The stored models: numbers of the stored weights, on all test images and on the first 1,000."""
    stored = entries(root.parent / "zoo")
    if not stored:
        return "No model is stored yet."
    lines = [
        "| model | images | clean | FGSM | the paper's PGD | PGD-20, best iterate | AutoAttack |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for entry in stored:
        paper = paper_attack(entry.dataset, "pgd") if entry.dataset in DATASETS else "pgd20-last"
        names = ("clean", "fgsm", paper, "pgd20", "autoattack")
        for part in entry.published:
            found = part["accuracies"]
            cells = [found.get(name) for name in names]
            shown = [MISSING if cell is None else f"{100 * cell['accuracy']:.2f}" for cell in cells]
            lines.append(f"| `zoo:{entry.name}` | {part['n']:,} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _certificates(root: Path) -> str:
    """What is proven of the stored models' promises: bounds rounded to the side on which they stay true."""
    found = [(e.name, e.plain["certificate"]) for e in entries(root.parent / "zoo") if "certificate" in e.plain]
    if not found:
        return "No stored model is certified yet."
    lines = [
        "| model | limit | E[min(loss, B)] at most | B | accuracy at least | the limit is |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, plain in found:
        bound, lower = ceil(1e4 * plain["loss"]["bound"]) / 1e4, floor(1e4 * plain["accuracy"]["lower"]) / 1e2
        verdict = {True: "**proven**", False: "not proven", None: "not given"}[plain["loss_holds"]]
        limit = "-" if plain["rho"] is None else plain["rho"]
        lines.append(f"| `zoo:{name}` | {limit} | {bound:.4f} | {plain['clip']:g} | {lower:.2f}% | {verdict} |")
    return "\n".join(lines)
