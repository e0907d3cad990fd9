"""The tables of the paper: their rows are those printed, and the runs they need."""

from __future__ import annotations

import pytest

from dale.errors import UsageError
from dale.reports.series import paper
from dale.reproduction import rows_of, specs_of
from dale.reproduction.catalogue import chosen


def test_the_rows_are_the_papers() -> None:
    numbers = paper()
    for dataset in ("mnist", "cifar10"):
        printed = {label: values for label, values in numbers["table1"][dataset].items() if label != "attack"}
        assert {row.label: row.printed for row in rows_of("table1", dataset)} == printed
    assert {row.label: row.printed for row in rows_of("table2", "cifar10")} == numbers["table2_regularised_cifar10"]
    for model, values in numbers["table6_rho_tradeoff_cifar10"].items():
        found = {row.label.removeprefix("rho="): row.printed for row in rows_of("table6", "cifar10", model)}
        assert found == values
    assert len(rows_of("table7", "cifar10")) == 16
    for table, key in (("table4", "table4_mnist_seconds"), ("table5", "table5_cifar10_seconds")):
        labels = {row.label for row in rows_of(table, key.split("_")[1])}
        assert labels == set(numbers[key]) - {"about"}


def test_labels_become_options() -> None:
    rows = {row.label: row for row in rows_of("table1", "cifar10") + rows_of("table7", "cifar10")}
    assert (rows["dale rho=0.5"].algorithm, rows["dale rho=0.5"].options) == ("dale", {"rho": 0.5})
    assert rows["dale rho=1.0, 3 steps"].options == {"rho": 1.0, "steps": 3}
    assert rows["pgd, 20 steps"].options == {"steps": 20}
    assert rows_of("table2", "cifar10")[2].options == {"nu": 0.3}


def test_another_model_has_the_rows_and_no_printed_numbers() -> None:
    rows = rows_of("table6", "cifar10", "preact-resnet18")
    assert len(rows) == 11
    assert {row.printed for row in rows} == {None}


def test_all_rows_of_the_first_seed_come_first() -> None:
    specs = specs_of("table1", "mnist", "convnet", "short", 2, ["pgd", "dale"])
    assert [(spec.row, spec.seed) for spec in specs] == [
        (row, seed) for seed in (0, 1) for row in ("pgd", "dale-rho0.5", "dale-rho0.8", "dale-rho1.0")
    ]


def test_tables_of_seconds_need_no_runs() -> None:
    assert specs_of("table5", "cifar10", "resnet18", "full", 3) == []


def test_rows_are_chosen_by_label_or_algorithm() -> None:
    rows = rows_of("table1", "mnist")
    assert [row.label for row in chosen(rows, ["dale rho=0.8", "erm"])] == ["erm", "dale rho=0.8"]
    with pytest.raises(UsageError, match="did you mean 'trades'"):
        chosen(rows, ["trade"])


def test_a_table_of_another_data_set_is_refused() -> None:
    with pytest.raises(UsageError, match="about cifar10, not mnist"):
        rows_of("table6", "mnist")
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        rows_of("tabel1", "mnist")
