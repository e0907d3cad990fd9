"""Certificates for runs and stored models: the promise, checked on a split that neither trained nor selected."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dale.certificates import Method, NominalCertificate, certify_nominal
from dale.constraints import Constraint
from dale.data import Dataset, Split
from dale.errors import DataError, require
from dale.losses import CrossEntropy
from dale.models.stored import Entry
from dale.training.config import RunConfig
from dale.training.runs import Run
from dale.training.validation import predict

ALPHA = 0.05
CLIP = 4.0  # B by default, at least: twice the limit where that is more


def fingerprint(split: Split) -> str:
    """A short text that two splits share exactly when their examples have the same numbers and labels, in any order."""
    total, order = hashlib.blake2b(digest_size=8), split.index.argsort()
    for numbers in (split.index, split.labels):
        total.update(numbers[order].cpu().numpy().tobytes())
    return total.hexdigest()


def image_fingerprint(split: Split) -> str:
    """The same of their images, as they are stored."""
    total = hashlib.blake2b(digest_size=8)
    for rows in torch.split(split.index.argsort(), 4096):
        images = split.images[rows.to(split.images.device)]
        total.update(images.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fingerprints(data: Dataset, parts: Sequence[str] = ("train", "certification", "test")) -> dict[str, str]:
    """What a run remembers of the splits that it must not meet again otherwise."""
    return {
        name: text
        for part in parts
        for name, text in (
            (part, fingerprint(getattr(data, part))),
            (f"{part} images", image_fingerprint(getattr(data, part))),
        )
    }


def require_same_splits(
    recorded: Mapping[str, str], found: Mapping[str, str], parts: Sequence[str], made: object, why: str
) -> None:
    """Refuse data whose `parts` have other fingerprints than a run remembers; one that it does not know passes."""
    for part in parts:
        for name in (part, f"{part} images"):
            if name in recorded and recorded[name] != found[name]:
                raise DataError(
                    f"the {part} split is not the one that {made} was made with (another seed, size or file): {why}"
                )


def _require_untouched(summary: Mapping[str, Any], data: Dataset, made: object) -> None:
    """What is certified on may not have been trained on."""
    parts = ("train", "certification")
    found = fingerprints(data, parts)
    require_same_splits(summary.get("splits", {}), found, parts, made, "a certificate on it would mean nothing")


def certify_run(
    run: Run, data: Dataset, *, alpha: float = ALPHA, clip: float | None = None, method: Method = "betting"
) -> NominalCertificate | None:
    """Certify the nominal loss and accuracy of a run on its certification split; None without a constraint.

    The statement is about min(loss, `clip`), of the loss that the constraint limits; the default clip depends on the
    limits alone, never on the data. At most one limit on a loss and one on the accuracy, over the same groups.
    """
    if not run.objective.constraints:
        return None
    _require_untouched(run.summary, data, run.path)
    return _certified(run.model, run.objective.constraints, data, data.certification, alpha, clip, method)


def certify_stored(
    entry: Entry,
    *,
    alpha: float = ALPHA,
    clip: float | None = None,
    method: Method = "betting",
    data_dir: str | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> NominalCertificate | None:
    """Certify a stored model as `certify_run` does a run, on the test split; None without a constraint.

    The test split trained no weight and selected no checkpoint either, and has many images where a run holds back few.
    """
    config = RunConfig.from_yaml(entry.config, where=str(entry.path), trust=trust)
    constraints = config.build_objective().constraints
    if not constraints:
        return None
    data = config.data.load(data_dir)
    _require_untouched(entry.plain.get("summary", {}), data, entry.path)
    return _certified(entry.load(device, trust=trust), constraints, data, data.test, alpha, clip, method)


def _certified(
    model: nn.Module,
    constraints: Sequence[Constraint],
    data: Dataset,
    split: Split,
    alpha: float,
    clip: float | None,
    method: Method,
) -> NominalCertificate:
    """Certify a model's promise on a split that had no part in making it."""
    on_loss, on_error = _limits(constraints)
    device = next(model.parameters()).device
    logits, labels, groups = predict(model, split, 256, device)
    limited = CrossEntropy() if on_loss is None else on_loss.measured
    losses = limited(logits, logits, labels).double().numpy()
    errors = (logits.argmax(dim=1) != labels).numpy()
    by = constraints[0].by
    member = {"all": None, "class": labels.numpy(), "group": groups.numpy()}[by]
    if member is not None:
        expected = data.num_classes if by == "class" else data.num_groups
        missing = sorted(set(range(expected)) - {int(g) for g in member})
        require(not missing, f"no certification example of {by} {missing}: nothing can be said of it")
    limits = () if on_loss is None else on_loss.limit if isinstance(on_loss.limit, tuple) else (on_loss.limit,)
    return certify_nominal(
        losses,
        errors,
        rho=None if on_loss is None else _by_group(on_loss.limit),
        alpha=alpha,
        clip=max((CLIP, *(2.0 * limit for limit in limits))) if clip is None else clip,
        groups=member,
        min_accuracy=None if on_error is None else _promised(on_error.limit),
        method=method,
    )


def _limits(constraints: Sequence[Constraint]) -> tuple[Constraint | None, Constraint | None]:
    """The limit on a loss and the limit on the error; refused where one certificate cannot speak of all of them."""
    on_loss = [c for c in constraints if not c.on_accuracy]
    on_error = [c for c in constraints if c.on_accuracy]
    require(
        len(on_loss) <= 1 and len(on_error) <= 1 and len({c.by for c in constraints}) == 1,
        "a certificate is about one limit on a loss and one on the accuracy, over the same groups; this run has "
        + ", ".join(f"one on {'the accuracy' if c.on_accuracy else 'a loss'} by {c.by!r}" for c in constraints),
    )
    return next(iter(on_loss), None), next(iter(on_error), None)


def _by_group(limit: float | tuple[float, ...]) -> float | dict[int, float]:
    if isinstance(limit, tuple):
        return limit[0] if len(limit) == 1 else dict(enumerate(limit))
    return limit


def _promised(limit: float | tuple[float, ...]) -> float:
    # of several promises the highest, for every group: what is then proven implies each
    return 1.0 - (min(limit) if isinstance(limit, tuple) else limit)
