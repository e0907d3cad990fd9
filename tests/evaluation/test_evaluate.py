"""The protocol: eval mode, float32, confirmed predictions, resumable, honest about what it found."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from dale.attacks import Attack, Budget, Hunt, parse
from dale.certificates import clopper_pearson
from dale.data import Split
from dale.errors import CheckpointError, NumericsError, UsageError
from dale.evaluation import Evaluation, evaluate
from dale.evaluation.judge import Expected
from dale.evaluation.sizing import memory_per_example
from dale.perturbations import L2, Linf, Rotation
from dale.random import Key

BALL = Linf(epsilon=0.15)
Victim = tuple[nn.Module, Split]


def quiet(model: nn.Module, data: Split, *args: object, **options: object) -> Evaluation:
    return evaluate(model, data, *args, **{"progress": False, "checks": False, **options})  # type: ignore[arg-type]


def test_counts_intervals_and_the_worst_case(victim: Victim) -> None:
    model, split = victim
    e = quiet(model, split, BALL, ["fgsm", "pgd10", "noise"], rho=0.5)
    x = split.convert(split.images)
    right = model(x).argmax(1) == split.labels
    assert e.clean.correct == int(right.sum())
    assert e.clean.interval == clopper_pearson(e.clean.correct, len(split), 0.05)
    assert e.nominal_loss.mean == pytest.approx(nn.functional.cross_entropy(model(x), split.labels).item(), rel=1e-5)
    assert e.nominal_loss.holds == (e.nominal_loss.mean <= 0.5)
    outcome = [e.examples[name] for name in ("clean", "fgsm", "pgd10", "noise")]
    assert torch.equal(e.examples["worst"], torch.stack(outcome).all(0))
    assert e.worst.correct == int(e.examples["worst"].sum()) <= min(a.accuracy.correct for a in e.attacks)
    for result in e.attacks:
        assert not bool((e.examples[result.name] & ~right).any())
        assert sum(a.correct for a in result.per_class if a is not None) == result.accuracy.correct
    assert e["pgd10"].gradients == 10
    assert 0 < e["pgd10"].gradients_spent <= 10 * int(right.sum())
    assert e["noise"].gradients_spent == 0
    # an attack is worth more than the same amount of noise
    assert e["pgd10"].accuracy.value < e["noise"].accuracy.value < e.clean.value


def test_agrees_with_the_attack_called_by_hand(victim: Victim) -> None:
    model, split = victim
    e = quiet(model, split, BALL, ["fgsm"])
    batch = next(split.batches(len(split)))
    delta = parse("fgsm")(model, batch, BALL, 0)
    fooled = model(batch.images + delta).argmax(1) != batch.labels
    assert int((e.examples["fgsm"] != ~fooled).sum()) <= 1


def test_train_mode_gives_the_same_numbers_and_is_left_as_it_was(victim: Victim) -> None:
    model, split = victim
    before = quiet(model, split, BALL, ["pgd5", "square20"])
    model.train()
    model.dropout.eval()
    try:
        after = quiet(model, split, BALL, ["pgd5", "square20"])
        assert model.training
        assert model.bn1.training
        assert not model.dropout.training
    finally:
        model.eval()
    assert all(torch.equal(before.examples[k], after.examples[k]) for k in before.examples)
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_library_tries_no_algorithms_out_and_is_left_as_it_was(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size that a shrinking batch takes would be tried out anew."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model, split = victim
    seen: list[bool] = []
    watched = model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.benchmark))
    quiet(model, split.first(8), BALL, ["fgsm"])
    watched.remove()
    assert seen
    assert not any(seen)
    assert torch.backends.cudnn.benchmark


def test_half_precision_models_are_judged_in_float32(victim: Victim) -> None:
    model, split = victim
    half = copy.deepcopy(model).bfloat16()
    e = quiet(half, split.first(100), BALL, ["pgd3"])
    same = quiet(copy.deepcopy(half).float(), split.first(100), BALL, ["pgd3"])
    assert torch.equal(e.examples["pgd3"], same.examples["pgd3"])
    assert half.fc.weight.dtype == torch.bfloat16


def test_images_of_another_shape_are_refused_in_one_line(victim: Victim) -> None:
    other = nn.Sequential(nn.Flatten(), nn.Linear(7, 10))
    with pytest.raises(
        UsageError, match=r"does not take images of 1x8x8, which these data have: RuntimeError: mat1 and mat2"
    ):
        quiet(other, victim[1], BALL, ["fgsm"])


class Answers(nn.Module):
    """What a function of a model and images makes of them."""

    def __init__(self, model: nn.Module, answer: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, x: Tensor) -> object:
        return self.answer(self.model, x)


def _wants_more(model: nn.Module, x: Tensor) -> object:
    torch._assert(x.shape[-1] == 224, "an image of 224 pixels, please\nmore about it")
    return model(x)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda model, x: (model(x), x), r"returned a tuple for (1|8) images; expected logits \((1|8), 10\)$"),
        (lambda model, x: {"logits": model(x)}, "returned a dict for"),
        (lambda model, x: model(x)[:, :3], "has 3 outputs for data of 10 classes"),
        (lambda model, x: x.nothing, "does not take images of 1x8x8, which these data have: AttributeError"),
        (
            _wants_more,
            r"does not take images of 1x8x8, .*: AssertionError: an image .*, please \(test_evaluate.py, line",
        ),
    ],
)
def test_what_a_model_or_a_source_cannot_do_is_said_in_one_line_and_at_once(
    victim: Victim, answer: Callable[[nn.Module, Tensor], object], words: str
) -> None:
    model, split = victim[0], victim[1].first(8)
    with pytest.raises(UsageError, match=f"^the model {words}") as told:
        quiet(Answers(model, answer), split, BALL, ["fgsm"])
    assert "\n" not in str(told.value)
    asked: list[Hunt] = []
    with pytest.raises(UsageError, match=f"^transfer:other: the source {words}"):
        quiet(model, split, BALL, [Watched(asked), "transfer:other"], sources={"other": Answers(model, answer)})
    assert not asked


@dataclass(frozen=True, kw_only=False)
class Watched(Attack):
    """An attack that tells whether it was run."""

    asked: list[Hunt] = field(compare=False)

    @property
    def name(self) -> str:
        return "watched"

    def budget(self, num_classes: int) -> Budget:
        return Budget(steps=0)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        self.asked.append(hunt)


def test_a_model_that_writes_into_its_input_gets_the_numbers_of_one_that_does_not(victim: Victim) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).eval()
    images = next(victim[1].batches(60)).images
    plain = Answers(network, lambda model, x: model(x.sub(0.3).div(0.4)))
    inside = Answers(network, lambda model, x: model(x.sub_(0.3).div_(0.4)))
    labels = plain(images).argmax(1)  # type: ignore[attr-defined]
    split = Split.of(images.clone(), labels, 10)  # floats are the images themselves, of which no copy is made
    attacks = ["fgsm", "pgd3", "square20", "transfer:itself"]
    found = [
        quiet(model, split, BALL, attacks, sources={"itself": model}, epsilons=[0.1], checks=True)
        for model in (plain, inside)
    ]
    assert torch.equal(split.images, images)
    assert found[1].clean.value == 1.0
    assert not found[1].notes
    assert found[0].curve == found[1].curve
    assert found[0].alarms == found[1].alarms
    for name, outcome in found[0].examples.items():
        assert torch.equal(outcome, found[1].examples[name]), name
    batch = next(split.batches(60))
    assert torch.equal(*(parse("pgd3")(model, batch, BALL, 0) for model in (plain, inside)))
    assert torch.equal(*(Expected(model, 3)(batch.images) for model in (plain, inside)))
    assert torch.equal(batch.images, images)
    assert memory_per_example(inside, images[:2]) >= 64 * 4  # on a GPU it is asked for the batch size first


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_logits_of_another_precision(victim: Victim, dtype: torch.dtype) -> None:
    model, split = victim[0], victim[1].first(60)
    other = Answers(model, lambda model, x: model(x).to(dtype))
    attacks = ["fgsm", "pgd5", "pgd5-last", "pgd5-kl", "apgd5-ce", "apgd5-t", "fab5-t", "square20", "transfer:it"]
    one, two = (quiet(m, split, BALL, attacks, sources={"it": m}, epsilons=[0.1]) for m in (model, other))
    for name in attacks:
        assert abs(one[name].accuracy.correct - two[name].accuracy.correct) <= 2, name
    batch = next(split.batches(60))
    delta = parse("pgd5")(other, batch, BALL, 0)
    assert delta.dtype == torch.float32
    fallen = (model(batch.images + delta).argmax(1) != batch.labels) & one.examples["clean"]
    assert abs(int(fallen.sum()) - (one.clean.correct - one["pgd5"].accuracy.correct)) <= 2


def test_seeds_are_honoured(victim: Victim) -> None:
    model, split = victim
    state = torch.get_rng_state()
    one, two, other = (quiet(model, split, BALL, ["noise"], seed=s).examples["noise"] for s in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_restarts_only_help(victim: Victim) -> None:
    model, split = victim
    e = quiet(model, split, BALL, ["pgd5", "pgd5x4"])
    assert not bool((e.examples["pgd5x4"] & ~e.examples["pgd5"]).any())
    assert e["pgd5x4"].accuracy.correct < e["pgd5"].accuracy.correct
    assert e["pgd5x4"].gradients_spent < 20 * e.clean.correct  # only what stands is attacked again


class Cheat(Attack):
    """An attack that leaves the set."""

    @property
    def name(self) -> str:
        return "cheat"

    def budget(self, num_classes: int) -> Budget:
        return Budget(steps=1)

    def search(self, hunt: Hunt, number: int, key: Key) -> None:
        hunt.query(1.0 - 2.0 * hunt.x)
        hunt.settle()


def test_what_lies_outside_does_not_count(victim: Victim) -> None:
    e = quiet(*victim, BALL, [Cheat()])
    assert e["cheat"].accuracy.correct == e.clean.correct
    assert "outside" in e.notes[0]


def test_file_round_trip_and_text(victim: Victim, tmp_path: Path) -> None:
    e = quiet(*victim, L2(epsilon=0.5), ["pgd3"], out=tmp_path, epsilons=[0.2, 0.8], checks=True)
    assert Evaluation.load(tmp_path / "evaluation.json") == e
    assert [p.name for p in tmp_path.iterdir()] == ["evaluation.json"]
    plain = json.loads((tmp_path / "evaluation.json").read_text())
    assert plain["attacks"][0]["accuracy"]["lower"] < e["pgd3"].accuracy.value
    assert plain["environment"]["torch"] == torch.__version__
    assert len(plain["alarms"]) == 8
    assert plain["precision"] == "ieee"
    text = str(e)
    for word in ("pgd3", "L2(epsilon=0.5)", "upper bound on the true robust accuracy", "nominal loss", "class", "0.8"):
        assert word in text
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"evaluation\.json"):
        Evaluation.load(tmp_path / "evaluation.json")


def test_curve_falls_and_reaches_the_own_radius(victim: Victim) -> None:
    e = quiet(victim[0], victim[1].first(300), BALL, ["apgd10-t"], epsilons=[0.3, 0.05, 0.15])
    assert [p.epsilon for p in e.curve] == [0.05, 0.15, 0.3]
    counts = [e.clean.correct, *(p.accuracy.correct for p in e.curve)]
    assert counts == sorted(counts, reverse=True)
    assert e.curve[1].accuracy.correct <= e.worst.correct
    assert e.curve[2].accuracy.value < 0.2 < e.curve[0].accuracy.value


def test_saved_examples_fool_the_model(victim: Victim, tmp_path: Path) -> None:
    model, split = victim
    e = quiet(model, split, BALL, ["fgsm", "pgd5"], save_examples=tmp_path / "x.safetensors")
    saved = safetensors.torch.load_file(tmp_path / "x.safetensors")
    fallen = saved["fallen"]
    assert int(fallen.sum()) == e.clean.correct - e.worst.correct
    clean = split.convert(split.images)
    assert (model(saved["images"][fallen]).argmax(1) != split.labels[fallen]).float().mean() > 0.99
    assert torch.equal(saved["images"][~fallen], clean[~fallen])
    assert (saved["images"] - clean).abs().max() <= 0.15 + 1e-6
    assert saved["images"].min() >= 0.0
    assert saved["images"].max() <= 1.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attacks": ["pgd5", "pgd5"]}, "more than once"),
        ({"attacks": "pgd5"}, "list of names"),
        ({"attacks": ["grid"]}, "grid searches transformations"),
        ({"attacks": [], "batch_size": 0}, "batch_size"),
        ({"attacks": [], "rho": -1.0}, "rho"),
        ({"attacks": [], "epsilons": [0.1, -0.1]}, "above 0"),
        ({"attacks": ["transfer:x"]}, "no such source"),
        ({"attacks": [], "seed": 99999999999999999999}, r"seed must be a whole number from 0 to 2\^63 - 1, got 9999"),
        ({"attacks": [], "seed": -1}, "seed must be"),
    ],
)
def test_bad_requests(victim: Victim, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        quiet(*victim, BALL, **options)


def test_bad_models(victim: Victim) -> None:
    split = victim[1].first(10)
    with pytest.raises(UsageError, match=r"^the model has 2 outputs for data of 10"):
        quiet(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), split, BALL, [])
    with pytest.raises(UsageError, match="expected logits"):
        quiet(nn.Conv2d(1, 10, 3), split, BALL, [])
    broken = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.constant_(broken[1].bias, float("nan"))
    with pytest.raises(NumericsError, match="not finite"):
        quiet(broken, split, BALL, [])
    with pytest.raises(UsageError, match="norm ball"):
        quiet(*victim, Rotation(degrees=10.0), [], epsilons=[0.1])


def test_one_example_and_no_attacks(victim: Victim) -> None:
    e = quiet(victim[0], victim[1].first(1), BALL, [])
    assert e.n == 1
    assert e.nominal_loss.standard_error is None
    assert e.worst == e.clean
    assert Evaluation.from_plain(e.to_plain()) == e
