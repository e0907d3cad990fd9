"""Certificates of runs: on the split that nobody touched, and on no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dale
from dale.certificates import certify_nominal
from dale.constraints import Constraint, accuracy_limit, loss_limit
from dale.errors import DataError, UsageError
from dale.losses import CrossEntropy, ErrorProbability
from dale.training import Validation
from dale.training.certification import (
    certify_run,
    certify_stored,
    fingerprint,
    fingerprints,
    image_fingerprint,
    require_same_splits,
)
from dale.training.validation import predict
from dale.zoo import store

SIZES = {"train_size": 96, "validation_size": 40, "certification_size": 60}


def _run(path: Path, data: dale.Dataset, **options: Any) -> dale.Run:
    return dale.fit(
        dale.create_model("convnet", data),
        dale.algorithms.dale(dale.Linf(epsilon=0.1), steps=1, **options),
        data,
        out=path,
        epochs=1,
        progress=False,
        validation=Validation(steps=1, examples=5),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"rho": 0.5},
        {"rho": 12.0},
        {"min_accuracy": 0.6},
        {"rho": 0.5, "by": "class"},
        {"rho": 0.5, "min_accuracy": 0.5},
    ],
)
def test_the_promise_is_what_is_certified(options: dict[str, Any], tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, **options)
    certificate = certify_run(run, data, alpha=0.1)
    logits, labels, _ = predict(run.model, data.certification, 64, torch.device("cpu"))
    expected = certify_nominal(
        CrossEntropy()(logits, None, labels).double().numpy(),
        (logits.argmax(dim=1) != labels).numpy(),
        rho=options.get("rho"),
        min_accuracy=options.get("min_accuracy"),
        alpha=0.1,
        clip=24.0 if options.get("rho") == 12.0 else 4.0,
        groups=labels.numpy() if "by" in options else None,
        method="betting",
    )
    assert certificate is not None
    assert certificate.to_plain() == expected.to_plain()


def test_a_stored_model_is_certified_on_the_test_images(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5)
    entry = store(run, "m", tmp_path / "zoo")
    logits, labels, _ = predict(entry.load(), data.test, 64, torch.device("cpu"))
    expected = certify_nominal(
        CrossEntropy()(logits, None, labels).double().numpy(),
        (logits.argmax(dim=1) != labels).numpy(),
        rho=0.5,
        alpha=0.1,
        clip=4.0,
    )
    found = certify_stored(entry, alpha=0.1)
    assert found is not None
    assert found.to_plain() == expected.to_plain()
    summary = dict(run.summary, splits={"train": "another"})
    with pytest.raises(DataError, match="the train split is not the one"):
        certify_stored(replace(entry, plain=dict(entry.plain, summary=summary)))
    erm = dale.fit(
        dale.create_model("convnet", data), dale.algorithms.erm(), data, out=tmp_path / "erm", epochs=1, progress=False
    )
    assert certify_stored(store(erm, "erm", tmp_path / "zoo")) is None


def test_of_several_promises_the_highest_is_certified_for_every_class(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    promises = (0.99, *(0.05 for _ in range(9)))
    certificate = certify_run(_run(tmp_path / "run", data, min_accuracy=promises, by="class"), data)
    assert certificate is not None
    assert certificate.min_accuracy == pytest.approx(0.99)
    assert certificate.holds is False


def test_a_class_without_a_held_out_example_is_named(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5, by="class")
    run.summary.pop("splits")
    some = replace(data, certification=data.certification.take((data.certification.labels != 3).nonzero()[:, 0]))
    with pytest.raises(UsageError, match=r"no certification example of class \[3\]"):
        certify_run(run, some)


@pytest.mark.parametrize(
    "constraints",
    [
        (loss_limit(1.5), accuracy_limit(0.8, by="class")),
        (loss_limit(1.5), loss_limit(1.0, by="class")),
        (loss_limit(1.5), loss_limit(1.0)),
        (accuracy_limit(0.8), accuracy_limit(0.7)),
    ],
)
def test_limits_that_one_certificate_cannot_speak_of_are_refused(
    constraints: tuple[Constraint, ...], tmp_path: Path
) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5)
    run.objective = replace(run.objective, constraints=constraints)
    with pytest.raises(UsageError, match="one limit on a loss and one on the accuracy, over the same groups"):
        certify_run(run, data)


def test_the_loss_that_is_limited_is_what_is_certified(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5)
    other = ErrorProbability()
    run.objective = replace(run.objective, constraints=(Constraint(loss=other, limit=0.5),))
    certificate = certify_run(run, data)
    assert certificate is not None
    logits, labels, _ = predict(run.model, data.certification, 64, torch.device("cpu"))
    assert certificate.loss.mean == pytest.approx(float(other(logits, None, labels).double().mean()))
    assert certificate.loss.mean < 1.0 < float(CrossEntropy()(logits, None, labels).mean())


def test_a_row_without_a_promise_has_no_certificate(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5)
    run.objective = dale.algorithms.pgd(dale.Linf(epsilon=0.1))
    assert certify_run(run, data) is None


@pytest.mark.parametrize("other", [{"seed": 1}, {"certification_size": 61}, {"train_size": 97}])
def test_other_splits_are_refused(other: dict[str, int], tmp_path: Path) -> None:
    """A run made from Python on another deal of the data: what its folder would load is partly trained on."""
    data = dale.load_dataset("digits", **(SIZES | other))
    run = _run(tmp_path / "run", data, rho=0.5)
    assert certify_run(run, data) is not None
    with pytest.raises(DataError, match=r"is not the one that .* was made with"):
        certify_run(dale.load_run(run.path), dale.load_dataset("digits", **SIZES))


def test_fingerprints() -> None:
    data = dale.load_dataset("digits", **SIZES)
    assert fingerprint(data.train) == fingerprint(dale.load_dataset("digits", **SIZES).train)
    assert len({fingerprint(s) for s in (data.train, data.validation, data.certification, data.test)}) == 4
    assert fingerprint(data.train) == fingerprint(data.train.take(range(len(data.train) - 1, -1, -1)))
    relabelled = replace(data.train, labels=data.train.labels.flip(0))
    assert fingerprint(data.train) != fingerprint(relabelled)
    shuffled = data.train.take(torch.randperm(len(data.train)).tolist())
    turned = replace(data.train, images=data.train.images.flip(2))
    assert image_fingerprint(shuffled) == image_fingerprint(data.train) != image_fingerprint(turned)
    assert fingerprint(turned) == fingerprint(data.train)


def test_other_test_images_do_not_touch_the_certificate(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5)
    replaced = replace(data, test=replace(data.test, images=data.test.images.flip(2)))
    assert certify_run(run, replaced) == certify_run(run, data)
    with pytest.raises(DataError, match=r"the test split is not the one .*: why not"):
        require_same_splits(run.summary["splits"], fingerprints(replaced), ["test"], run.path, "why not")


def test_other_images_under_the_same_numbers_are_refused(tmp_path: Path) -> None:
    data = dale.load_dataset("digits", **SIZES)
    run = _run(tmp_path / "run", data, rho=0.5)
    replaced = replace(data, certification=replace(data.certification, images=data.certification.images.flip(2)))
    with pytest.raises(DataError, match=r"the certification split .* a certificate on it would mean nothing"):
        certify_run(run, replaced)
