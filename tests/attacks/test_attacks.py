"""Every attack keeps the contract: in the set, deterministic under a key, whatever the batch, nothing touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale import random
from dale.attacks import (
    APGD,
    FAB,
    PGD,
    Attack,
    Sequence,
    Square,
    TargetedDLR,
    TargetMargin,
    Transfer,
    autoattack,
    parse,
)
from dale.attacks.apgd import checkpoints, windows
from dale.attacks.fab import to_hyperplane
from dale.attacks.square import bump, side_of
from dale.batch import Batch
from dale.components import dump_yaml, load_yaml
from dale.errors import UsageError
from dale.perturbations import L1, L2, Composition, Linf, PerturbationSet, Rotation, Translation

BALLS: dict[str, PerturbationSet] = {"linf": Linf(epsilon=0.15), "l2": L2(epsilon=0.8), "l1": L1(epsilon=2.0)}
TURN = Composition(parts=(Rotation(degrees=25.0), Translation(fraction=0.1)))
NAMES = ("fgsm", "pgd5", "pgd5-last", "pgd3-marginx2", "pgd3-dlr", "pgd3-kl", "apgd10-ce", "apgd10-dlr", "apgd8-t")
BALL_NAMES = ("fab4-t", "square40")
ANY_NAMES = ("noise", "worst-of-5")
CASES = [(n, b) for b in BALLS for n in (*NAMES, *BALL_NAMES, *ANY_NAMES)]
CASES += [(n, "turn") for n in (*NAMES, *ANY_NAMES, "grid3")]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_contract(name: str, where: str, victim: tuple[nn.Module, object], batch: Batch) -> None:
    model, perturbations = victim[0], BALLS.get(where, TURN)
    attack = parse(name)
    model.train()
    model.bn1.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    whole = attack(model, batch, perturbations, 3)
    assert model.training
    assert not model.bn1.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    model.eval()
    assert whole.shape == (len(batch), *perturbations.shape((1, 8, 8)))
    assert perturbations.contains(whole, batch.images).all()
    assert torch.equal(whole, attack(model, batch, perturbations, 3))
    # what one half of the batch gets does not depend on the other, up to the rounding of another batch shape
    half = attack(model, batch[32:], perturbations, 3)
    outcome = [
        model(perturbations.apply(b.images, d)).argmax(1) != b.labels
        for b, d in ((batch[32:], whole[32:]), (batch[32:], half))
    ]
    assert (outcome[0] != outcome[1]).sum() <= 1


@pytest.mark.parametrize("name", [*NAMES, *BALL_NAMES, *ANY_NAMES, "grid", "grid7", "apgd-cex5", "pgd20@0.01-zero"])
def test_names_and_configuration_round_trip(name: str) -> None:
    attack = parse(name)
    assert parse(attack.name) == attack
    assert load_yaml(dump_yaml(attack), Attack) == attack  # type: ignore[type-abstract]


def test_sequence_round_trip() -> None:
    for name in ("autoattack", "autoattack-fast"):
        attack = parse(name)
        assert isinstance(attack, Sequence)
        assert attack.name == name
        assert load_yaml(dump_yaml(attack), Attack) == attack  # type: ignore[type-abstract]
    assert [part.name for part in autoattack().parts] == ["apgd-ce", "apgd-t", "fab-t", "square"]


@pytest.mark.parametrize(
    ("name", "close"), [("pdg20", "pgd20"), ("autoatack", "autoattack"), ("apgd-cd", "apgd-ce"), ("sqare", "square")]
)
def test_unknown_names_get_the_nearest(name: str, close: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {close!r}"):
        parse(name)


def test_what_an_attack_cannot_search_is_refused() -> None:
    for name, where in (("fab-t", TURN), ("square", TURN), ("autoattack", TURN), ("grid", BALLS["linf"])):
        with pytest.raises(UsageError, match="searches"):
            parse(name).supports(where)
    with pytest.raises(UsageError, match="no such source model"):
        Transfer(source="nowhere").prepared(TURN)


def test_standard_numbers() -> None:
    assert APGD(objective="t").prepared(BALLS["linf"]).rounds(10) == 9
    assert APGD(objective="t").prepared(BALLS["l1"]).rounds(10) == 5
    assert APGD(objective="ce").prepared(BALLS["l1"]).rounds(10) == 5
    assert APGD(objective="t").prepared(BALLS["linf"]).rounds(3) == 2
    assert FAB().rounds(2) == 1
    assert autoattack().prepared(BALLS["linf"]).rounds(10) == 1 + 9 + 9 + 1
    budget = autoattack().prepared(BALLS["linf"]).budget(10)
    assert (budget.gradients, budget.queries) == (101 + 909 + 9 * 201, 9 * 100 + 5001)


@pytest.mark.parametrize("num_classes", [2, 3])
def test_few_classes(num_classes: int) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, num_classes)).eval()
        x = torch.rand(20, 1, 4, 4)
    batch = Batch.of(x, model(x).argmax(1))
    short = Sequence(parts=(APGD(steps=5), APGD(objective="t", steps=5), FAB(steps=5), Square(queries=20)), title="s")
    for attack in (short, PGD(objective="dlr", steps=5), APGD(objective="dlr", steps=5)):
        delta = attack(model, batch, Linf(epsilon=0.3), 0)
        assert delta.isfinite().all()
        assert (model(x + delta).argmax(1) != batch.labels).any()


def test_fgsm_and_pgd_by_hand(batch: Batch) -> None:
    """On a linear model the gradient is known: FGSM is the clipped sign, and PGD ends at the same corner."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2, bias=False)).eval()
    right = Batch.of(batch.images, model(batch.images).argmax(1))
    weight = model[1].weight.detach()
    for row, (label, x) in enumerate(zip(right.labels, right.images, strict=True)):
        away = (weight[1 - label] - weight[label]).sign().view(1, 8, 8)
        expected = (x + 0.1 * away).clamp(0, 1) - x
        for name in ("fgsm", "pgd10-last"):
            delta = parse(name)(model, right, Linf(epsilon=0.1), 0)
            assert torch.allclose(delta[row], expected, atol=1e-7)
        if row == 2:
            break


