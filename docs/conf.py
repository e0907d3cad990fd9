"""The site: `make docs`. Sphinx reads the Markdown pages, the notebook and the docstrings; warnings are errors."""

from __future__ import annotations

import json
import re

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import dale

project = "dale"
author = "the authors of dale"
version = release = dale.__version__
html_title = "dale"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
exclude_patterns = ["**/.ipynb_checkpoints"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]

nitpicky = True  # a reference in a docstring or a signature that leads nowhere fails the build
# names of other projects, whose documentation an offline build cannot read
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|np|npt|numpy|nn|optim|pathlib|os|subprocess|collections|typing)\..*"),
    (r"py:class", r"dale\.components\.T|dale\..*\._\w+"),  # a type variable; private bases
    (r"py:class", r"dale\.training\.checkpoints\.\w+"),  # what a run folder writes; nobody else makes one
]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 90


def literal_markdown(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text with `code` and indented formulas: say so in reStructuredText."""
    text = "\n".join(lines)
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        rows = paragraph.split("\n")
        if rows[0].startswith("    ") or rows[0].startswith("|"):  # a formula, a table: as it stands
            out += ["::", "", *(f"    {row}" for row in rows), ""]
        else:
            out += [*_prose(paragraph).split("\n"), ""]
    lines[:] = out


def readable_defaults(
    app: Sphinx, kind: str, name: str, thing: object, options: object, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """A dataclass prints `<factory>` where a default is made anew, which no parser of signatures understands."""
    return (signature and signature.replace("<factory>", "..."), result)


def _prose(text: str) -> str:
    """`code` becomes ``code``; everything else that reStructuredText would read as markup is escaped."""
    parts = re.split(r"`{1,2}([^`]+)`{1,2}", text)
    return "".join(f"``{part}``" if k % 2 else re.sub(r"([*_|\\<>])", r"\\\1", part) for k, part in enumerate(parts))


def notebook_as_markdown(app: Sphinx, name: str, source: list[str]) -> None:
    """A notebook is a page: its text, its code, and the pictures and lines that it printed."""
    if app.env.doc2path(name).suffix == ".ipynb":
        source[0] = "\n\n".join(part for cell in json.loads(source[0])["cells"] for part in _cell(cell))


def _cell(cell: dict[str, object]) -> list[str]:
    text = "".join(cell["source"])  # type: ignore[arg-type]
    if cell["cell_type"] == "markdown":
        return [text]
    parts = [f"```python\n{text}\n```"]
    for output in cell["outputs"]:  # type: ignore[attr-defined]
        data = output.get("data", {})
        if "image/png" in data:
            parts.append(f"![](data:image/png;base64,{''.join(data['image/png']).replace(chr(10), '')})")
        elif printed := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            parts.append(f"```text\n{printed}\n```")
    return parts


class TopLevel(SphinxDirective):
    """The names at the top of the package, each with a link to where it is documented and its first line."""

    def run(self) -> list[nodes.Node]:
        """Write a list, with references that must lead somewhere."""
        rows = []
        for name in sorted(set(dale._NAMES), key=str.lower):
            thing = getattr(dale, name)
            first = " ".join((thing.__doc__ or "").split("\n\n")[0].split())
            rows.append(f"- :py:obj:`dale.{name} <{dale._NAMES[name]}.{name}>`: {_prose(first)}")
        holder = nodes.container()
        self.state.nested_parse(StringList(["```{eval-rst}", *rows, "```"], "top-level"), self.content_offset, holder)
        return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect them."""
    app.add_directive("top-level", TopLevel)
    app.connect("autodoc-process-docstring", literal_markdown)
    app.connect("autodoc-process-signature", readable_defaults)
    app.connect("source-read", notebook_as_markdown)
    return {"parallel_read_safe": True}
