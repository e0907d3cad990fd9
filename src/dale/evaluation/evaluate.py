"""`evaluate`: model + data + attacks -> an evaluation that one can trust."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dale import random
from dale.attacks import Attack, parse
from dale.components import to_plain
from dale.data import Dataset, Split
from dale.environment import environment, kept_memory
from dale.errors import require, require_non_negative
from dale.evaluation.alarms import blind_text, raise_alarms
from dale.evaluation.curve import accuracy_curve, check_radii
from dale.evaluation.display import Display
from dale.evaluation.judge import Expected, Judge, asking, check_finite, float32_model, planned_kernels
from dale.evaluation.replica import search_replica
from dale.evaluation.results import Accuracy, AttackResult, Evaluation, Loss
from dale.evaluation.resume import Ledger, Progress, fingerprint
from dale.evaluation.session import Session
from dale.evaluation.sizing import default_batch_size
from dale.files import write_bytes
from dale.modes import evaluating, frozen
from dale.perturbations import PerturbationSet

_PASSES = 8  # of a random model, for its expected prediction
_PROBED = 64  # clean logits that an interrupted evaluation is known again by
_SAME = 1e-5  # of the largest logit: what differs by more between two passes is random, not rounded


def evaluate(
    model: nn.Module,
    data: Split | Dataset,
    perturbations: PerturbationSet,
    attacks: Sequence[str | Attack] = ("fgsm", "pgd20"),
    *,
    batch_size: int | None = None,
    seed: int = 0,
    examples: int | None = None,
    device: torch.device | str | None = None,
    strict: bool = False,
    progress: bool = True,
    out: str | Path | None = None,
    rho: float | None = None,
    save_examples: str | Path | None = None,
    checks: bool = True,
    epsilons: Sequence[float] | None = None,
    sources: Mapping[str, nn.Module] | None = None,
) -> Evaluation:
    """Evaluate any `nn.Module` from [0, 1] images to logits under attacks.

    `data` is a split, or a data set whose test split is meant; `examples` keeps the first so many. The protocol: eval
    mode (every module's own mode is put back), float32 whatever the training precision, the attacks only on examples
    that the model classifies correctly, every perturbation checked to lie in the set and in the image box, and the
    prediction confirmed in strict float32 at one batch shape. On a GPU the search itself may use TF32 unless `strict`.
    Each attack is measured on its own, from all correctly classified examples; the worst case is over all of them.

    `out` is a folder, or a .json file, for the result and for the state from which an interrupted evaluation resumes.
    `rho` is the limit that the nominal loss is compared with. `checks` runs the alarms against false robustness;
    `epsilons` adds the accuracy over these radii; `save_examples` names a .safetensors file for the perturbed images.
    """
    began = time.perf_counter()
    require(0 <= seed < 2**63, f"the seed must be a whole number from 0 to 2^63 - 1, got {seed!r}")
    radii = check_radii(epsilons, perturbations) if epsilons else ()
    require(batch_size is None or batch_size >= 1, f"batch_size must be at least 1, got {batch_size!r}")
    require_non_negative(perturbations, rho=rho)
    split, class_names = (data.test, data.class_names) if isinstance(data, Dataset) else (data, ())
    split = split if examples is None else split.first(examples)
    require(len(split) > 0, "there are no examples to evaluate")
    # with its number, which "cuda" leaves out: tensors name it
    place = _device_of(model) if device is None else torch.empty(0, device=device).device
    others = {name: float32_model(source, place) for name, source in (sources or {}).items()}
    listed = prepare_attacks(attacks, perturbations, others)
    split = split.to(place)
    target = _target(out)

    with ExitStack() as stack:
        judged = float32_model(model, place)
        for context in (evaluating(judged), frozen(judged), planned_kernels(), kept_memory(place)):
            stack.enter_context(context)
        first = split.convert(split.images[:16])
        with asking("the model", first):
            size = min(batch_size or default_batch_size(judged, first), len(split))
        session, notes = _session(judged, split, size, seed, strict)
        _ask_sources(others, first[:1], session.clean_logits.shape[1])
        mark = _mark(session, perturbations, seed, size, others)
        partial = None if target is None else target.with_name(f"{target.stem}.partial.safetensors")
        ledger = Ledger.open(partial, mark, session.clean_logits[:_PROBED])
        shape = perturbations.shape(tuple(split.images.shape[1:]))
        keep = save_examples is not None
        runs: dict[str, Progress] = {}
        for name, attack in listed.items():
            runs[name] = _attacked(session, name, attack, perturbations, ledger, shape if keep else None, progress)
        standing = {name: run.standing for name, run in runs.items()}
        worst = torch.stack([session.correct, *standing.values()]).all(dim=0)
        results = tuple(_result(session, name, attack, runs[name], seed) for name, attack in listed.items())
        random_model = bool(notes)
        outside = sum(run.outside for run in runs.values())
        if outside:
            notes.append(f"{outside} candidate perturbations lay outside the set or the image box and did not count")
        blind = {name: run.blind for name, run in runs.items()}
        if checks and listed:
            alarms = raise_alarms(session, perturbations, listed, standing, blind, random=random_model)
        else:
            alarms = ()
            notes += filter(None, [blind_text(standing, blind)])
        curve = accuracy_curve(session, perturbations, radii, worst) if radii else ()
        if save_examples is not None:
            _save_examples(Path(save_examples), session, perturbations, runs, worst)
        outcomes: dict[str, Tensor] = {"clean": session.correct, **standing, "worst": worst}
        evaluation = Evaluation(
            n=len(split),
            perturbations=to_plain(perturbations),
            clean=_accuracy(session.correct),
            clean_per_class=_per_class(session.correct, split),
            nominal_loss=_nominal(session, rho),
            attacks=results,
            worst=_accuracy(worst),
            worst_per_class=_per_class(worst, split),
            seed=seed,
            batch_size=size,
            seconds=time.perf_counter() - began,
            precision=session.precision,
            alarms=alarms,
            curve=curve,
            notes=tuple(notes),
            class_names=tuple(class_names),
            fingerprint=mark,
            environment=environment() | {"device": str(place)},
            examples={name: outcome.cpu() for name, outcome in outcomes.items()},
        )
    if target is not None:
        evaluation.save(target)
        ledger.close()
    return evaluation


def prepare_attacks(
    attacks: Sequence[str | Attack], perturbations: PerturbationSet, sources: Mapping[str, nn.Module] | None = None
) -> dict[str, Attack]:
    """The attacks by name, ready for the set; raises for what does not fit it, is listed twice or lacks its source."""
    require(not isinstance(attacks, str), f"attacks is a list of names, got the text {attacks!r}")
    listed: dict[str, Attack] = {}
    for attack in map(parse, attacks):
        require(attack.name not in listed, f"the attack {attack.name!r} is listed more than once")
        attack.supports(perturbations)
        listed[attack.name] = attack.prepared(perturbations, sources)
    return listed


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(iter((*model.parameters(), *model.buffers())), None)
    return torch.device("cpu") if tensor is None else tensor.device


def _target(out: str | Path | None) -> Path | None:
    """The JSON file that `out` means."""
    if out is None:
        return None
    path = Path(out).expanduser()
    return path if path.suffix == ".json" else path / "evaluation.json"


def _ask_sources(sources: Mapping[str, nn.Module], image: Tensor, num_outputs: int) -> None:
    """Refuse what a source cannot be asked for now, and not in the middle of the attacks."""
    for name, source in sources.items():
        who = f"transfer:{name}: the source"
        with asking(who, image), evaluating(source):
            Judge(source, 1, num_outputs, who=who).logits(image)


def _session(model: nn.Module, split: Split, size: int, seed: int, strict: bool) -> tuple[Session, list[str]]:
    """Judge the clean images, and prepare the model for the search."""
    notes: list[str] = []
    judge = Judge(model, size, split.num_classes, seed)
    first = split.convert(split.images[:size])
    with asking("the model", first):
        logits = judge.logits(first)
    check_finite(logits)
    again = Judge(model, size, split.num_classes, seed + 1).logits(first)
    precision = "tf32" if split.labels.device.type == "cuda" and not strict else "ieee"
    search: nn.Module = model
    if bool((logits - again).abs().max() > _SAME * logits.abs().max()):
        search = Expected(model, _PASSES)
        judge = Judge(search, size, split.num_classes, seed)
        notes.append(
            f"the model is random: predictions and gradients are averaged over {_PASSES} passes (expectation over its "
            "randomness); another seed gives other numbers"
        )
    else:
        search = search_replica(model, first, logits, precision)
    known = [logits] if judge.model is model else []
    images = (split.convert(split.images[i : i + size]) for i in range(size * len(known), len(split), size))
    clean = torch.cat(known + [judge.logits(part) for part in images])
    check_finite(clean)
    correct = clean.argmax(dim=1) == split.labels
    session = Session(search, judge, split, clean, correct, random.key(seed).fold("evaluation"), precision)
    return session, notes


def _mark(
    session: Session, perturbations: PerturbationSet, seed: int, size: int, sources: Mapping[str, nn.Module]
) -> str:
    """What tells this evaluation from every other, but for its attacks."""
    split = session.split
    plain = {
        "set": to_plain(perturbations),
        "seed": seed,
        "batch": size,
        "precision": session.precision,
        "sources": {name: fingerprint(source, {}, None) for name, source in sources.items()},
        "dale": environment()["dale"],
    }
    tensors = {"images": split.images, "labels": split.labels, "index": split.index}
    return fingerprint(session.judge.model, tensors, plain)


def _attacked(
    session: Session,
    name: str,
    attack: Attack,
    perturbations: PerturbationSet,
    ledger: Ledger,
    shape: tuple[int, ...] | None,
    show: bool,
) -> Progress:
    """Run an attack, or what is left of it, under a progress bar with the running accuracy."""
    key = f"{name} {hashlib.blake2b(json.dumps(to_plain(attack)).encode(), digest_size=4).hexdigest()}"
    progress = ledger.find(key, session.device)
    if progress is None or (shape is not None and progress.delta is None):
        delta = None if shape is None else torch.zeros((len(session.correct), *shape), device=session.device)
        progress = Progress.fresh(session.correct, delta)
    rounds, total = attack.rounds(session.clean_logits.shape[1]), len(session.correct)
    with Display(name, int(session.correct.sum()) * rounds, show) as display:

        def report(progress: Progress, count: int, title: str) -> None:
            ledger.note(key, progress)
            if show:
                standing = int(progress.standing.sum())
                left = standing * (rounds - progress.round - 1) + int(progress.began.sum()) - progress.done
                display.update(title, count, left, standing / total)

        session.run(attack, perturbations, progress, report)
    ledger.note(key, progress, force=True)
    return progress


def _save_examples(
    path: Path, session: Session, perturbations: PerturbationSet, runs: Mapping[str, Progress], worst: Tensor
) -> None:
    """Write the images as they were judged: perturbed by the first attack that fooled the model, else clean."""
    split = session.split
    images = split.convert(split.images).clone()
    left = session.correct & ~worst
    for run in runs.values():
        assert run.delta is not None
        fallen = (left & ~run.standing).nonzero().squeeze(1)
        if len(fallen) > 0:
            images[fallen] = session.judge.images(images[fallen], run.delta[fallen], perturbations)
            left = left.index_fill(0, fallen, False)
    tensors = {
        "images": images,
        "labels": split.labels,
        "index": split.index,
        "fallen": session.correct & ~worst,
        "correct": session.correct,
    }
    write_bytes(path, safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}))


def _result(session: Session, name: str, attack: Attack, run: Progress, seed: int) -> AttackResult:
    budget = attack.budget(session.clean_logits.shape[1])
    return AttackResult(
        name=name,
        accuracy=_accuracy(run.standing),
        per_class=_per_class(run.standing, session.split),
        **dataclasses.asdict(budget),
        gradients_spent=run.gradients,
        queries_spent=run.queries,
        seconds=run.seconds,
        seed=seed,
        attack=to_plain(attack),
        white_box=attack.white_box,
        refuted=run.refuted,
        blind=int(run.blind.sum()),
    )


def _accuracy(correct: Tensor) -> Accuracy:
    return Accuracy(int(correct.sum()), len(correct))


def _per_class(correct: Tensor, split: Split) -> tuple[Accuracy | None, ...]:
    total = torch.bincount(split.labels, minlength=split.num_classes).tolist()
    right = torch.bincount(split.labels[correct], minlength=split.num_classes).tolist()
    return tuple(Accuracy(k, n) if n else None for k, n in zip(right, total, strict=True))


def _nominal(session: Session, rho: float | None) -> Loss:
    """The mean cross-entropy on clean images and its standard error."""
    values = F.cross_entropy(session.clean_logits.double(), session.split.labels, reduction="none")
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    return Loss(float(values.mean()), error, rho)
