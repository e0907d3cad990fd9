"""Certificates for a run: its promise, checked on the split that nobody touched."""

from __future__ import annotations

from dale.certificates import Method, NominalCertificate, certify_nominal
from dale.data import Dataset
from dale.losses import CrossEntropy
from dale.training.runs import Run
from dale.training.validation import predict

ALPHA, CLIP = 0.05, 10.0


def certify_run(
    run: Run, data: Dataset, *, alpha: float = ALPHA, clip: float = CLIP, method: Method = "betting"
) -> NominalCertificate | None:
    """Certify the nominal loss and accuracy of a run on its certification split; None without a constraint."""
    if not run.objective.constraints:
        return None
    device = next(run.model.parameters()).device
    logits, labels, groups = predict(run.model, data.certification, 256, device)
    losses = CrossEntropy()(logits, None, labels).double().numpy()
    errors = (logits.argmax(dim=1) != labels).numpy()
    on_loss = next((c for c in run.objective.constraints if not c.on_accuracy), None)
    on_error = next((c for c in run.objective.constraints if c.on_accuracy), None)
    by = (on_loss or on_error or run.objective.constraints[0]).by
    member = {"all": None, "class": labels.numpy(), "group": groups.numpy()}[by]
    rho = None if on_loss is None else _by_group(on_loss.limit)
    accuracy = None if on_error is None else _promised(on_error.limit)
    return certify_nominal(
        losses, errors, rho=rho, alpha=alpha, clip=clip, groups=member, min_accuracy=accuracy, method=method
    )


def _by_group(limit: float | tuple[float, ...]) -> float | dict[int, float]:
    if isinstance(limit, tuple):
        return limit[0] if len(limit) == 1 else dict(enumerate(limit))
    return limit


def _promised(limit: float | tuple[float, ...]) -> float:
    return 1.0 - (max(limit) if isinstance(limit, tuple) else limit)
