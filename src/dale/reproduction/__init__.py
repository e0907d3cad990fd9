"""The paper, reproduced: recipes, runs, results, tables and figures of `dale reproduce`."""

from dale.reproduction.catalogue import TABLES, Row, rows_of, specs_of
from dale.reproduction.recipes import BUDGETS, Spec, Stage, recipes
from dale.reproduction.results import Result, Summary, find_results, read_result, summarise
from dale.reproduction.tables import Table, make_table

__all__ = [
    "BUDGETS",
    "TABLES",
    "Result",
    "Row",
    "Spec",
    "Stage",
    "Summary",
    "Table",
    "find_results",
    "make_table",
    "read_result",
    "recipes",
    "rows_of",
    "specs_of",
    "summarise",
]
