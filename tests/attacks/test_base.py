"""Every attack keeps the contract: in the set, deterministic under a key, whatever the batch, nothing touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dale.attacks import APGD, FAB, PGD, Sequence, Square, parse
from dale.batch import Batch
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


def test_what_an_attack_cannot_search_is_refused() -> None:
    for name, where in (("fab-t", TURN), ("square", TURN), ("autoattack", TURN), ("grid", BALLS["linf"])):
        with pytest.raises(UsageError, match="searches"):
            parse(name).supports(where)


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
