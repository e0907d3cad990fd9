"""The numbers behind the charts."""

from __future__ import annotations

import json

from dale.reports import series
from dale.reports.runs import read_run


def test_thinning_keeps_both_ends():
    assert series.thin(range(5), 10) == [0, 1, 2, 3, 4]
    kept = series.thin(range(1001), 11)
    assert kept == list(range(0, 1001, 100))


def test_curves_skip_what_was_not_logged(make_run):
    lines = [{"epoch": 1, "nominal_loss": 0.5}, {"epoch": 2, "nominal_loss": None}, {"epoch": 3, "nominal_loss": 0.25}]
    run = read_run(make_run(metrics="".join(json.dumps(line) + "\n" for line in lines)))
    assert series.curves(run) == {"nominal_loss": [[1.0, 0.5], [3.0, 0.25]]}
    assert series.constraint_curves(run) == []


def test_multipliers_and_limits(make_run):
    (found,) = series.constraint_curves(read_run(make_run()))
    assert found["limits"] == [0.1]
    assert found["rules"] == [0.1]
    assert found["multiplier"] == [[[1.0, 0.5], [2.0, 1.0], [3.0, 1.5]]]


def test_every_limit_has_its_height_in_the_chart():
    assert series.rules((5.0, 0.10000000149011612, 0.1)) == [0.1, 5.0]
    assert series.rules([0.1 * k for k in range(1, 101)]) == [0.1, 10.0]


def test_accuracy_against_epsilon_starts_at_the_clean_accuracy(make_run):
    run = read_run(make_run())
    assert [point[:2] for point in series.radius_curve(run)] == [[0.0, 0.97], [0.1, 0.8], [0.25, 0.6], [0.5, 0.1]]


def test_without_a_curve_the_two_known_radii_remain(make_run):
    folder = make_run()
    plain = json.loads((folder / "evaluation.json").read_text()) | {"curve": []}
    (folder / "evaluation.json").write_text(json.dumps(plain))
    assert [point[:2] for point in series.radius_curve(read_run(folder))] == [[0.0, 0.97], [0.25, 0.6]]


def test_classes_without_examples_stay_empty(make_run):
    found = series.per_class(read_run(make_run()))
    assert found["names"] == ["zero", "one", "two"]
    assert found["series"]["clean"][1] is None
    assert "fgsm" not in found["series"]  # nothing was counted
    assert list(found["series"]) == ["clean", "worst case", "pgd20"]


def test_the_gallery_keeps_to_its_budget(make_run):
    run = read_run(make_run())
    assert len(series.gallery(run)["examples"]) == 3
    one = 7 * len(run.artefacts["gallery"]["examples"][0]["clean"]) + 180
    assert len(series.gallery(run, 2 * one)["examples"]) == 2
    assert series.gallery(run, 0) == {}


def test_pictures_are_base64_and_nothing_else(make_run):
    folder = make_run()
    plain = json.loads((folder / "artefacts.json").read_text())
    plain["gallery"]["examples"][0]["clean"] = 'x" onerror="alert(1)'
    plain["gallery"]["examples"][1]["levels"][0]["top"] = [["<b>", 1]]
    plain["gallery"]["examples"][2]["levels"] = []
    (folder / "artefacts.json").write_text(json.dumps(plain))
    found = series.gallery(read_run(folder))["examples"]
    assert len(found) == 1  # without predictions, or without a picture for every radius, there is nothing to show
    assert found[0]["clean"] == ""


def test_the_papers_numbers():
    curves = {curve["name"]: curve for curve in series.paper_curves()}
    table = {point["label"]: point["values"] for point in curves["Paper, CIFAR-10 (Table 1)"]["points"]}
    assert table["dale rho=1.0"] == [82.1, 55.2, 51.7]
    assert len(curves["Paper, CIFAR-10, ResNet-50 (Table 6)"]["points"]) == 11
    assert all(0 <= v <= 100 for curve in curves.values() for point in curve["points"] for v in point["values"])
