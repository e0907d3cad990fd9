"""What validation measures, how limits are tightened by it, and how it becomes a candidate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import dale
from dale.constraints import Constraint, accuracy_limit, loss_limit
from dale.errors import UsageError
from dale.losses import CrossEntropy
from dale.objectives import Objective
from dale.training import Validation
from dale.training.validation import Measure, Validated, measure, robust_accuracy, tighten, validate


def _logits() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 2.0 * torch.randn(40, 4, generator=generator)
    labels = torch.randint(0, 3, (40,), generator=generator)  # class 3 is absent
    groups = torch.randint(0, 2, (40,), generator=generator)
    return logits, labels, groups


def test_means_and_standard_errors_against_plain_lines() -> None:
    logits, labels, groups = _logits()
    losses = CrossEntropy()(logits, None, labels).double()
    seen = measure(loss_limit(0.5), 1, logits, labels, groups)
    assert seen.mean.item() == pytest.approx(losses.mean().item(), rel=1e-12)
    assert seen.error.item() == pytest.approx(losses.std().item() / math.sqrt(40), rel=1e-12)
    assert seen.members.tolist() == [40.0]


@pytest.mark.parametrize(("by", "count"), [("class", 4), ("group", 2)])
def test_per_class_and_per_group(by: str, count: int) -> None:
    logits, labels, groups = _logits()
    member = labels if by == "class" else groups
    seen = measure(accuracy_limit(0.8, by=by), count, logits, labels, groups)
    wrong = (logits.argmax(dim=1) != labels).double()
    for g in range(count):
        own = wrong[member == g]
        assert seen.members[g] == len(own)
        if len(own) == 0:
            assert seen.mean[g].isnan()
            continue
        assert seen.mean[g].item() == pytest.approx(own.mean().item(), rel=1e-12)
        assert seen.error[g].item() == pytest.approx(own.std().item() / math.sqrt(len(own)), rel=1e-12)


def _objective(*constraints: Constraint) -> Objective:
    return Objective(constraints=constraints)


def _validated(
    means: list[float], errors: list[float], *, robust: float = 0.5, members: list[int] | None = None
) -> Validated:
    count = torch.ones(len(means)) if members is None else torch.tensor(members)
    seen = Measure(torch.tensor(means).double(), torch.tensor(errors).double(), count)
    return Validated(0.9, 0.1, robust, (seen,), (seen,))


def test_a_candidate_is_feasible_within_its_standard_error() -> None:
    objective = _objective(loss_limit(0.1))
    assert _validated([0.12], [0.03]).candidate(1, objective).feasible
    over = _validated([0.15], [0.03]).candidate(2, objective)
    assert not over.feasible
    assert over.violation == pytest.approx(0.02, abs=1e-7)


def test_the_worst_group_decides_and_absent_groups_do_not() -> None:
    objective = _objective(loss_limit((0.1, 0.2, 0.1), by="class"))
    seen = _validated([0.05, 0.5, math.nan], [0.0, 0.1, math.nan], members=[3, 2, 0])
    assert seen.candidate(1, objective).violation == pytest.approx(0.2, abs=1e-7)


def test_a_measure_that_is_no_number_is_the_largest_violation() -> None:
    """Of a group that has examples: a diverged loss must not pass for a promise that is kept."""
    objective = _objective(loss_limit((0.1, 0.2), by="class"))
    broken = _validated([0.05, math.nan], [0.0, math.nan], members=[3, 2]).candidate(1, objective)
    assert 1e200 < broken.violation < math.inf  # which JSON can hold
    assert not broken.feasible


def test_the_score_is_robust_accuracy_or_clean_where_the_row_is_not_robust() -> None:
    ball = dale.Linf(epsilon=0.1)
    seen = Validated(0.9, 0.1, 0.4, (), ())
    assert seen.candidate(1, dale.algorithms.pgd(ball)).score == 0.4
    assert seen.candidate(1, dale.algorithms.erm(ball)).score == 0.9
    assert seen.candidate(1, dale.algorithms.erm(ball)).feasible


def test_log_lines_hold_null_for_groups_that_are_absent() -> None:
    plain = _validated([0.1, math.nan], [0.0, math.nan]).to_plain()
    assert plain["constraints"][0]["measure"] == [pytest.approx(0.1), None]


class _Threshold(nn.Module):
    """Class 1 where the mean pixel is above a half; its margin is known, so is what an attack can do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        score = self.scale * (x.flatten(1).mean(dim=1) - 0.5)
        return torch.stack([-score, score], dim=1)


