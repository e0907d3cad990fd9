"""Verdicts that numbers give."""

from __future__ import annotations

import pytest

from dale.reproduction import Spec, rows_of
from dale.reproduction.claims import Claim, claims, claims_table, measured, trend, verdict
from dale.reproduction.results import Summary

CLAIM = Claim("x", "cifar10", ("table1", "pgd"), ("table1", "erm"), "clean")


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
    # the error of each side is 0.005, of the difference 0.00707
    assert verdict(CLAIM, number(0.515), number(0.5)) == "holds"
    assert verdict(CLAIM, number(0.514), number(0.5)) == "not decided"
    assert verdict(CLAIM, number(0.5), number(0.515)) == "does not hold"
    assert verdict(CLAIM, None, number(0.5)) == "not run"
    no_worse = Claim("x", "cifar10", CLAIM.left, CLAIM.right, "clean", "not below")
    assert verdict(no_worse, number(0.495), number(0.5)) == "holds"
    assert verdict(no_worse, number(0.48), number(0.5)) == "does not hold"


def test_the_best_of_a_table_needs_all_of_it(put, tmp_path) -> None:
    root = tmp_path / "results"
    for place, row in enumerate(rows_of("table2", "cifar10")):
        assert measured(root, "cifar10", ("table2", "best"), "pgd20-last", "short") is None
        put(row.spec("cifar10", "resnet18", "short", 0), (10_000, {"pgd20-last": 0.5 - 0.01 * place}))
    found = measured(root, "cifar10", ("table2", "best"), "pgd20-last", "short")
    assert found == number(0.5)


def test_the_table_of_claims(put, tmp_path) -> None:
    put(Spec("mnist", "convnet", "dale", {"rho": 1.0}), (10_000, {"pgd10@0.1-last": 0.95}))
    put(Spec("mnist", "convnet", "pgd"), (10_000, {"pgd10@0.1-last": 0.93}))
    lines = claims_table(tmp_path / "results", "mnist", "short").splitlines()
    assert lines[2].startswith("| DALE withstands PGD better than PGD training | PGD-10 | ")
    assert lines[2].endswith(" | dale rho=1.0: 95.0 | pgd: 93.0 | +2.0 (± 0.7) | holds |")
    assert lines[3].endswith("| trades: - | - | not run |")


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
    assert trend(points[:2], rising=False) == "not decided: 2 values of rho were run"
