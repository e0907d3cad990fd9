"""The hunt: what it remembers, whom it lets go, and gradients that are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dale import random
from dale.attacks import APGD, FAB, PGD, Attack
from dale.attacks.hunt import Hunt
from dale.batch import Batch
from dale.losses import CrossEntropy
from dale.perturbations import L1, L2, Linf


class Rooted(nn.Module):
    """A linear classifier plus a root whose backward pass gives NaN wherever the first pixel is below one half."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.linspace(-1.0, 1.0, 16)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        chosen = flat[:, 0] * (flat[:, 0].detach() > 0.5)
        root = chosen.square().sqrt()  # |chosen|, whose derivative at zero comes out as zero times infinity
        score = flat @ self.weights + 0.01 * root
        return torch.stack([score, -score], dim=1)


@pytest.fixture
def rooted() -> tuple[nn.Module, Batch]:
    model = Rooted().eval()
    images = 0.2 + 0.6 * random.uniform(random.key(1), torch.arange(12), (1, 4, 4))
    images[:6, 0, 0, 0], images[6:, 0, 0, 0] = 0.1, 0.9
    return model, Batch.of(images, model(images).argmax(1))


def test_gradients_that_are_not_finite_are_noted_and_cleaned(rooted: tuple[nn.Module, Batch]) -> None:
    model, batch = rooted
    hunt = Hunt(model, batch, Linf(epsilon=0.1), CrossEntropy(), True)
    _, gradient = hunt.value_and_gradient(hunt.zeros())
    assert hunt.blind.tolist() == [True] * 6 + [False] * 6
    assert gradient.isfinite().all()
    assert (gradient[:6, 0, 0, 0] == 0).all()  # what was NaN shows no way; the other pixels still do
    assert (gradient[:6].flatten(1)[:, 1:7] != 0).all()


@pytest.mark.parametrize("attack", [PGD(steps=4), PGD(steps=4, keep_best=False), APGD(steps=6), FAB(steps=3)], ids=str)
@pytest.mark.parametrize("ball", [Linf(epsilon=0.05), L2(epsilon=0.1), L1(epsilon=0.2)], ids=lambda b: type(b).__name__)
def test_every_gradient_attack_says_where_it_was_blind(
    rooted: tuple[nn.Module, Batch], attack: Attack, ball: Linf | L2 | L1
) -> None:
    model, batch = rooted
    found = attack.prepared(ball).run_round(
        model, batch, ball, 0, random.key(0), clean_logits=model(batch.images).detach()
    )
    assert found.blind.tolist() == [True] * 6 + [False] * 6
    assert found.delta.isfinite().all()


def test_an_attack_moves_the_pixels_it_can_see(rooted: tuple[nn.Module, Batch]) -> None:
    """One pixel without a gradient does not shield the others."""
    model, batch = rooted
    delta = PGD(steps=10, keep_best=False)(model, batch, Linf(epsilon=0.05), 0)
    direction = torch.where(batch.labels == 0, -1.0, 1.0).unsqueeze(1) * model.weights.sign()
    assert torch.allclose(delta.flatten(1)[:, 1:], 0.05 * direction[:, 1:], atol=1e-6)


def test_the_best_is_remembered_and_the_fallen_let_go(victim: tuple[nn.Module, object], batch: Batch) -> None:
    model, ball = victim[0], Linf(epsilon=0.2)
    hunt = Hunt(model, batch, ball, CrossEntropy(), True)
    deltas = [ball.sample(batch.images, random.key(k), batch.index) for k in range(6)]
    margins = torch.stack([_margin(hunt.query(delta), batch.labels) for delta in deltas])
    best, which = margins.max(dim=0)
    assert torch.equal(hunt.margin, best)
    assert torch.equal(hunt.best, torch.stack(deltas)[which, torch.arange(len(batch))])
    assert torch.equal(hunt.fallen, best > 0)
    hunt.fallen[:40] = True
    rest, state = hunt.shed({"index": batch.index})
    assert torch.equal(state["index"], batch.index[~hunt.fallen])
    assert torch.equal(rest.rows, state["index"])
    rest.query(0 * deltas[0][~hunt.fallen])
    rest.settle()
    assert torch.equal(rest.found.margin[:40], best[:40])  # one book for both


def _margin(logits: Tensor, labels: Tensor) -> Tensor:
    true = nn.functional.one_hot(labels, logits.shape[1]).bool()
    return logits.masked_fill(true, -torch.inf).amax(1) - logits[true]


def test_company_fills_up_to_the_grain(victim: tuple[nn.Module, object], batch: Batch) -> None:
    """On an accelerator batch sizes are few: fallen examples fill up the rows of those that stand."""
    hunt = Hunt(victim[0], batch, Linf(epsilon=0.1), CrossEntropy(), True)
    hunt.fallen = torch.arange(64) % 3 != 0  # 22 stand
    standing = (~hunt.fallen).nonzero().squeeze(1)
    kept = hunt._with_company(standing, grain=16)
    assert len(kept) == 32
    assert set(standing.tolist()) <= set(kept.tolist())
    assert kept.tolist() == sorted(kept.tolist())
    assert len(hunt._with_company(standing, grain=256)) == 64  # never more than there are
    assert len(hunt._with_company(standing[:0], grain=16)) == 0
