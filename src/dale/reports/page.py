"""One self-contained HTML page: text written here, charts drawn by the page's own script from the numbers inside it.

Nothing is fetched: styles, script, numbers and pictures are in the file, and its content security policy lets only this
very script run (by its hash). Names and labels come from files of strangers: in HTML they pass through `escape`, in the
embedded JSON every `<` is written as an escape, and the script uses text nodes only.
"""

# ruff: noqa: RUF001 (Greek letters, as in the paper, are meant)

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path

from dale import __version__
from dale.errors import require
from dale.files import finite, write_text
from dale.reports import sections, series
from dale.reports.runs import RunFiles

LOSSES = (
    "Losses, the limit and the multiplier",
    "The nominal loss is to fall below the limit ρ. While it lies above, the multiplier ν grows and pulls the training "
    "towards nominal performance; once it lies below, ν shrinks and leaves room for robustness.",
    ("losses", "duals"),
)
HELD_OUT = (
    "Held-out accuracy during training",
    "Measured on the validation split, which selects the checkpoint.",
    ("heldout",),
)
RADIUS = (
    "Accuracy against ε",
    "Accuracy under attack when the attacker may move less or further than in training. Bands are exact 95% intervals; "
    "every accuracy under attack is an upper bound on the true one.",
    ("radius",),
)
TRADE_OFF = (
    "The trade-off between clean and robust accuracy",
    "Every run is a point, with its 95% intervals. Hollow circles are the paper's own numbers, for its data sets, "
    "models and attacks; switch them on in the legend.",
    ("tradeoff",),
)
CLASSES = (
    "Accuracy of every class",
    "With exact 95% intervals. Switch single attacks on in the legend.",
    ("classes",),
)
PROJECTION = (
    "Perturbations, seen along the main directions of the data",
    "Each point is the perturbation of one test image, projected onto the first two principal components of the "
    "training images.",
    ("projection",),
)


@cache
def _static(name: str) -> str:
    return resources.files("dale.reports").joinpath("static", name).read_text("utf-8")


def _embedded(value: object) -> str:
    """JSON that cannot end its script element, whatever text is inside."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _panel(title: str, text: str, charts: Sequence[str]) -> str:
    places = "".join(f'<div class="chart" id="{name}"></div>' for name in charts)
    inner = f'<div class="pair">{places}</div>' if len(charts) > 1 else places
    return f'<section class="panel charts"><h2>{escape(title)}</h2><p>{escape(text)}</p>{inner}</section>'


def _body(runs: Sequence[RunFiles], heading: str) -> list[str]:
    """The page from top to bottom. Parts of single runs carry their number: the script shows one run at a time."""
    many = len(runs) > 1
    own = list(enumerate(runs))
    return [
        f"<header><h1>{escape(heading)}</h1></header>",
        sections.runs_table(runs) if many else "",
        *(f'<section class="summary" data-run="{k}">{sections.summary(run, many)}</section>' for k, run in own),
        _panel(*LOSSES),
        _panel(*HELD_OUT),
        sections.OVERLAY if many else "",
        _panel(*RADIUS),
        _panel(*TRADE_OFF),
        _panel(*CLASSES),
        _panel(*PROJECTION),
        sections.GALLERY,
        '<section class="panel"><h2>Timings</h2><p>Seconds on the machine named here.</p>',
        *(f'<div data-run="{k}">{sections.timings(run)}</div>' for k, run in own),
        '<div class="chart" id="pace"></div></section>',
        *(f'<section class="panel long" data-run="{k}">{sections.configuration(run, k)}</section>' for k, run in own),
        f"<footer>Written by dale {escape(__version__)} from the files of the run{'s' if many else ''}.</footer>",
        "<noscript><p>The charts and pictures need JavaScript.</p></noscript>",
    ]


def render_page(runs: Sequence[RunFiles], title: str | None = None) -> str:
    """Return the page of one run, or of many set side by side."""
    require(len(runs) > 0, "a report needs at least one run")
    heading = title or (f"{len(runs)} runs" if len(runs) > 1 else runs[0].name)
    script = _static("charts.js") + _static("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = [
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(heading)} - dale</title>",
        f"<style>{_static('page.css')}</style>",
    ]
    body = [
        f"<main>{chr(10).join(part for part in _body(runs, heading) if part)}</main>",
        f'<script type="application/json" id="data">{_embedded(series.page_data(runs))}</script>',
        f"<script>{script}</script>",
    ]
    lines = ['<!DOCTYPE html>\n<html lang="en"><head>', *head, "</head><body>", *body, "</body></html>\n"]
    # half of a surrogate pair, which JSON can hold, has no place in UTF-8
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")


def write_report(runs: Sequence[RunFiles], out: str | Path, title: str | None = None) -> Path:
    """Write the page of the given runs to the file `out`, all of it or nothing."""
    path = Path(out)
    write_text(path, render_page(runs, title))
    return path
