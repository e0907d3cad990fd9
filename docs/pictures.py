"""The pictures of docs/theory.md, drawn from the product's own functions: `python docs/pictures.py [FOLDER]`.

Needs matplotlib (`pip install 'dale[figures]'`); ten seconds on one core. The same versions give the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
import torch
from scipy.optimize import brentq, minimize
from torch import Tensor, nn

from dale import algorithms, lambda_star, random
from dale.batch import Batch
from dale.losses import CrossEntropy
from dale.perturbations import Linf
from dale.samplers import Chain, Langevin, Mala, diagnose, fgsm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

mpl.use("agg")
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#5a6675"
STYLE: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.3,
    "svg.hashsalt": "dale",  # the same file for the same numbers
    "figure.facecolor": "white",  # readable on a dark page as well
    "savefig.dpi": 130,
}

# ---- the toy: an image of two pixels, three classes, and the square of perturbations around its middle ----

TOY = Linf(epsilon=0.4)
CELLS = 160


def toy_model() -> nn.Module:
    """A small network whose loss over the square has two hills of different height and a valley."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            rows = random.normal(random.key(6), torch.arange(len(parameter)) + 100 * number, parameter.shape[1:])
            parameter.copy_(5.0 * rows if number == 0 else rows)
    return model.eval()


def toy_batch(size: int) -> Batch:
    """The same image `size` times: each copy runs a chain of its own."""
    return Batch.of(torch.full((size, 1, 1, 2), 0.5), torch.zeros(size, dtype=torch.int64))


def toy_loss(points: Tensor) -> Tensor:
    """The cross-entropy at perturbations (N, 2)."""
    batch = toy_batch(len(points))
    return CrossEntropy()(toy_model()(TOY.apply(batch.images, points.float().view(-1, 1, 1, 2))), None, batch.labels)


@cache
def toy_density(gamma: float) -> lambda_star.GridDensity:
    """lambda* over the square, exactly."""
    side = TOY.epsilon
    return lambda_star.grid(toy_loss, lower=[-side] * 2, upper=[side] * 2, resolution=CELLS, gamma=gamma)


def _map(axes: Axes, values: Tensor, **options: Any) -> Any:
    """Draw values on the cells of the square; `cartesian_prod` runs along the second coordinate first."""
    side = TOY.epsilon
    axes.set(xticks=(-side, 0, side), yticks=(-side, 0, side), aspect="equal")
    axes.tick_params(length=2)
    picture = values.view(CELLS, CELLS).T.numpy()
    return axes.imshow(picture, origin="lower", extent=(-side, side, -side, side), interpolation="nearest", **options)


def draw_lambda_star() -> Figure:
    """The loss over Delta, lambda* for three gamma, and the expected loss between its two limits."""
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, 3, figsize=(7.4, 4.5), layout="constrained")
    panels = [*top, *bottom[:2]]
    exact = toy_density(1.0)
    shown = _map(panels[0], exact.losses, cmap="viridis")
    panels[0].set_title("loss over Delta (a square)")
    figure.colorbar(shown, ax=panels[0], shrink=0.8)
    for axes, gamma in zip(panels[1:], (3.0, 1.0, 0.3, 0.03), strict=True):
        found = toy_density(gamma)
        shown = _map(axes, found.density, cmap="magma", vmin=0)
        where = np.linspace(-TOY.epsilon, TOY.epsilon, CELLS)
        if found.mu > float(found.losses.min()):
            level = found.losses.view(CELLS, CELLS).T.numpy()
            axes.contour(where, where, level, levels=[found.mu], colors="white", linewidths=0.8, linestyles="--")
        axes.set_title(f"lambda*, gamma = {gamma:g}\nmu = {found.mu:.2f}, expected loss {found.expected_loss:.2f}")
        figure.colorbar(shown, ax=axes, shrink=0.8)
    _expected_loss(bottom[2], exact)
    return figure


