"""Alarms against false robustness: what gradient masking and weak attacks look like, checked on a few examples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from dale.attacks import PGD, Attack, Hunt, RandomSearch, Square
from dale.errors import told_of
from dale.evaluation.judge import quiet_randomness
from dale.evaluation.results import Alarm
from dale.evaluation.resume import Progress
from dale.evaluation.session import Session
from dale.losses import CrossEntropy
from dale.perturbations import L1, L2, Linf, PerturbationSet

_EXAMPLES = {"cpu": 64, "cuda": 512}
_STEPS, _MORE_STEPS = 20, 100
_QUERIES = 200
_DRAWS = 10
_COMPANY = 4  # images that are looked at in other batches
_GAP = 1e-2  # of the largest logit: half precision inside a model rounds by less, statistics of a batch move by more


class _Left(Protocol):
    """Run an attack on some examples; returns who still stands."""

    def __call__(self, attack: Attack, ball: PerturbationSet = ..., among: Tensor = ...) -> Tensor: ...


def raise_alarms(
    session: Session,
    perturbations: PerturbationSet,
    attacks: Mapping[str, Attack],
    standing: Mapping[str, Tensor],
    blind: Mapping[str, Tensor],
    *,
    random: bool,
) -> tuple[Alarm, ...]:
    """Run every check on the first correctly classified examples, and compare the attacks that were run on all."""
    places = session.correct.nonzero().squeeze(1)[: _EXAMPLES.get(session.device.type, 64)]
    alarms = [_deterministic(random), _company(session, random), _finite(standing, blind)]
    if len(places) == 0:
        return tuple(alarms)
    part = torch.zeros_like(session.correct).index_fill(0, places, True)

    def left(attack: Attack, ball: PerturbationSet = perturbations, among: Tensor = part) -> Tensor:
        """Who still stands after an attack."""
        return session.run(attack.prepared(ball), ball, Progress.fresh(among)).standing

    short, long = left(PGD(steps=_STEPS)), left(PGD(steps=_MORE_STEPS))
    alarms += [
        _gradients(session, perturbations, places),
        _steps(short, long, len(places)),
        _noise(left(RandomSearch(draws=_DRAWS)), short, len(places)),
        _black_box(left, perturbations, part & long, attacks, standing),
    ]
    if (large := _large(perturbations, tuple(session.split.images.shape[1:]))) is not None:
        alarms.append(_large_epsilon(left(PGD(steps=50, objective="margin"), large), large, len(places)))
    return tuple(alarms)


def _deterministic(random: bool) -> Alarm:
    message = (
        "the model gives other logits for the same image each time; the numbers are those of its expected prediction, "
        "and an attack that averages over more passes may be stronger"
        if random
        else "the model gives the same logits for the same image"
    )
    return Alarm("deterministic", not random, message)


def _company(session: Session, random: bool) -> Alarm:
    """An image's logits are its own: a batch made up otherwise, of one image or in turned order, gives the same."""
    name, images = "batch", session.split.convert(session.split.images[:_COMPANY])
    if random:
        return Alarm(name, True, "not compared: the model is random, and its logits differ in any batch")
    expected = session.clean_logits[: len(images)]
    alone, together = (replace(session.judge, batch_size=size) for size in (1, len(images)))
    try:
        others = alone.logits(images), together.logits(images.flip(0)).flip(0)
    except Exception as error:  # a model of the user's may raise anything
        return Alarm(name, False, f"the model refuses a batch of one image or of {len(images)}: {told_of(error)}")
    gap = float((torch.stack(others) - expected).abs().max())
    if not gap <= _GAP * float(expected.abs().max()):
        text = (
            f"an image's logits move by {gap:.3g} with the images beside it in the batch: accuracies hold for these "
            "batches alone, and another batch size gives others; look for BatchNorm without running statistics"
        )
        return Alarm(name, False, text)
    return Alarm(name, True, "an image's logits do not depend on the images beside it in the batch")


def _finite(standing: Mapping[str, Tensor], blind: Mapping[str, Tensor]) -> Alarm:
    """Gradients that are not finite show no way: the example stands because it was not attacked."""
    text = blind_text(standing, blind)
    return Alarm("finite gradients", not text, text or "every gradient was finite where an example stands")