def test_best_iterate_is_never_weaker_than_the_last(victim: tuple[nn.Module, object], batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.2)
    fooled = [
        model(batch.images + parse(name)(model, batch, ball, 0)).argmax(1) != batch.labels
        for name in ("pgd10-last", "pgd10")
    ]
    assert (fooled[1] | ~fooled[0]).all()


def test_saturated_models_keep_their_gradient() -> None:
    """Where the cross-entropy underflows in float32 the attack climbs its logarithm and gets through."""
    weight = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).eval()
    model[1].weight.data = 500.0 * weight
    x = torch.full((1, 1, 1, 2), 0.3)
    centred = nn.Sequential(_Shift(-0.2), model)
    batch = Batch.of(x, torch.tensor([0]))
    delta = parse("pgd10-zero")(centred, batch, Linf(epsilon=0.15), 0)
    assert centred(x + delta).argmax(1).item() == 1


class _Shift(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def test_checkpoints_by_hand() -> None:
    assert windows(100) == (22, 19, 16, 13, 10, 7, 6, 6)
    assert list(checkpoints(100)) == [21, 40, 56, 69, 79, 86, 92, 98]
    assert windows(10) == (2, 1, 1, 1, 1, 1, 1, 1, 1)


def test_targeted_losses_by_hand() -> None:
    clean, labels = torch.tensor([[5.0, 1.0, 3.0, 2.0]]), torch.tensor([0])
    logits = torch.tensor([[4.0, 0.0, 3.0, 1.0]])
    assert TargetMargin(rank=1)(logits, clean, labels).item() == -1.0
    assert TargetMargin(rank=3)(logits, clean, labels).item() == -4.0
    assert TargetedDLR(rank=1)(logits, clean, labels).item() == pytest.approx(-1.0 / (4.0 - 0.5))
    assert TargetedDLR(rank=1)(logits[:, :3], clean[:, :3], labels).item() == pytest.approx(-1.0 / 4.0)
    assert TargetedDLR(rank=1)(logits[:, :2], clean[:, :2], labels).item() == -4.0


def test_hyperplane_projection_by_hand() -> None:
    """w = (1, 1), from (0.5, 0.5) to w . z = 1.8: 0.4 each; from (0.9, 0.5) the first coordinate meets its wall."""
    w, b = torch.ones(2, 2), torch.full((2,), 1.8)
    x = torch.tensor([[0.5, 0.5], [0.9, 0.5]])
    for ball in (Linf(epsilon=1.0), L2(epsilon=1.0)):
        d = to_hyperplane(ball, x, w, b)
        assert torch.allclose(d, torch.tensor([[0.4, 0.4], [0.1, 0.3]]), atol=1e-6)
    steep = torch.tensor([[1.0, 2.0]])
    d = to_hyperplane(L1(epsilon=1.0), torch.tensor([[0.5, 0.5]]), steep, torch.tensor([2.6]))
    assert torch.allclose(d, torch.tensor([[0.1, 0.5]]), atol=1e-6)
    far = to_hyperplane(Linf(epsilon=1.0), x[:1], w[:1], torch.tensor([5.0]))
    assert torch.allclose(far, torch.tensor([[0.5, 0.5]]))


@pytest.mark.parametrize("ball", BALLS.values(), ids=BALLS)
def test_hyperplane_projection_is_the_smallest(ball: PerturbationSet) -> None:
    """Against a fine search along the family of feasible points in the plane."""
    x, w, b = torch.tensor([[0.3, 0.8]]), torch.tensor([[2.0, -1.0]]), torch.tensor([0.5])
    d = to_hyperplane(ball, x, w, b)
    assert torch.allclose((w * (x + d)).sum(1), b, atol=1e-6)
    first = torch.linspace(-0.3, 0.7, 2001)
    second = 2.0 * (x[0, 0] + first) - 0.5 - x[0, 1]
    inside = (second >= -0.8) & (second <= 0.2)
    others = torch.stack([first, second], dim=1)[inside]
    assert ball.norm(d).item() <= ball.norm(others).min().item() + 1e-6


def test_square_schedule_and_patterns() -> None:
    assert [side_of(n, 28, 28) for n in (0, 11, 51, 201, 501, 1001, 2001, 4001)] == [25, 18, 13, 9, 6, 4, 3, 2]
    assert side_of(4001, 8, 8) == 1
    assert [side_of(n, 28, 28, smallest=3) for n in (0, 11, 4001)] == [25, 19, 3]
    for power, order in ((2, 2), (4, 1)):
        pattern = bump(7, power)
        assert torch.linalg.vector_norm(pattern, ord=order).item() == pytest.approx(1.0)
        assert (pattern[:3] > 0).all()
        assert (pattern[3:] < 0).all()


def test_square_improves_with_queries(victim: tuple[nn.Module, object], batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.15)
    counts = []
    for queries in (1, 30, 300):
        delta = Square(queries=queries)(model, batch, ball, 0)
        counts.append(int((model(batch.images + delta).argmax(1) != batch.labels).sum()))
    assert counts[0] <= counts[1] <= counts[2]
    assert counts[0] < counts[2]


def test_transfer(victim: tuple[nn.Module, object], batch: Batch) -> None:
    """From the model to itself a transfer is the attack itself."""
    model, ball = victim[0], Linf(epsilon=0.2)
    attack = Transfer(source="self", attack=PGD(steps=5)).prepared(ball, {"self": model})
    found = attack.run_round(model, batch, ball, 0, random.key(0), clean_logits=model(batch.images))
    assert (found.margin > 0).any()
