"""The paper's two figures, drawn from result files by matplotlib (an optional extra), as SVG and PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dale.components import load_yaml
from dale.errors import DaleError
from dale.files import write_bytes
from dale.reports.figures import COLOURS, STYLE
from dale.reproduction.catalogue import rows_of
from dale.reproduction.results import Result, find_results
from dale.training.config import Algorithm, RunConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TITLES = {"Langevin": "DALE (Langevin)"}


def draw(name: str, dataset: str, model: str, budget: str, root: Path, folder: Path | None = None) -> list[Path]:
    """Draw a figure from the results below `root`; returns what was written, into `folder` or root/figures."""
    row = rows_of(name, dataset, model)[0]
    results = find_results(root, row.spec(dataset, model, budget, 0))
    if name == "figure2":  # the longest run on file shows most, one whose multiplier moves before others
        for best in rows_of("best", dataset, model):
            results += find_results(root, best.spec(dataset, model, budget, 0))
        results.sort(key=lambda result: (_moves(result), _epochs(result), _robust_loss(result) == "KL"), reverse=True)
    if not results:
        raise DaleError(f"{name} needs a result of {row.label} on {dataset} at the budget {budget}; there is none yet")
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise DaleError("figures need matplotlib: pip install 'dale[figures]'") from error
    written = []
    with mpl.rc_context(STYLE):
        figure = _perturbations(results[0]) if name == "figure1" else _dual(results[0])
        for form in ("svg", "png"):
            buffer = io.BytesIO()
            # no date inside: the same numbers give the same bytes
            figure.savefig(buffer, format=form, metadata={"Date": None} if form == "svg" else None)
            path = (folder or root / "figures") / f"{name}.{form}"
            write_bytes(path, buffer.getvalue())
            written.append(path)
    return written


def _epochs(result: Result) -> int:
    return len(result.plain["series"]["epoch"])


def _moves(result: Result) -> bool:
    """Whether the multiplier ends elsewhere than at the most it has been: a bound may have held it there."""
    values = result.plain["series"].get("multiplier") or [0.0]
    return bool(values[-1] < 0.95 * max(values))


def _robust_loss(result: Result) -> str:
    """The loss that the robust term of a run of DALE is: the paper's unless its recipe says otherwise."""
    objective = load_yaml(result.plain["config"], RunConfig).objective
    return str(objective.options.get("loss", "KL")) if isinstance(objective, Algorithm) else "KL"


def _new(columns: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.2 * columns, 2.6), layout="constrained")
    return figure, [figure.add_subplot(1, columns, place + 1) for place in range(columns)]


def _perturbations(result: Result) -> Figure:
    """Figure 1: perturbations of one model's test images by three samplers, along two principal components."""
    found = result.plain.get("projection")
    if not found:
        raise DaleError(f"{result.path} has no projection of perturbations")
    figure, axes = _new(len(found["series"]))
    limits = [max(abs(point[k]) for points in found["series"].values() for point in points) * 1.1 for k in (0, 1)]
    for place, (name, points) in enumerate(found["series"].items()):
        style: Any = {"marker": "o", "linestyle": "none", "alpha": 0.6, "color": COLOURS[place]}
        axes[place].plot([p[0] for p in points], [p[1] for p in points], **style)
        axes[place].set(
            xlabel="component 1",
            title=_TITLES.get(name, name),
            xlim=(-limits[0], limits[0]),
            ylim=(-limits[1], limits[1]),
        )
    axes[0].set_ylabel("component 2")
    return figure


def _dual(result: Result) -> Figure:
    """Figure 2: accuracy on held-out images, losses of training with the line rho, and the multiplier, by epoch."""
    series = result.plain["series"]
    if "multiplier" not in series:
        raise DaleError(f"{result.path} is of a row without a multiplier")
    figure, axes = _new(3)
    held = series["validation"]
    for place, (key, label) in enumerate((("clean_accuracy", "clean"), ("robust_accuracy", "PGD-10"))):
        _line(axes[0], held["epoch"], [None if v is None else 100 * v for v in held[key]], place, label, marker="o")
    axes[0].set(xlabel="epoch", ylabel="held-out accuracy, per cent", ylim=(0, 100))
    for place, (key, label) in enumerate(
        (("nominal_loss", "nominal"), ("robust_loss", f"robust ({_robust_loss(result)})"))
    ):
        _line(axes[1], series["epoch"], series[key], place, label)
    axes[1].axhline(series["limit"], color="black", linestyle=":", linewidth=0.8, label="limit ρ")  # noqa: RUF001
    axes[1].set(xlabel="epoch", ylabel="training loss", ylim=(0, None), title=f"ρ = {series['limit']:g}")  # noqa: RUF001
    _line(axes[2], series["epoch"], series["multiplier"], 3, "ν")  # noqa: RUF001
    axes[2].set(xlabel="epoch", ylabel="multiplier ν", ylim=(0, None))  # noqa: RUF001
    for panel in axes[:2]:
        panel.legend()
    return figure


def _line(axes: Axes, x: Sequence[float], y: Sequence[float | None], colour: int, label: str, **style: Any) -> None:
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    axes.plot([a for a, _ in pairs], [b for _, b in pairs], color=COLOURS[colour], label=label, **style)
