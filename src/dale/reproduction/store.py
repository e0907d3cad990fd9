"""Store a run's weights in the zoo, and publish what stored weights score: loaded back, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dale.data import load_dataset
from dale.environment import environment
from dale.evaluation import evaluate
from dale.files import read_json, write_json
from dale.reproduction.recipes import DATASETS, paper_attack
from dale.reproduction.timing import machine
from dale.training import load_run
from dale.training.certification import certify_stored
from dale.zoo import Entry, find, store

FIRST = 1000  # test images that anyone can repeat on a CPU
QUICK = ("fgsm", "pgd20-last", "pgd20", "pgd20-margin")


class Part(NamedTuple):
    """Attacks on the first so many test images (None: all); `strict`: searched in float32 on any device."""

    examples: int | None
    attacks: tuple[str, ...]
    strict: bool = False


def parts_of(dataset: str) -> tuple[Part, ...]:
    """What is published for a data set, the long one last.

    The quick ones have the paper's own PGD among them, which a table compares; those on the first images are strict,
    as for whoever repeats them on a CPU.
    """
    paper = (paper_attack(dataset, "pgd"),) if dataset in DATASETS else ()
    quick, full = tuple(dict.fromkeys((*QUICK, *paper))), ("autoattack",)
    return Part(FIRST, quick, strict=True), Part(None, quick), Part(FIRST, full), Part(None, full)


def publish(
    name: str,
    zoo: Path,
    work: Path,
    *,
    run: Path | None = None,
    device: str | None = None,
    data_dir: str | None = None,
    parts: Sequence[Part] | None = None,
    say: Callable[[str], None] = print,
) -> Entry:
    """Evaluate what is stored as `name`, part by part, first storing the weights of a run where one is given.

    Parts that are published already are left alone; the state of the others lies in `work`, where an interrupted one
    continues, and their numbers in the zoo as soon as they are there.
    """
    import torch

    if run is not None:
        loaded = load_run(run, device="cpu")
        facts = {"config": loaded.config.to_yaml(), "summary": loaded.summary}
        if not (zoo / f"{name}.json").is_file() or not facts.items() <= find(name, zoo).plain.items():
            store(loaded, name, zoo)
    entry = find(name, zoo)
    model = entry.load(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    data = load_dataset(entry.dataset, data_dir=data_dir)
    for examples, attacks, strict in parts or parts_of(entry.dataset):
        count = min(examples or len(data.test), len(data.test))
        known = [part["accuracies"] for part in find(name, zoo).published if part["n"] == count]
        if known and {"clean", *attacks} <= known[0].keys():
            continue
        found = evaluate(
            model,
            data,
            entry.perturbations(),
            attacks,
            examples=count,
            rho=entry.rho,
            out=work / name / f"{count}-{attacks[0]}",
            checks=False,
            strict=strict,
        ).to_plain()
        _add(entry.path, found)
        say(f"{name}, {count} images: " + ", ".join(f"{k} {v:.2%}" for k, v in _accuracies(found).items()))
    _certify(find(name, zoo), data_dir, say)
    return find(name, zoo)


def _certify(entry: Entry, data_dir: str | None, say: Callable[[str], None]) -> None:
    """Add what the test images prove of the promise; on a CPU, where the bits do not depend on a GPU."""
    certificate = None if "certificate" in entry.plain else certify_stored(entry, data_dir=data_dir)
    if certificate is not None:
        plain = {"split": "test", "on": machine(environment()), **certificate.to_plain()}
        write_json(entry.path, {**entry.plain, "certificate": plain})
        say(f"{entry.name}: {certificate.statement()}")


def _accuracies(found: dict[str, Any]) -> dict[str, float]:
    return {"clean": found["clean"]["accuracy"]} | {a["name"]: a["accuracy"]["accuracy"] for a in found["attacks"]}


def _add(path: Path, found: dict[str, Any]) -> None:
    """Add an evaluation to the published numbers of its count of images.

    Clean accuracy and loss stay those of the first evaluation, with its machine beside them; what a later part, which
    may come from elsewhere, adds is its attacks.
    """
    plain = read_json(path)
    by_count = {part["n"]: part for part in plain["published"]}
    part = by_count.setdefault(found["n"], {"n": found["n"], "accuracies": {}})
    on = {"on": f"{machine(environment())}, {found['precision']}"}  # parts may be added elsewhere
    part["accuracies"].setdefault("clean", found["clean"] | on)
    part["accuracies"] |= {
        a["name"]: a["accuracy"] | on | {"seconds": round(a["seconds"], 2)} for a in found["attacks"]
    }
    part.setdefault("nominal_loss", found["nominal_loss"] | on)
    plain["published"] = [by_count[n] for n in sorted(by_count, reverse=True)]
    write_json(path, plain)
