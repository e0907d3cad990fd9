"""Store a run's weights in the zoo, and publish what the stored weights score: loaded back, in float32."""

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
    run: Path,
    name: str,
    zoo: Path,
    *,
    device: str | None = None,
    data_dir: str | None = None,
    parts: Sequence[Part] | None = None,
    say: Callable[[str], None] = print,
) -> Entry:
    """Store the weights of a run as `name`, then evaluate what was stored, part by part; an interrupted one continues.

    The state of an evaluation lies in the run folder, its numbers in the zoo as soon as they are there.
    """
    import torch

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_run(run, device="cpu")
    if not (zoo / f"{name}.json").is_file() or find(name, zoo).plain["config"] != loaded.config.to_yaml():
        store(loaded, name, zoo)
    entry = find(name, zoo)
    model, data = entry.load(place), load_dataset(entry.dataset, data_dir=data_dir)
    for examples, attacks, strict in parts or parts_of(entry.dataset):
        count = min(examples or len(data.test), len(data.test))
        folder = run / "zoo" / f"{count}-{attacks[0]}"
        found = read_json(folder / "evaluation.json") if (folder / "evaluation.json").is_file() else None
        if found is None:
            found = evaluate(
                model,
                data,
                entry.perturbations(),
                attacks,
                examples=count,
                rho=entry.rho,
                out=folder,
                checks=False,
                strict=strict,
            ).to_plain()
        _add(entry.path, found)
        say(f"{name}, {count} images: " + ", ".join(f"{k} {v:.2%}" for k, v in _accuracies(found).items()))
    return find(name, zoo)


def _accuracies(found: dict[str, Any]) -> dict[str, float]:
    return {"clean": found["clean"]["accuracy"]} | {a["name"]: a["accuracy"]["accuracy"] for a in found["attacks"]}


def _add(path: Path, found: dict[str, Any]) -> None:
    """Add an evaluation to the published numbers of its count of images."""
    plain = read_json(path)
    by_count = {part["n"]: part for part in plain["published"]}
    part = by_count.setdefault(found["n"], {"n": found["n"], "accuracies": {}})
    on = {"on": f"{machine(environment())}, {found['precision']}"}  # parts may be added elsewhere
    part["accuracies"] |= {"clean": found["clean"] | on} | {a["name"]: a["accuracy"] | on for a in found["attacks"]}
    part["nominal_loss"] = found["nominal_loss"]
    plain["published"] = [by_count[n] for n in sorted(by_count, reverse=True)]
    write_json(path, plain)
