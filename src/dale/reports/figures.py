"""Figures for a paper, as PDF, SVG and PNG: the same numbers as the page's, drawn by matplotlib (an optional extra).

training     losses with the limit rho, and the multiplier nu (the paper's Figure 2), of each run
projection   perturbations along two principal components (the paper's Figure 1), of each run
classes      accuracy of every class, of each run
radius       accuracy against epsilon, all runs
trade-off    clean against robust accuracy, all runs, with the paper's points for the same data
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dale.errors import DaleError
from dale.files import write_bytes
from dale.reports import series
from dale.reports.runs import RunFiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3f51b5", "#5a6675", "#a0522d")
STYLE: Any = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "pdf.fonttype": 42,  # TrueType: what journals ask for
    "svg.fonttype": "none",
    "svg.hashsalt": "dale",  # the same file for the same numbers
    "savefig.dpi": 300,
    "text.parse_math": False,  # a dollar sign in a run's name is a dollar sign
}


def write_figures(runs: Sequence[RunFiles], folder: str | Path) -> list[Path]:
    """Write every figure that the runs have numbers for, in each format; returns the paths."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise DaleError("figures need matplotlib: pip install 'dale[figures]'") from error
    data = series.page_data(runs)
    paths = []
    with mpl.rc_context(STYLE):
        for name, figure in _figures(data):
            for form in FORMATS:
                buffer = io.BytesIO()
                # no date inside: the same runs give the same bytes
                facts = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(form)
                figure.savefig(buffer, format=form, metadata=facts)
                path = Path(folder) / f"{name}.{form}"
                write_bytes(path, buffer.getvalue())
                paths.append(path)
    return paths


def _figures(data: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    runs = data["runs"]
    names = _file_names([run["name"] for run in runs])
    for run, name in zip(runs, names, strict=True):
        prefix = f"{name}-" if len(runs) > 1 else ""
        for kind, draw in (("training", _training), ("projection", _projection), ("classes", _classes)):
            figure = draw(run)
            if figure is not None:
                yield f"{prefix}{kind}", figure
    for kind, figure in (("radius", _radius(runs)), ("trade-off", _trade_off(runs, data["paper"]))):
        if figure is not None:
            yield kind, figure


def _file_names(names: Sequence[str]) -> list[str]:
    """File names for runs: letters that are safe everywhere, a number where two would be the same."""
    found: list[str] = []
    for name in names:
        base = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:60] or "run"
        candidate, number = base, 2
        while candidate in found:
            candidate, number = f"{base}-{number}", number + 1
        found.append(candidate)
    return found


def _new(width: float = 3.4, height: float = 2.5, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    return figure, [figure.add_subplot(1, columns, k + 1) for k in range(columns)]


def _plot(axes: Axes, points: Sequence[Sequence[float]], **style: Any) -> None:
    axes.plot([p[0] for p in points], [p[1] for p in points], **style)


def _percent(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))


def _training(run: dict[str, Any]) -> Figure | None:
    curves, constraints = run["curves"], run["constraints"]
    if not curves:
        return None
    figure, axes = _new(columns=2 if constraints else 1)
    shown = (("nominal_loss", "nominal", 0, "-"), ("robust_loss", "robust", 1, "-"))
    for key, label, colour, dash in (*shown, ("held_out_loss", "nominal, held out", 2, "--")):
        if key in curves:
            _plot(axes[0], curves[key], color=COLOURS[colour], linestyle=dash, label=label)
    for constraint in constraints:
        if constraint["name"] == "loss":
            label = "limit ρ" if len(constraint["rules"]) == 1 else f"limits ρ by {constraint['by']}"  # noqa: RUF001
            for place, limit in enumerate(constraint["rules"]):  # one name for all
                axes[0].axhline(limit, color="black", linestyle=":", linewidth=0.8, label="" if place else label)
    axes[0].set(xlabel="epoch", ylabel="loss", ylim=(0, None))
    axes[0].legend()
    if constraints:
        for place, constraint in enumerate(constraints):
            for group, points in enumerate(constraint["multiplier"]):
                label = constraint["name"] + (f", {constraint['by']} {group}" if len(constraint["limits"]) > 1 else "")
                _plot(axes[1], points, color=COLOURS[(3 + place + group) % 8], label=label)
        axes[1].set(xlabel="epoch", ylabel="multiplier ν", ylim=(0, None))  # noqa: RUF001
        if len(constraints) > 1 or len(constraints[0]["limits"]) in range(2, 9):
            axes[1].legend()
    return figure