def _expected_loss(axes: Axes, exact: lambda_star.GridDensity) -> None:
    """The expected loss under lambda* against gamma: exact, and on K uniform draws with and without the factor K."""
    gammas = np.geomspace(1e-3, 10, 40)
    draws, repeats = 64, 400
    index = torch.arange(draws * repeats)
    points = random.uniform(random.key(0), index, (2,)).mul(2).sub(1) * TOY.epsilon
    losses = toy_loss(points).detach().double().view(draws, repeats)

    def sampled(factor: float) -> list[float]:
        weights = (lambda_star.weights(losses, float(g) * factor) for g in gammas)
        return [float((w * losses).sum(0).mean()) for w in weights]

    axes.plot(gammas, [toy_density(float(g)).expected_loss for g in gammas], color=BLUE, label="exact")
    axes.plot(gammas, sampled(1.0), "--", color=ORANGE, label=f"K = {draws} draws")
    axes.plot(gammas, sampled(1 / draws), ":", color=GREY, label="without the factor K")
    for level, name, place in ((exact.max_loss, "max", 10), (exact.mean_loss, "mean", 7e-3)):
        axes.axhline(level, color="black", linewidth=0.6)
        axes.annotate(name, (place, level), xytext=(0, 2), textcoords="offset points", ha="right")
    axes.set(xscale="log", xlabel="gamma", title="expected loss under lambda*")
    axes.set_box_aspect(1)
    span = exact.max_loss - exact.mean_loss
    axes.set_ylim(exact.mean_loss - 0.62 * span, exact.max_loss + 0.15 * span)
    axes.legend(loc="lower left")


@dataclass(frozen=True)
class Panel:
    """One sampler over the density that it is meant to follow, at temperature T (None: no target is known)."""

    title: str
    sampler: Chain
    temperature: float | None


def _langevin(step_size: float) -> Langevin:
    """Langevin as the theory has it: raw gradient, Gaussian noise outside, T = 1."""
    return Langevin(step_size=step_size, drift="gradient", noise="gaussian", place="outside", temperature=1.0)


PANELS = (
    Panel("Langevin, T = 1, small step", Chain(kernel=_langevin(1e-3), steps=400, start="uniform"), 1.0),
    Panel(
        "Langevin, T = 1, a step 20 times larger:\nmass on the border",
        Chain(kernel=_langevin(2e-2), steps=100, start="uniform"),
        1.0,
    ),
    Panel("MALA, T = 1, the same large step", Chain(kernel=Mala(step_size=2e-2), steps=200, start="uniform"), 1.0),
    Panel(
        "MALA, T = 0.1: the hills have not mixed",
        Chain(kernel=Mala(step_size=2e-2, temperature=0.1), steps=200, start="uniform"),
        0.1,
    ),
    Panel(
        "sign drift, Laplace noise c = 0.5 inside:\nno target density is known",
        Chain(kernel=Langevin(step_size=0.02, noise_scale=0.5), steps=40, start="uniform"),
        None,
    ),
    Panel(
        "sign drift, c = 1e-4, the default of dale:\nan ascent to nearly the worst case",
        Chain(kernel=Langevin(noise_scale=1e-4), steps=10),
        None,
    ),
)


def draw_samples() -> Figure:
    """1,200 independent chains of each sampler, over the density loss^(1/T)."""
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, 3, figsize=(7.4, 5.3), layout="constrained")
    batch, losses = toy_batch(1200), toy_density(1.0).losses
    for axes, panel in zip(grid.flat, PANELS, strict=True):
        target = losses if panel.temperature is None else losses ** (1 / panel.temperature)
        _map(axes, target, cmap="Blues", vmin=0, vmax=1.35 * float(target.max()))
        draws = panel.sampler(toy_model(), batch, TOY, CrossEntropy(), key=1)[0].view(-1, 2)
        axes.plot(*draws.T.numpy(), "o", color=ORANGE, markersize=2.0, markeredgewidth=0, alpha=0.75, clip_on=False)
        title = panel.title
        if isinstance(panel.sampler.kernel, Mala):
            several = replace(panel.sampler, num_chains=16, steps=1000, keep="all", burn_in=200)
            found = diagnose(several, toy_model(), toy_batch(1), TOY, CrossEntropy(), key=1)
            title += f"\nR-hat {float(found.r_hat.max()):.2f}, acceptance {float(found.acceptance_rate.mean()):.2f}"
        axes.set_title(title)
        axes.set_xlabel("over the loss" if panel.temperature is None else f"over loss^(1/T), T = {panel.temperature:g}")
    return figure


# ---- the convex problem: robust logistic regression under a nominal constraint, with its exact solution ----

EPSILON, RHO, STEPS = 0.05, 0.255, 160


class Logistic(nn.Module):
    """Logits (0, 8 <w, x - 1/2> + b)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1).double()
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return two logits per image."""
        score = self.layer(8.0 * (x.flatten(1) - 0.5))
        return torch.cat([torch.zeros_like(score), score], dim=1)


