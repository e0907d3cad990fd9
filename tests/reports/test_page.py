"""The page as a file: self-contained, escaped, small, quick, and made without torch."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time

import pytest

from dale.errors import UsageError
from dale.reports.page import render_page, write_report
from dale.reports.runs import read_run, read_runs

HOSTILE = "\"'></script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u2028\ud800"


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_top_says_what_people_ask_first(make_run):
    page = render_page([read_run(make_run())])
    text = re.sub(r"<[^>]+>", " ", page.partition('id="data"')[0])
    for part in (
        "dale trained convnet on digits",
        "Constraint met, proven for the nominal loss clipped at B = 10: nominal loss ≤ 0.1",
        "With confidence 95%",
        "97.0%",
        "[92.0%, 100.0%]",
        "60.0%",
        "A larger radius fools the model less.",
        "1 check against false robustness passed",
        "upper bound on the true robust accuracy",
        "dale train --config",
    ):
        assert part in text, part


def test_the_chart_of_losses_draws_every_limit(make_run, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    lines = [json.loads(line) for line in (make_run("a") / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        record["constraints"][0] |= {"by": "group", "limit": [5.0, 0.1, 0.1], "measure": [1.0, 0.5, 0.4]}
    folder = make_run("b", metrics="".join(json.dumps(record) + "\n" for record in lines))
    page = render_page([read_run(folder)])
    assert "nominal loss of every group ≤ 0.1..5" in page
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)[-1]
    # the page's own script with a chart that says what it was asked to draw, in a document where nothing is
    script = script[script.index("// The page:") :]
    (tmp_path / "drawn.js").write_text(
        "class Chart { constructor(host) { this.id = host.id; }\n"
        "  show(spec) { if (this.id === 'losses') console.log(JSON.stringify(spec.rules)); } }\n"
        f"const text = {json.dumps(json.dumps(data_of(page)))};\n"
        "const place = (id) => ({ id, textContent: text, dataset: {}, style: {}, closest: () => null,\n"
        "  replaceChildren() {}, append() {}, setAttribute() {}, addEventListener() {} });\n"
        "const element = () => place('');\n"
        "const document = { getElementById: (id) => (['overlay', 'focus'].includes(id) ? null : place(id)),\n"
        "  querySelectorAll: () => [], addEventListener() {}, documentElement: place('') };\n" + script
    )
    done = subprocess.run([node, tmp_path / "drawn.js"], capture_output=True, text=True, check=True)
    assert [(rule["y"], rule["name"][1:]) for rule in json.loads(done.stdout)] == [(0.1, " = 0.1"), (5, " = 5")]


def test_nothing_is_fetched_and_only_its_own_script_runs(make_run):
    page = render_page([read_run(make_run())])
    markup = re.sub(r"<script>.*</script>", "", page, flags=re.DOTALL)
    assert re.findall(r'(?:src|href|action)\s*=\s*"?(?!data:)[^">\s]+', markup) == []
    assert "@import" not in page
    assert "url(" not in page.partition("</style>")[0]
    script = re.search(r"<script>(.*)</script></body>|<script>(.*)</script>\n</body>", page, re.DOTALL)
    code = next(part for part in script.groups() if part is not None)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "default-src 'none'" in page


def test_hostile_text_stays_text_everywhere(make_run, hostile):
    runs = [read_run(make_run("a", **hostile(HOSTILE)), name=HOSTILE), read_run(make_run("b"), name=HOSTILE + "2")]
    page = render_page(runs, title=HOSTILE)
    assert page.count("<script") == 2
    assert page.count("</script") == 2
    assert "<img" not in page.partition("<script>")[0]
    shown = HOSTILE.encode("utf-8", "replace").decode()
    assert data_of(page)["runs"][0]["name"] == shown  # as it was, for the script to show as text


@pytest.mark.parametrize("part", ["metrics", "summary", "evaluation", "artefacts", "environment"])
@pytest.mark.parametrize("content", [None, "{", "[]", '{"validation": 3, "attacks": [1, {}], "gallery": {"radii": 2}}'])
def test_a_page_comes_out_of_whatever_is_there(make_run, part, content):
    page = render_page([read_run(make_run(**{part: content}))])
    assert "<h1>first</h1>" in page
    assert data_of(page)["runs"][0]["name"] == "first"


def test_values_of_the_wrong_type_do_no_harm(make_run):
    """Every value of every file replaced, one kind at a time."""

    def replaced(value, by):
        if isinstance(value, dict):
            return {key: replaced(item, by) for key, item in value.items()}
        return [replaced(item, by) for item in value] if isinstance(value, list) else by

    for number, by in enumerate((None, "text", -1.5, True, [], {}, 10**400)):
        folder = make_run(f"run-{number}")
        for name in ("summary", "evaluation", "artefacts", "environment"):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(replaced(json.loads(path.read_text()), by)))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        changed = [replaced(json.loads(line), by) | {"epoch": k} for k, line in enumerate(lines)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in changed))
        assert "</html>" in render_page([read_run(folder)])


def test_fifty_long_runs_stay_small_and_quick(make_run, tmp_path):
    folder = make_run()
    line = (folder / "metrics.jsonl").read_text().splitlines()[0]
    records = [json.loads(line) | {"epoch": epoch} for epoch in range(1, 201)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plain = json.loads((folder / "artefacts.json").read_text())
    big = base64.b64encode(bytes(range(256)) * 40).decode()
    for example in plain["gallery"]["examples"]:
        example["clean"] = big
        example["levels"] = [level | {"perturbed": big, "delta": big} for level in example["levels"]]
    (folder / "artefacts.json").write_text(json.dumps(plain))
    started = time.process_time()
    path = write_report([read_run(folder, name=f"run {k}") for k in range(50)], tmp_path / "report.html")
    assert time.process_time() - started < 3.0
    assert path.stat().st_size < 6_000_000


def test_one_run_with_the_largest_artefacts_stays_small(make_run, tmp_path):
    folder = make_run()
    plain = json.loads((folder / "artefacts.json").read_text())
    big = base64.b64encode(bytes(100_000)).decode()
    entry = plain["gallery"]["examples"][0]
    entry["clean"] = big
    entry["levels"] = [level | {"perturbed": big, "delta": big} for level in entry["levels"]]
    plain["gallery"]["examples"] = [entry] * 20
    (folder / "artefacts.json").write_text(json.dumps(plain))
    assert write_report([read_run(folder)], tmp_path / "report.html").stat().st_size < 6_000_000


def test_the_command_needs_no_torch(make_run, tmp_path):
    folder = make_run()
    code = (
        "import argparse, sys\nfrom dale.cli import report\n"
        "parser = argparse.ArgumentParser(); report.configure(parser)\n"
        f"code = report.run(parser.parse_args([{str(folder)!r}, '--out', {str(tmp_path / 'r.html')!r}, "
        f"'--tables', {str(tmp_path / 'tables')!r}]))\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 False"
    assert lines[0] == str(tmp_path / "r.html")
    assert (tmp_path / "tables" / "results.tex").exists()


def test_no_run_no_page(tmp_path):
    with pytest.raises(UsageError, match="at least one run"):
        render_page([])
    with pytest.raises(UsageError, match="does not exist"):
        read_runs([tmp_path / "missing"])
