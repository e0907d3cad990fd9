"""Figures as PDF, SVG and PNG."""

from __future__ import annotations

import sys

import pytest

from dale.errors import DaleError
from dale.reports.figures import _training, write_figures
from dale.reports.runs import read_run
from dale.reports.series import page_data

STARTS = {".pdf": b"%PDF", ".svg": b"<?xml", ".png": b"\x89PNG"}


def test_every_figure_in_every_format(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    paths = write_figures([read_run(make_run(), name="50% $x$ <b>")], tmp_path / "figures")
    kinds = {path.stem for path in paths}
    assert kinds == {"training", "projection", "classes", "radius", "trade-off"}
    assert len(paths) == 15
    for path in paths:
        assert path.read_bytes().startswith(STARTS[path.suffix])
    assert "50% $x$ &lt;b&gt;" in (tmp_path / "figures" / "radius.svg").read_text()


def test_many_runs_get_names_of_their_own_and_empty_ones_none(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    bare = make_run("bare", evaluation=None, artefacts=None, metrics="")
    runs = [read_run(make_run("a"), name="x/y"), read_run(bare, name="x y")]
    stems = {path.stem for path in write_figures(runs, tmp_path)}
    assert stems == {"x-y-training", "x-y-projection", "x-y-classes", "radius", "trade-off"}


def test_each_limit_of_its_own_is_drawn(make_run):
    pytest.importorskip("matplotlib")
    (run,) = page_data([read_run(make_run())])["runs"]
    run["constraints"][0] |= {"by": "group", "limits": [5.0, 0.1], "rules": [0.1, 5.0]}
    axes = _training(run).axes[0]
    level = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert level == [0.1, 5.0]
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1:] == ["limits ρ by group"]  # noqa: RUF001


def test_without_matplotlib_one_line_says_what_to_install(make_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DaleError, match=r"pip install 'dale\[figures\]'"):
        write_figures([read_run(make_run())], tmp_path)
