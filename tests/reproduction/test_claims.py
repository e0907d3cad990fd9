"""Verdicts that numbers give."""

from __future__ import annotations

import pytest
import torch

from dale.reproduction import Spec, rows_of
from dale.reproduction.claims import Side, claims, claims_table, measured, trend, verdict
from dale.reproduction.results import Summary


def number(mean: float, n: int = 10_000) -> Summary:
    return Summary(mean, None, 1, n)


@pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
def test_every_claim_is_about_rows_that_exist(dataset: str) -> None:
    for claim in claims(dataset):
        for table, label in (claim.left, claim.right):
            assert label == "best" or label in {row.label for row in rows_of(table, dataset)}
        attacks = [a for stage in Spec(dataset, "convnet", "pgd").stages() for a in stage.attacks]
        assert claim.attack == "clean" or claim.attack in attacks


def test_a_difference_counts_beyond_two_standard_errors() -> None:
    def judged(left: float | None, right: float) -> str:
        return verdict(Side("this", None if left is None else number(left)), Side("that", number(right)))

    # the error of each side is 0.005, of the difference 0.00707
    assert judged(0.515, 0.5) == "holds"
    assert judged(0.514, 0.5) == "not decided"
    assert judged(0.5, 0.515) == "does not hold"
    assert judged(None, 0.5) == "not run"


def test_it_takes_more_to_be_below_the_best_of_many() -> None:
    """Ten rows that are equal in truth: one time in eight their best is two standard errors above another such row."""
    source = torch.Generator().manual_seed(0)
    drawn = 0.5 + 0.005 * torch.randn(4000, 11, generator=source)
    found = [
        verdict(Side("this", number(float(row[0]))), Side("best", number(float(row[1:].max())), 10, 10))
        for row in drawn
    ]
    assert found.count("does not hold") / len(found) < 0.03
    assert (drawn[:, 0] < drawn[:, 1:].max(dim=1).values - 2 * 0.005 * 2**0.5).double().mean() > 0.1


def test_the_best_of_some_rows_can_refute_and_no_more(put, tmp_path) -> None:
    root, rows = tmp_path / "results", rows_of("table2", "cifar10")
    above, below = Side("this", number(0.6)), Side("this", number(0.4))
    for place, row in enumerate(rows):
        found = measured(root, "cifar10", ("table2", "best"), "pgd20-last", "short")
        assert (found.run, found.rows) == (place, len(rows))
        assert verdict(above, found) == "not run"
        assert verdict(below, found) == ("does not hold" if place else "not run")
        put(row.spec("cifar10", "resnet18", "short", 0), (10_000, {"pgd20-last": 0.5 - 0.01 * place}))
        if place == 1:
            assert str(measured(root, "cifar10", ("table2", "best"), "pgd20-last", "short")).startswith(
                f"best of table2 (2 of {len(rows)} rows): 50.0"
            )
    found = measured(root, "cifar10", ("table2", "best"), "pgd20-last", "short")
    assert found.number == number(0.5)
    assert str(found) == "best of table2: 50.0"
    assert verdict(above, found) == "holds"
    part = Side("best", number(0.6), 2, 7)
    assert verdict(part, Side("that", number(0.5))) == "holds"
    assert verdict(part, Side("that", number(0.7))) == verdict(part, Side("that", number(0.6))) == "not run"


def test_the_table_of_claims(put, tmp_path) -> None:
    put(Spec("mnist", "convnet", "dale", {"rho": 1.0}), (10_000, {"pgd10@0.1-last": 0.95}))
    put(Spec("mnist", "convnet", "pgd"), (10_000, {"pgd10@0.1-last": 0.93}))
    lines = claims_table(tmp_path / "results", "mnist", "short").splitlines()
    assert lines[2].startswith("| DALE withstands PGD better than PGD training | PGD-10 | ")
    assert lines[2].endswith(" | dale rho=1.0: 95.0 | pgd: 93.0 | +2.0 (± 0.7) | holds |")
    assert lines[3].endswith("| trades: - | - | not run |")
    assert not any("†" in line for line in lines)
    put(Spec("mnist", "convnet", "pgd"), (10_000, {"pgd10@0.1-last": 0.93}), config="another")
    table = claims_table(tmp_path / "results", "mnist", "short")
    assert "| dale rho=1.0: 95.0 | pgd †: 93.0 |" in table
    assert table.endswith("\n\n† All or some of its results were made by another recipe than today's.\n")


def test_trends() -> None:
    points = [(0.1, number(0.9)), (0.5, number(0.86)), (1.0, number(0.8))]
    assert (
        trend(points, rising=False)
        == "holds: it falls from 90.0 to 80.0 over 3 values of rho, with no step back beyond noise"
    )
    assert trend(points, rising=True).startswith("does not hold: from 90.0 to 80.0")
    noisy = [*points, (0.6, number(0.861))]
    assert trend(noisy, rising=False).startswith("holds")
    broken = [*points, (0.6, number(0.89))]
    assert trend(broken, rising=False).endswith("with 1 step back beyond noise")
    flat = [(rho, number(0.5 + 0.0002 * place)) for place, rho in enumerate((0.1, 0.5, 1.0))]
    assert trend(flat, rising=True) == "not decided: from 50.0 to 50.0 over 3 values of rho, which is within noise"
    assert "within noise" in trend(flat, rising=False)  # to either side
    level = [(rho, number(0.5)) for rho in (0.1, 0.5, 1.0)]
    assert trend(level, rising=False) == trend(flat, rising=True)
    assert trend(points[:2], rising=False) == "not decided: 2 values of rho were run"
