"""The site builds without a warning, and a link or a reference that leads nowhere is one."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dale

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    "perturbations",
    "losses",
    "samplers",
    "aggregators",
    "lambda_star",
    "constraints",
    "objectives",
    "algorithms",
    "certificates",
    "models",
    "data",
    "attacks",
    "evaluation",
    "training",
    "sensitivity",
    "experiments",
    "reports",
    "export",
]


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` runs."""
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", str(source), str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_module_has_a_page_of_reference(module: str) -> None:
    assert f"automodule:: dale.{module}" in (ROOT / "docs" / "api" / f"{module}.md").read_text()
    assert f"({module}.md)" in (ROOT / "docs" / "api" / "index.md").read_text()


def test_no_module_is_left_out() -> None:
    pages = " ".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert [module for module in dale._MODULES if f"automodule:: dale.{module}" not in pages] == []


def test_the_home_page_leads_to_every_page() -> None:
    home = (ROOT / "docs" / "index.md").read_text()
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")):
        assert page.stem == "index" or f"]({page.name})" in home, page.name


@pytest.mark.verify
class TestBuild:
    @pytest.fixture(autouse=True)
    def _needs_sphinx(self) -> None:
        pytest.importorskip("sphinx", reason="the site needs Sphinx, of the extra docs")

    def test_without_a_warning(self, tmp_path: Path) -> None:
        done = build(ROOT / "docs", tmp_path / "site")
        assert (done.returncode, done.stderr) == (0, "")
        assert 'id="dale.training.fit"' in (tmp_path / "site" / "api" / "training.html").read_text()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("[a link](nowhere.md)", "nowhere.md"),
            ("[a heading](theory.md#no-such-heading)", "no-such-heading"),
            ("```{eval-rst}\n:py:func:`dale.training.no_such_name`\n```", "no_such_name"),
            ("![a picture](images/none.svg)", "images/none.svg"),
        ],
    )
    def test_what_leads_nowhere_fails(self, text: str, words: str, tmp_path: Path) -> None:
        source = tmp_path / "docs"
        (source / "static").mkdir(parents=True)
        (source / "static" / "site.css").touch()
        shutil.copy(ROOT / "docs" / "conf.py", source)
        (source / "theory.md").write_text("# Theory\n")
        (source / "index.md").write_text(f"# Home\n\n{text}\n\n```{{toctree}}\ntheory\n```\n")
        done = build(source, tmp_path / "site")
        assert done.returncode != 0
        assert words in done.stderr
