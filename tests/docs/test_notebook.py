"""The notebook runs from top to bottom, and what it keeps of its outputs is small."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "digits.ipynb"
nbformat = pytest.importorskip("nbformat", reason="the notebook needs nbformat, of the extra dev")


def test_it_is_valid_small_and_ran_in_order() -> None:
    assert NOTEBOOK.stat().st_size < 100_000
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip(
        "nbclient", reason="running the notebook needs nbclient and ipykernel, of the extra dev"
    )
    monkeypatch.setenv("DALE_NOTEBOOK_EPOCHS", "4")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    for words in ("epoch   1", "pgd20x5", "With confidence 95%", "DALE: "):
        assert words in printed
    assert any("image/png" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", []))
