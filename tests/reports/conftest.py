"""Run folders to report on: written by hand in a moment, or by a real training on digits."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest

PNG = (  # one black pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


def accuracy(correct: int, n: int = 100) -> dict:
    return {
        "correct": correct,
        "n": n,
        "accuracy": correct / n,
        "lower": max(0.0, correct / n - 0.05),
        "upper": min(1.0, correct / n + 0.05),
    }


def config(algorithm="dale", rho=0.1, dataset="digits") -> dict:
    return {
        "type": "RunConfig",
        "format": 1,
        "data": {"dataset": dataset, "train_size": 50},
        "model": {"name": "convnet"},
        "objective": {
            "type": "Algorithm",
            "name": algorithm,
            "perturbations": {"type": "Linf", "epsilon": 0.25},
            "options": {"rho": rho},
        },
        "training": {"epochs": 3, "seed": 7, "optimiser": {"type": "AdamW"}},
    }


def records(rho: float | None = 0.1) -> list[dict]:
    found = []
    for epoch in range(1, 4):
        constraint = {"name": "loss", "by": "all", "limit": [rho], "margin": [0.0], "measure": [1.0 / epoch]}
        constraint |= {"violation": [1.0 / epoch - (rho or 0)], "multiplier": [0.5 * epoch]}
        found.append(
            {
                "epoch": epoch,
                "epochs": 3,
                "learning_rate": 0.1,
                "loss": 2.0 / epoch,
                "robust_loss": 1.5 / epoch,
                "nominal_loss": 1.0 / epoch,
                "clean_accuracy": 0.3 * epoch,
                "robust_accuracy": 0.2 * epoch,
                "constraints": [] if rho is None else [constraint],
                "validation": {"clean_accuracy": 0.3 * epoch, "robust_accuracy": 0.1 * epoch, "nominal_loss": 0.9},
                "seconds": {"train": 1.0, "total": 1.5},
            }
        )
    return found


def evaluation(holds: bool | None = True, clean: int = 97, robust: int = 60) -> dict:
    plain = {
        "format": 1,
        "n": 100,
        "perturbations": {"type": "Linf", "epsilon": 0.25},
        "clean": accuracy(clean),
        "clean_per_class": [accuracy(9, 10), None, accuracy(8, 10)],
        "nominal_loss": {"mean": 0.08, "standard_error": 0.01, "rho": 0.1, "holds": True},
        "attacks": [
            {"name": "fgsm", "accuracy": accuracy(70), "per_class": [None, None, None], "seconds": 0.5},
            {"name": "pgd20", "accuracy": accuracy(robust), "per_class": [accuracy(5, 10)] * 3, "seconds": 2.5},
        ],
        "worst": accuracy(robust),
        "worst_per_class": [accuracy(5, 10), accuracy(6, 10), accuracy(7, 10)],
        "alarms": [
            {"name": "gradients", "passed": True, "message": "Gradients do not vanish."},
            {"name": "epsilon", "passed": False, "message": "A larger radius fools the model less."},
        ],
        "curve": [{"epsilon": e, "accuracy": accuracy(k)} for e, k in ((0.1, 80), (0.25, robust), (0.5, 10))],
        "notes": [],
        "class_names": ["zero", "one", "two"],
        "seconds": 3.2,
    }
    if holds is not None:
        plain["certificate"] = {
            "holds": holds,
            "loss_holds": holds,
            "accuracy_holds": None,
            "clip": 10.0,
            "loss": {"bound": 0.095},
            "statement": "With confidence 95% the clipped loss is at most 0.095.",
        }
    return plain


def artefacts(examples: int = 3) -> dict:
    level = {"perturbed": PNG, "delta": PNG, "top": [[1, 0.75], [0, 0.25]]}
    entry = {"index": 4, "label": 0, "clean": PNG, "reach": 0.25, "levels": [level] * 3}
    return {
        "format": 1,
        "class_names": ["zero", "one", "two"],
        "gallery": {
            "attack": "pgd20",
            "unit": "epsilon",
            "radii": [0.0, 0.25, 0.5],
            "trained": 0.25,
            "examples": [entry] * examples,
        },
        "projection": {"explained": [0.3, 0.1], "series": {"FGSM": [[0.1, 0.2], [0.3, 0.4]], "PGD": [[0.0, 0.1]]}},
    }


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder; a part given as None is left out, a text is written as it is."""

    def make(name="first", *, rho=0.1, feasible=True, **parts) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        summary = {
            "selected_epoch": 3,
            "epochs": 3,
            "feasible": feasible,
            "violation": 0.02 if feasible is False else -0.01,
            "validation": {"clean_accuracy": 0.9, "nominal_loss": 0.09, "robust_accuracy": 0.5},
            "multipliers": [[1.5]] if rho is not None else [],
            "warnings": [],
            "seconds": 4.5,
        }
        contents = {
            "config.yaml": config(rho=rho),  # JSON is YAML
            "environment.json": {"dale": "0.1.0", "torch": "2", "python": "3.11", "cpu": "a processor", "cores": 2},
            "metrics.jsonl": "".join(json.dumps(record) + "\n" for record in records(rho)),
            "summary.json": summary,
            "evaluation.json": evaluation(),
            "artefacts.json": artefacts(),
        }
        for file, content in contents.items():
            given = parts.get(file.partition(".")[0], content)
            if given is not None:
                (folder / file).write_text(given if isinstance(given, str) else json.dumps(given))
        return folder

    return make


