"""Tables: pure functions of result files, exact to the last cell."""

from __future__ import annotations

import csv
import io

from dale.files import write_json
from dale.reproduction import Spec, make_table, rows_of
from dale.reproduction.tables import MISSING
from dale.reproduction.timing import timing_path


def cifar(algorithm: str, seed: int = 0, budget: str = "short", **options: float) -> Spec:
    return Spec("cifar10", "resnet18", algorithm, options, budget, seed)


def test_ours_the_papers_the_difference_and_the_spread(put, tmp_path) -> None:
    for seed, pgd in enumerate((0.48, 0.50)):
        put(
            cifar("dale", seed, rho=0.8),
            (10_000, {"clean": 0.84, "fgsm": 0.56, "pgd20-last": pgd}),
            (1000, {"clean": 0.85, "pgd20x10": 0.46, "autoattack-fast": 0.44}),
        )
    table = make_table("table1", "cifar10", None, "short", tmp_path / "results")
    assert table.head == (
        *("row", "seeds", "clean", "paper (difference)", "FGSM", "paper (difference)", "PGD-20", "paper (difference)"),
        *("PGD-20, 10 restarts", "APGD-CE + APGD-T", "held-out loss", "nu"),
    )
    rows = {row[0]: row for row in table.rows}
    assert rows["dale rho=0.8"] == (
        *("dale rho=0.8", "2", "84.0 ± 0.0", "85.0 (-1.0)", "56.0 ± 0.0", "55.4 (+0.6)", "49.0 ± 1.4", "50.1 (-1.1)"),
        *("46.0 ± 0.0", "44.0 ± 0.0", "0.750", "0.250"),
    )
    assert rows["erm"] == ("erm", MISSING, "-", "94.0", "-", "0.01", "-", "0.01", *("-",) * 4)
    assert list(rows) == [row.label for row in rows_of("table1", "cifar10")]
    assert "9 of 10 rows were not run." in table.notes
    assert "Made on A GPU, torch 2.11.0." in table.notes
    assert "On 10,000 test images: clean; FGSM; PGD-20." in table.notes
    assert "On 1,000 test images: PGD-20, 10 restarts; APGD-CE + APGD-T." in table.notes


def test_an_accuracy_of_fewer_seeds_than_the_row_says_so(put, tmp_path) -> None:
    put(cifar("pgd", 0), (10_000, {"clean": 0.7, "fgsm": 0.5}))
    put(cifar("pgd", 1), (10_000, {"clean": 0.7}))
    table = make_table("table1", "cifar10", None, "short", tmp_path / "results", ["pgd"])
    (row,) = table.rows
    assert (row[1], row[2], row[4]) == ("2", "70.0 ± 0.0", "50.0 (1 of 2)")
    assert "Seeds in brackets: an accuracy that not all results of its row have." in table.notes
    (values,) = csv.DictReader(io.StringIO(table.as_csv()))
    assert (values["clean seeds"], values["fgsm seeds"]) == ("2", "1")
    put(cifar("pgd", 1), (10_000, {"clean": 0.7, "fgsm": 0.5}))
    whole = make_table("table1", "cifar10", None, "short", tmp_path / "results", ["pgd"])
    assert whole.rows[0][4] == "50.0 ± 0.0"
    assert not any("brackets" in note for note in whole.notes)


def test_a_result_of_another_recipe_is_marked(put, tmp_path) -> None:
    put(cifar("pgd", 0), (10_000, {"clean": 0.7}))
    put(cifar("pgd", 1), (10_000, {"clean": 0.7}), config="another")
    put(cifar("erm", 0), (10_000, {"clean": 0.9}))
    table = make_table("table1", "cifar10", None, "short", tmp_path / "results", ["erm", "pgd"])
    assert [row[0] for row in table.rows] == ["erm", "pgd †"]
    assert "† All or some of its results were made by another recipe than today's." in table.notes
    values = list(csv.DictReader(io.StringIO(table.as_csv())))
    assert [(row["row"], row["of another recipe"]) for row in values] == [("erm", "0"), ("pgd", "1")]
    fresh = make_table("table1", "cifar10", None, "short", tmp_path / "results", ["erm"])
    assert not any("†" in note for note in fresh.notes)


