"""Result files: found by row, read with care, summed up over seeds."""

from __future__ import annotations

import pytest

from dale.errors import CheckpointError
from dale.files import write_json
from dale.reproduction import Spec, find_results, read_result, summarise
from dale.reproduction.results import Summary, is_current, series


def spec(seed: int = 0, **options: float) -> Spec:
    return Spec("cifar10", "resnet18", "dale", options or {"rho": 0.8}, "short", seed)


def test_the_results_of_a_row_are_those_of_its_seeds_and_no_others(put, tmp_path) -> None:
    for one in (
        spec(10),
        spec(2),
        spec(0, rho=0.8, steps=5),
        Spec("cifar10", "resnet18", "dale", {"rho": 0.8}, "full"),
    ):
        put(one, (10, {"clean": 0.5}))
    found = find_results(tmp_path / "results", spec())
    assert [result.plain["seed"] for result in found] == [2, 10]
    assert find_results(tmp_path / "nowhere", spec()) == []


def test_mean_and_spread_over_seeds(put, tmp_path) -> None:
    for seed, share in enumerate((0.80, 0.82, 0.84)):
        put(spec(seed), (10_000, {"clean": share}), (1000, {"clean": 0.9, "autoattack-fast": 0.5}))
    results = find_results(tmp_path / "results", spec())
    clean = summarise(results, "clean")
    assert clean is not None
    assert clean.mean == pytest.approx(0.82)
    assert clean.spread == pytest.approx(0.02)
    assert (clean.seeds, clean.n) == (3, 10_000)  # of the first stage that has it, not of the smaller one
    strong = summarise(results, "autoattack-fast")
    assert strong == Summary(0.5, 0.0, 3, 1000)
    assert summarise(results, "square") is None


def test_the_images_behind_a_mean_are_those_of_the_seed_with_fewest(put, tmp_path) -> None:
    put(spec(0), (10_000, {"clean": 0.8}))
    put(spec(1), (1000, {"clean": 0.8}))
    clean = summarise(find_results(tmp_path / "results", spec()), "clean")
    assert clean is not None
    assert clean.n == 1000


def test_a_result_of_another_recipe_is_known(put, tmp_path) -> None:
    config = spec().config().to_yaml()
    made = {
        "today's": config,
        "before a field": config.replace("  accumulate: 1\n", ""),
        "other": config.replace("epochs: 8", "epochs: 9"),
        "none": "another",
    }
    found = {}
    for name, text in made.items():
        put(spec(3), (10, {"clean": 0.5}), config=text.replace("seed: 0\n  det", "seed: 3\n  det"))
        (result,) = find_results(tmp_path / "results", spec())
        found[name] = is_current(result, spec())
    assert found == {"today's": True, "before a field": True, "other": False, "none": False}


def test_the_standard_error_is_that_of_images_and_seeds_together() -> None:
    assert Summary(0.5, None, 1, 10_000).error == pytest.approx(0.005)
    assert Summary(0.5, 0.0, 4, 10_000).error == pytest.approx(0.005)  # more seeds are not more images
    assert Summary(0.5, 0.024, 4, 10_000).error == pytest.approx(0.013)
    assert Summary(1.0, None, 1, 100).error == 0.0


def test_a_foreign_file_is_refused(tmp_path) -> None:
    write_json(tmp_path / "x.json", {"format": 9})
    with pytest.raises(CheckpointError, match=r"x\.json is not a result"):
        read_result(tmp_path / "x.json")


def test_curves_over_the_epochs() -> None:
    record = {
        "epoch": 1,
        "nominal_loss": 1.2345678,
        "robust_loss": None,
        "clean_accuracy": 0.5,
        "robust_accuracy": 0.25,
        "learning_rate": 0.1,
        "constraints": [{"limit": [0.8], "multiplier": [0.2]}],
    }
    seen = record | {"epoch": 2, "validation": {"clean_accuracy": 0.6, "nominal_loss": 0.9}}
    plain = series([record, seen])
    assert plain["nominal_loss"] == [1.2346, 1.2346]
    assert plain["robust_loss"] == [None, None]
    assert (plain["limit"], plain["multiplier"]) == (0.8, [0.2, 0.2])
    assert plain["validation"] == {
        "epoch": [2],
        "clean_accuracy": [0.6],
        "robust_accuracy": [None],
        "nominal_loss": [0.9],
    }
    assert "multiplier" not in series([record | {"constraints": []}])