@pytest.fixture
def hostile():
    """The parts of a run in which every text that a file can hold is `text`."""

    def poison(value, text):
        if isinstance(value, dict):
            return {key: poison(item, text) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item, text) for item in value]
        return text if isinstance(value, str) and value != PNG else value

    def parts(text: str) -> dict:
        made = {"config": config(), "evaluation": evaluation(), "artefacts": artefacts(), "environment": {"cpu": "x"}}
        found = {name: poison(value, text) for name, value in made.items()}
        found["evaluation"]["attacks"][0]["name"] = text + "2"
        series = found["artefacts"]["projection"]["series"]
        found["artefacts"]["projection"]["series"] = {text: series["FGSM"]}
        found["metrics"] = "".join(json.dumps(poison(record, text)) + "\n" for record in records())
        found["summary"] = {"feasible": False, "warnings": [text], "selected_epoch": 3, "epochs": text}
        return found

    return parts


@pytest.fixture(scope="session")
def real_runs(tmp_path_factory) -> list[Path]:
    """Five tiny runs on digits, with everything that the end of a training writes; test processes share them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "five-real-runs"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "names.json").exists():
            (folder / "names.json").write_text(json.dumps(_train_five(folder)))
    return [folder / name for name in json.loads((folder / "names.json").read_text())]


def _train_five(folder: Path) -> list[str]:
    import dale
    from dale.files import read_json, write_json
    from dale.training.artefacts import write_artefacts
    from dale.training.certification import certify_run

    data = dale.load_dataset("digits", train_size=256)
    ball = dale.Linf(epsilon=0.25)
    rows = {f"rho-{rho}": dale.algorithms.dale(ball, rho=rho, steps=3) for rho in (0.1, 0.5, 1.0)}
    rows |= {"pgd": dale.algorithms.pgd(ball, steps=3), "trades": dale.algorithms.trades(ball, steps=3)}
    for name, objective in rows.items():
        model = dale.create_model("convnet", data)
        run = dale.fit(model, objective, data, out=folder / name, progress=False, epochs=2)
        attacks, radii = ["fgsm", "pgd5"], (0.1, 0.25, 0.5)
        options = {"examples": 60, "epsilons": radii, "checks": name == "rho-0.1", "progress": False}
        dale.evaluate(run.model, data, ball, attacks, out=run.path, **options)
        certificate = certify_run(run, data)
        if certificate is not None:
            path = run.path / "evaluation.json"
            write_json(path, read_json(path) | {"certificate": certificate.to_plain()})
        write_artefacts(run, data, run.path)
    return list(rows)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium, driven by Playwright; skipped where one of them is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = os.environ.get("DALE_BROWSER") or next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no browser was found: install chromium, or set DALE_BROWSER to one")
    quiet = ("background-networking", "component-update", "sync", "gpu")
    options = ["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=options)
        yield started
        started.close()