def blind_text(standing: Mapping[str, Tensor], blind: Mapping[str, Tensor]) -> str:
    """Say for how many examples that stand gradients were not finite, by attack; empty where for none."""
    counts = {name: int((standing[name] & where).sum()) for name, where in blind.items()}
    told = ", ".join(f"{count} under {name}" for name, count in counts.items() if count)
    if not told:
        return ""
    return (
        f"gradients that are not finite were met for examples that stand ({told}): there the attack was blind, and the "
        "accuracy is too high by up to as many; use square, or mend what gives NaN or infinity in the backward pass"
    )


def _gradients(session: Session, perturbations: PerturbationSet, places: Tensor) -> Alarm:
    """The log-loss has a gradient at random points of the set: log, so that confidence alone does not make it zero."""
    batch = session.batch(places[: session.batch_size])
    hunt = Hunt(session.search_model, batch, perturbations, CrossEntropy(), True, keep_best=False)
    start = perturbations.sample(hunt.x, session.key.fold("alarms"), hunt.index)
    with quiet_randomness(session.device, session.judge.seed):
        _, gradient = hunt.value_and_gradient(start)
    bad = int((hunt.blind | (gradient.flatten(1) == 0).all(dim=1)).sum())
    message = f"{bad} of {len(batch)} examples have a gradient that is zero or not finite"
    if 10 * bad > len(batch):
        message += "; attacks that follow gradients are blind here, and their accuracies mean little"
        return Alarm("gradients", False, message)
    return Alarm("gradients", True, message)


def _steps(short: Tensor, long: Tensor, count: int) -> Alarm:
    a, b = int(short.sum()), int(long.sum())
    message = f"{a} of {count} examples stand after {_STEPS} steps of PGD, {b} after {_MORE_STEPS}"
    if a - b > max(2, 0.05 * count):
        return Alarm("more steps", False, f"{message}: {_STEPS} steps have not converged; use more steps or autoattack")
    return Alarm("more steps", True, message)


def _noise(noise: Tensor, gradient: Tensor, count: int) -> Alarm:
    """Examples that fall to noise although they stand against the gradient; many fall to both at a large radius."""
    alone = int((gradient & ~noise).sum())
    message = f"{alone} of {count} examples stand against the gradient and fall to the worst of {_DRAWS} random draws"
    if alone > max(1, 0.02 * count):
        return Alarm("noise", False, f"{message}: the gradient does not show the way (masking, or many local maxima)")
    return Alarm("noise", True, message)


def _black_box(
    left: _Left,
    perturbations: PerturbationSet,
    part: Tensor,
    attacks: Mapping[str, Attack],
    standing: Mapping[str, Tensor],
) -> Alarm:
    """Examples that fall to queries alone although they stand against every gradient attack."""
    white = [standing[name] for name, attack in attacks.items() if attack.white_box]
    black = [standing[name] for name, attack in attacks.items() if not attack.white_box]
    after_white = torch.stack([part, *white]).all(dim=0)
    is_ball = isinstance(perturbations, (Linf, L2, L1))
    attack: Attack = Square(queries=_QUERIES) if is_ball else RandomSearch(draws=_QUERIES)
    after_black = left(attack, among=after_white)
    count, total = int((after_white & ~after_black).sum()), int(after_white.sum())
    if white and black:
        stood = torch.stack(white).all(dim=0)
        count += int((stood & ~torch.stack(black).all(dim=0) & ~part).sum())
        total += int((stood & ~part).sum())
    message = f"{count} of {total} examples that stand against gradients fall to queries without them"
    if count > max(1, 0.02 * total):
        text = f"{message}: the gradient attacks are too weak or misled (masking); trust the worst case, not them"
        return Alarm("black box", False, text)
    return Alarm("black box", True, message)


def _large(perturbations: PerturbationSet, shape: tuple[int, ...]) -> PerturbationSet | None:
    """The ball in which every image can become plain grey: no classifier can be right on more than one class there."""
    size = math.prod(shape)
    radii = {Linf: 0.5, L2: 0.5 * math.sqrt(size), L1: 0.5 * size}
    if isinstance(perturbations, (Linf, L2, L1)):
        radius = radii[type(perturbations)]
        return replace(perturbations, epsilon=max(radius, perturbations.epsilon))
    return None


def _large_epsilon(standing: Tensor, ball: PerturbationSet, count: int) -> Alarm:
    stood = int(standing.sum())
    message = f"{stood} of {count} examples stand at radius {ball.radius:.3g}, where every image can be turned grey"
    if stood > max(1, 0.1 * count):
        text = f"{message}: no model is robust there, so the attack fails and not the model holds (masking)"
        return Alarm("large epsilon", False, text)
    return Alarm("large epsilon", True, message)