def test_robust_accuracy_of_a_model_whose_margins_are_known() -> None:
    levels = torch.tensor([0.05, 0.35, 0.45, 0.55, 0.65, 0.95, 0.65])
    images = levels.reshape(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 0])  # the last one is wrong already
    split = dale.Split.of(images, labels, 2)
    objective = dale.algorithms.pgd(dale.Linf(epsilon=0.1))
    model = _Threshold().train()
    found = robust_accuracy(model, split, objective, Validation(steps=5).attack(), dale.key(0), 3, torch.device("cpu"))
    assert found == pytest.approx(4 / 7)  # 0.45 and 0.55 fall, 0.65 labelled 0 was never right
    assert model.training


def test_validate_measures_the_whole_held_out_split_and_attacks_a_part() -> None:
    data = dale.load_dataset("digits", train_size=64, validation_size=50)
    model = dale.create_model("convnet", data).train()
    objective = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5)
    duals = objective.initial_duals(10)
    seen = validate(
        model, objective, duals, data.train, data.validation, Validation(steps=1, examples=7),
        key=dale.key(0), batch_size=16,
    )  # fmt: skip
    with torch.no_grad():
        model.eval()
        logits = {
            name: torch.cat([model(batch.images) for batch in split.batches(16)])
            for name, split in (("held", data.validation), ("train", data.train))
        }
    loss = CrossEntropy()
    assert seen.nominal == pytest.approx(loss(logits["held"], None, data.validation.labels).double().mean().item())
    assert seen.measures[0].mean.item() == seen.nominal
    trained = loss(logits["train"], None, data.train.labels).double().mean().item()
    assert seen.trained[0].mean.item() == pytest.approx(trained)
    assert seen.to_plain()["constraints"][0]["train"] == seen.trained[0].mean.tolist()
    plain = dale.algorithms.dale(dale.Linf(epsilon=0.1), rho=0.5, tighten=False)
    unseen = validate(
        model, plain, duals, data.train, data.validation, Validation(steps=1, examples=7),
        key=dale.key(0), batch_size=16,
    )  # fmt: skip
    assert "train" not in unseen.to_plain()["constraints"][0]  # what was not measured is not said
    assert seen.clean == (logits["held"].argmax(dim=1) == data.validation.labels).double().mean().item()
    assert (seen.robust * 7) == pytest.approx(round(seen.robust * 7))


def test_the_number_of_attacked_images() -> None:
    data = dale.load_dataset("digits", train_size=64, validation_size=50)
    assert Validation(examples=7).count(data.train, data.validation) == 7
    assert Validation().count(data.train, data.validation) == 50  # at least 200, and no more than there are


def test_tightening_by_the_gap_at_most_half_the_limit_and_never_widening() -> None:
    objective = _objective(loss_limit(0.4, by="class"))
    duals = objective.initial_duals(4)

    def measured(values: list[float]) -> Measure:
        return Measure(torch.tensor(values).double(), torch.zeros(4), torch.ones(4))

    seen = Validated(0.9, 0.1, 0.5, (measured([0.30, 0.9, 0.1, math.nan]),), (measured([0.25, 0.1, 0.2, 0.1]),))
    margin = tighten(objective, duals, seen)[0].margin
    torch.testing.assert_close(margin, torch.tensor([0.05, 0.2, 0.0, 0.0]))
    loose = _objective(loss_limit(0.4, by="class", tighten=False))
    assert tighten(loose, duals, seen)[0].margin.tolist() == [0.0] * 4


def test_values_out_of_range_are_refused() -> None:
    for wrong in ({"every": 0}, {"steps": 0}, {"examples": 0}):
        with pytest.raises(UsageError, match="at least 1"):
            Validation(**wrong)