def _projection(run: dict[str, Any]) -> Figure | None:
    found = run["projection"]
    if not found:
        return None
    figure, (axes,) = _new()
    for place, (name, points) in enumerate(found["series"].items()):
        _plot(axes, points, color=COLOURS[place % 8], marker="o", linestyle="none", alpha=0.6, label=name)
    shares = [f" ({100 * s:.0f}% of variance)" if s is not None else "" for s in (*found["explained"], None, None)]
    axes.set(xlabel=f"component 1{shares[0]}", ylabel=f"component 2{shares[1]}")
    axes.legend()
    return figure


def _classes(run: dict[str, Any]) -> Figure | None:
    found = run["classes"]
    if not found:
        return None
    names = found["names"]
    shown = dict(list(found["series"].items())[:2])
    figure, (axes,) = _new(width=max(3.4, 0.14 * len(names) * len(shown)))
    wide = 0.8 / len(shown)
    for place, (name, entries) in enumerate(shown.items()):
        known = [(k, *entry) for k, entry in enumerate(entries) if entry is not None]
        spread = [[_gap(v, low) for _, v, low, _ in known], [_gap(high, v) for _, v, _, high in known]]
        axes.bar(
            [k - 0.4 + wide * (place + 0.5) for k, *_ in known],
            [v for _, v, *_ in known],
            wide,
            yerr=spread,
            error_kw={"linewidth": 0.6},
            color=COLOURS[place],
            label=name,
        )
    axes.set_xticks(range(len(names)), names, rotation=45 if any(len(n) > 2 for n in names) else 0)
    axes.set(xlabel="class", ylabel="accuracy", ylim=(0, 1.15))
    _percent(axes.yaxis)
    axes.legend(ncols=2, loc="upper right")
    return figure


def _gap(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else max(0.0, high - low)


def _radius(runs: Sequence[dict[str, Any]]) -> Figure | None:
    shown = [(k, run) for k, run in enumerate(runs) if len(run["radius"]) > 1]
    if not shown:
        return None
    figure, (axes,) = _new()
    for k, run in shown:
        points = run["radius"]
        style = "-o" if len(points) > 2 else "o"
        axes.plot([p[0] for p in points], [p[1] for p in points], style, color=COLOURS[k % 8], label=run["name"])
        if all(value is not None for p in points for value in p) and len(points) > 2:
            low, high = [p[2] for p in points], [p[3] for p in points]
            axes.fill_between([p[0] for p in points], low, high, color=COLOURS[k % 8], alpha=0.13, linewidth=0)
    axes.set(xlabel="ε", ylabel="accuracy", ylim=(0, 1.02))
    _percent(axes.yaxis)
    if len(shown) <= 12:
        axes.legend()
    return figure


def _trade_off(runs: Sequence[dict[str, Any]], paper: Sequence[dict[str, Any]]) -> Figure | None:
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        if run["trade"]:
            groups.setdefault(f"{run['algorithm']} on {run['dataset']}", []).append(run["trade"])
    if not groups:
        return None
    figure, (axes,) = _new()
    for place, (name, points) in enumerate(groups.items()):
        ordered = sorted(points, key=lambda p: p["clean"][0])
        x, y = [p["clean"] for p in ordered], [p["robust"] for p in ordered]
        spreads = [[[_gap(v, low) for v, low, _ in side], [_gap(high, v) for v, _, high in side]] for side in (x, y)]
        axes.errorbar(
            [v[0] for v in x],
            [v[0] for v in y],
            xerr=spreads[0],
            yerr=spreads[1],
            fmt="o",
            color=COLOURS[place % 8],
            elinewidth=0.6,
            label=name,
        )
    here = {run["dataset"] for run in runs}
    for place, curve in enumerate(curve for curve in paper if curve["dataset"] in here):
        printed = [[p["values"][0] / 100, p["values"][2] / 100] for p in curve["points"]]
        style = {"marker": "o", "markerfacecolor": "none", "linestyle": "none"}
        _plot(axes, printed, color=COLOURS[7 - place % 8], label=curve["name"], **style)
    axes.set(xlabel="clean accuracy", ylabel="robust accuracy")
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend()
    return figure