def test_other_budgets_and_models_do_not_count(put, tmp_path) -> None:
    put(cifar("pgd", budget="smoke"), (10, {"clean": 1.0}))
    put(Spec("cifar10", "resnet50", "pgd"), (10, {"clean": 1.0}))
    table = make_table("table1", "cifar10", None, "short", tmp_path / "results")
    assert table.empty
    assert table.name == "table1-cifar10-short"
    assert make_table("table6", "cifar10", "resnet50", "full", tmp_path).name == "table6-cifar10-resnet50-full"


def test_three_forms_of_one_table(put, tmp_path) -> None:
    put(cifar("dale-optimal", rho=0.8), (1000, {"clean": 0.5, "fgsm": 0.25}))
    table = make_table("ablation", "cifar10", None, "short", tmp_path / "results")
    assert not table.empty
    written = table.write(tmp_path / "tables")
    texts = {path.suffix: path.read_text() for path in written}
    assert {path.name for path in written} == {f"ablation-cifar10-short{s}" for s in (".md", ".html", ".csv")}
    assert "| lambda\\* | 1 | 50.0 | 25.0 | - |" in texts[".md"]
    assert "paper" not in texts[".md"].partition("\n\n")[2].splitlines()[0]  # it printed nothing of this
    assert "<td>lambda*</td><td>1</td><td>50.0</td><td>25.0</td>" in texts[".html"]
    values = {row["row"]: row for row in csv.DictReader(io.StringIO(texts[".csv"]))}
    assert values["lambda*"]["clean"] == "50.0"
    assert (values["lambda*"]["clean lower"], values["lambda*"]["clean upper"]) == ("49.0", "51.0")
    assert values["lambda*"]["result"] == "cifar10/resnet18/dale-optimal-rho0.8-short"
    assert values["no noise"]["clean"] == ""


def test_a_label_cannot_break_the_page(put, tmp_path) -> None:
    table = make_table("table1", "mnist", None, "short", tmp_path)
    bad = type(table)("n", "<b>", ("a|b",), (("<i>|",),), ("<p>",), ("a",), (("x",),))
    assert "a\\|b" in bad.markdown()
    assert "<i>" not in bad.as_html()
    assert "<title>&lt;b&gt;</title>" in bad.as_html()


def test_a_choice_of_rows(put, tmp_path) -> None:
    table = make_table("table1", "mnist", None, "short", tmp_path, ["mart", "erm"])
    assert [row[0] for row in table.rows] == ["erm", "mart"]


def test_seconds(tmp_path) -> None:
    assert make_table("table5", "cifar10", None, "full", tmp_path).empty
    plain = {
        "format": 1,
        "variants": {"float32": {"erm": {"batch": 0.0123456, "epoch": 4.8}, "dale": {"batch": 0.1, "epoch": 39.1}}},
        "batch_size": 128,
        "batches": 391,
        "environment": {"gpu": "A GPU", "torch": "2.11.0"},
    }
    write_json(timing_path(tmp_path, "cifar10", "resnet18"), plain)
    table = make_table("table5", "cifar10", None, "full", tmp_path)
    assert table.head == ("row", "paper, batch", "paper, epoch", "float32, batch", "float32, epoch")
    assert table.rows[0] == ("erm", "0.073", "28.1", "0.0123", "4.8")
    assert table.rows[1] == ("fgsm", "0.135", "53", MISSING, MISSING)
    assert "an epoch is 391 such steps" in table.notes[0]
    assert table.notes[1] == "Made on A GPU, torch 2.11.0."
