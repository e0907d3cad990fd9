"""Where a chain that climbs KL starts: python benchmarks/start.py [--model zoo:NAME] [--examples 200] [--seeds 0 1 2]

The training attack of `dale` on CIFAR-10, ten steps of 2/255, against a stored model, on the first test images: from a
random start beside the image, from one `away` from the label, and, to compare, climbing cross-entropy. What counts: the
divergence that the chain reached, which is what it climbs; the accuracy that is left; and the share of images of whose
prediction the model is surer than before. Needs CIFAR-10 ($DALE_DATA) and the checkout's zoo; minutes on two cores.

The numbers go into results/start-NAME.json, with a digest of the weights; a file with those of other weights is left
alone. results/start.json, the table in the theory, is of the run *best*, whose weights `zoo/` holds no more.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dale import load_dataset, load_model, random
from dale.batch import Batch
from dale.environment import environment, no_denormals
from dale.files import read_json, write_json
from dale.folding import Replica, replicate
from dale.losses import KL, CrossEntropy, Loss
from dale.modes import frozen
from dale.perturbations import Linf
from dale.samplers import Chain, langevin

MODEL = "zoo:cifar10-resnet18-dale-base"
RESULTS = Path(__file__).parent / "results"
CHAIN = langevin(10, 2 / 255)
VARIANTS: dict[str, tuple[Chain, Loss]] = {
    "KL, gaussian start": (CHAIN, KL()),
    "KL, uniform start": (replace(CHAIN, start="uniform"), KL()),
    "KL, gaussian start, 20 steps": (CHAIN.with_steps(20), KL()),
    "KL, started away": (replace(CHAIN, start="away"), KL()),
    "cross-entropy, gaussian start": (CHAIN, CrossEntropy()),
}


def figures(model: Replica, batch: Batch, delta: Tensor) -> dict[str, float]:
    """What a perturbation of every image did to the model's predictions."""
    with torch.no_grad():
        before, after = (model(images).log_softmax(1) for images in (batch.images, batch.images + delta))
    predicted = before.argmax(1, keepdim=True)
    return {
        "divergence": (before.exp() * (before - after)).sum(1).mean().item(),
        "accuracy": (after.argmax(1) == batch.labels).double().mean().item(),
        "surer": (after.gather(1, predicted) > before.gather(1, predicted)).double().mean().item(),
    }


def digest(model: nn.Module) -> str:
    """A short text that two models share exactly when their weights are the same."""
    total = hashlib.blake2b(digest_size=8)
    for name, value in sorted(model.state_dict().items()):
        total.update(name.encode() + value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def place_for(model: str, weights: str, out: Path | None) -> Path:
    """Where the numbers of a model go; refused where those of other weights are."""
    path = out or RESULTS / f"start-{model.removeprefix('zoo:').rstrip('/').rpartition('/')[2]}.json"
    if path.is_file() and (found := read_json(path).get("weights")) != weights:
        raise SystemExit(f"{path} has the numbers of other weights ({found}, not {weights}): choose another --out")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = load_model(args.model)
    weights = digest(model)
    out = place_for(args.model, weights, args.out)
    replica = replicate(model, channels_last=True)
    assert isinstance(replica, Replica)
    split = load_dataset("cifar10").test.first(args.examples)
    batch = Batch.of(split.images.float() / 255.0, split.labels)
    ball, found = Linf(epsilon=8 / 255), {}
    with no_denormals(), frozen(model):
        clean = figures(replica, batch, torch.zeros_like(batch.images))["accuracy"]
        for name, (chain, loss) in VARIANTS.items():
            runs = [
                figures(replica, batch, chain(replica, batch, ball, loss, key=random.key(seed))[0])
                for seed in args.seeds
            ]
            found[name] = {key: _over([run[key] for run in runs]) for key in runs[0]}
            print(f"{name:32s}" + "  ".join(f"{k} {v['mean']:.3f}" for k, v in found[name].items()), flush=True)
            about: dict[str, Any] = {"model": args.model, "weights": weights, "n": args.examples, "seeds": args.seeds}
            write_json(out, {"environment": environment(), **about, "clean_accuracy": clean, "variants": found})


def _over(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "smallest": min(values), "largest": max(values)}


if __name__ == "__main__":
    main()
