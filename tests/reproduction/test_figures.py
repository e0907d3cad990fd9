"""The two figures from result files: there, and the same bytes for the same numbers."""

from __future__ import annotations

import pytest

from dale.errors import DaleError
from dale.reproduction import Spec, rows_of
from dale.reproduction.figures import draw

MNIST = Spec("mnist", "convnet", "dale", {"rho": 0.8})
CIFAR = Spec("cifar10", "resnet18", "dale", {"rho": 0.8})
SERIES = {
    "epoch": [1, 2, 3],
    "nominal_loss": [2.0, 1.0, 0.8],
    "robust_loss": [0.1, 0.2, None],
    "limit": 0.8,
    "multiplier": [0.2, 0.3, 0.25],
    "validation": {"epoch": [1, 3], "clean_accuracy": [0.5, 0.8], "robust_accuracy": [0.3, 0.5]},
}
PROJECTION = {"series": {"FGSM": [[1.0, 2.0]], "PGD": [[0.5, -1.0]], "Langevin": [[-1.0, 0.0]]}}


def test_both_figures(put, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    root = tmp_path / "results"
    put(MNIST, (10, {"clean": 0.9}), projection=PROJECTION)
    put(CIFAR, (10, {"clean": 0.9}), series=SERIES)
    for name, spec, word in (("figure1", MNIST, "DALE (Langevin)"), ("figure2", CIFAR, "multiplier ν")):  # noqa: RUF001
        svg, png = draw(name, spec.dataset, spec.model, "short", root)
        assert svg == root / "figures" / f"{name}.svg"
        assert word in svg.read_text()
        assert png.read_bytes().startswith(b"\x89PNG")
        first = svg.read_bytes()
        draw(name, spec.dataset, spec.model, "short", root)
        assert svg.read_bytes() == first


def test_the_second_figure_is_of_the_longest_run_whose_multiplier_moves(put, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    best = {row.budget: row.spec("cifar10", "resnet18", "short", 0) for row in rows_of("best", "cifar10")}
    longer = SERIES | {name: [*SERIES[name], SERIES[name][-1]] for name in ("epoch", "nominal_loss", "robust_loss")}
    put(best["best"], (10, {"clean": 0.9}), series=longer | {"multiplier": [1, 1, 1, 1], "limit": 0.456})

    def drawn() -> str:
        return draw("figure2", "cifar10", "resnet18", "short", tmp_path / "results")[0].read_text()

    assert "ρ = 0.456" in drawn()  # noqa: RUF001
    assert "robust (cross-entropy)" in drawn()
    put(CIFAR, (10, {"clean": 0.9}), series=SERIES | {"multiplier": [1, 2, 1]})
    assert "ρ = 0.8" in drawn()  # noqa: RUF001
    assert "robust (KL)" in drawn()
    put(best["long"], (10, {"clean": 0.9}), series=longer | {"multiplier": [1, 2, 2, 1], "limit": 0.123})
    assert "ρ = 0.123" in drawn()  # noqa: RUF001


def test_without_numbers_there_is_no_figure(put, tmp_path) -> None:
    with pytest.raises(DaleError, match=r"needs a result of dale rho=0\.8 on mnist at the budget short"):
        draw("figure1", "mnist", "convnet", "short", tmp_path / "results")
    pytest.importorskip("matplotlib")
    put(MNIST, (10, {"clean": 0.9}))
    with pytest.raises(DaleError, match="has no projection"):
        draw("figure1", "mnist", "convnet", "short", tmp_path / "results")