@cache
def logistic_data() -> tuple[np.ndarray, np.ndarray]:
    """Forty points of two classes that overlap."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = np.clip(0.5 + 0.12 * (2 * y[:, None] - 1) * [1.0, 0.6] + 0.13 * rng.standard_normal((40, 2)), 0.06, 0.94)
    return x, y


def risks(w: np.ndarray) -> tuple[float, float]:
    """Nominal and robust risk of weights; the worst perturbation of a linear model takes epsilon |w|_1 off."""
    x, y = logistic_data()
    margins = (2 * y - 1) * (8.0 * (x - 0.5) @ w[:2] + w[2])
    worst = margins - 8.0 * EPSILON * np.abs(w[:2]).sum()
    return float(np.logaddexp(0, -margins).mean()), float(np.logaddexp(0, -worst).mean())


def best_response(nu: float) -> tuple[float, float]:
    """Both risks of the minimiser of robust + nu * nominal: a point of the trade-off curve."""
    return risks(minimize(lambda w: risks(w)[1] + nu * risks(w)[0], [1.0, 1.0, 0.0], method="BFGS").x)


def primal_dual_path(dual_step_size: float) -> np.ndarray:
    """Nominal risk, robust risk and multiplier after each step of the row `dale`, full batch, (STEPS, 3)."""
    x, y = logistic_data()
    row = algorithms.dale(
        Linf(epsilon=EPSILON),
        rho=RHO,
        loss="cross-entropy",
        sampler=fgsm(EPSILON),  # for a linear model one step of size epsilon is the exact inner maximum
        dual_step_size=dual_step_size,
        dual_initial=0.0,
        tighten=False,
    )
    model, batch = Logistic(), Batch.of(torch.tensor(x).view(40, 2, 1, 1), torch.tensor(y))
    duals, path = row.initial_duals(), []
    for number in range(STEPS):
        step = row.lagrangian(model, batch, row.perturb(model, batch, number), duals)
        path.append((float(step.nominal), float(step.robust), float(duals[0].multiplier)))
        gradients = torch.autograd.grad(step.loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.5 * gradient)
        duals = row.ascend(duals, step)
    return np.array(path)


def draw_path() -> Figure:
    """The path in the plane of the two risks, with the trade-off curve and its slope; the multiplier and its limit."""
    import matplotlib.pyplot as plt

    figure, (plane, dual) = plt.subplots(1, 2, figsize=(7.4, 3.1), layout="constrained")
    nu = brentq(lambda value: best_response(value)[0] - RHO, 0.0, 50.0, xtol=1e-6)
    curve = np.array([best_response(value) for value in np.geomspace(0.02, 60.0, 40)])
    nominal, robust = best_response(nu)
    plane.plot(*curve.T, color="black", linewidth=1, label="trade-off curve P")
    span = np.array([-0.012, 0.02])
    plane.plot(nominal + span, robust - nu * span, color=GREEN, linewidth=1, label=f"slope -nu* = -{nu:.2f}")
    for size, colour in ((5.0, ORANGE), (1.0, BLUE)):
        path = primal_dual_path(size)
        plane.plot(
            path[:, 0], path[:, 1], ".-", color=colour, markersize=2.5, linewidth=0.7, label=f"dual step {size:g}"
        )
        dual.plot(path[:, 2], color=colour, label=f"dual step {size:g}")
    plane.plot(nominal, robust, "*", color="black", markersize=8, zorder=5)
    for axes, draw in ((plane, plane.axvline), (dual, dual.axhline)):
        draw(RHO if axes is plane else nu, color=GREY, linewidth=0.8, linestyle="--")
    low, high = float(curve[:, 0].min()), 0.31
    plane.set(xlim=(low - 0.004, high), ylim=(robust - 0.02, float(curve[:, 1].max()) + 0.02))
    plane.annotate("rho", (RHO, 1), xycoords=("data", "axes fraction"), xytext=(3, -9), textcoords="offset points")
    dual.annotate("nu*", (1, nu), xycoords=("axes fraction", "data"), xytext=(2, -2), textcoords="offset points")
    plane.set(xlabel="nominal loss", ylabel="robust loss", title="primal: to the curve, at rho")
    dual.set(xlabel="step", ylabel="multiplier nu", title="dual: to the price of rho", ylim=(0, None))
    plane.legend(loc="upper right")
    dual.legend(loc="lower right")
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "lambda-star.svg": draw_lambda_star,
    "samples.png": draw_samples,  # thousands of points are smaller as an image
    "primal-dual-path.svg": draw_path,
}


def write_pictures(folder: Path) -> list[Path]:
    """Draw every picture into `folder`; returns the paths."""
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            # no date and no version inside: the same numbers give the same bytes
            facts = {"Date": None, "Creator": None} if name.endswith("svg") else {"Software": None}
            figure.savefig(folder / name, metadata=facts)
            plt.close(figure)
            paths.append(folder / name)
    return paths


if __name__ == "__main__":
    for written in write_pictures(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images"):
        print(written)
