"""Evaluations that survive their process: progress is written after chunks, all of it or nothing.

One safetensors file holds, for each attack, who still stands and how far its rounds have come. It belongs to a
fingerprint of weights, data, set, seed and batch shape, and to the clean logits, which show what of a model is in none
of its tensors (a temperature, a switch): with any other it is not used.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dale.files import write_bytes

_WRITE_EVERY = 2.0  # seconds; a chunk that took less is cheap to repeat
_SAME = 1e-3  # of the largest logit
_WRITE_SHARE = 20.0  # and at least so many times as long as writing took: perturbations to be saved are large


def fingerprint(model: nn.Module, tensors: dict[str, Tensor], plain: Any) -> str:
    """Return a hash of the model's weights and structure, of tensors and of plain values."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(model).encode())
    for name, tensor in (*model.state_dict().items(), *tensors.items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(json.dumps(plain, sort_keys=True).encode())
    return digest.hexdigest()


@dataclass
class Progress:
    """How far one attack has come: who stands, who stood when the round began, and what was spent.

    `blind` marks the examples for which a gradient was not finite.
    """

    standing: Tensor
    began: Tensor
    blind: Tensor
    delta: Tensor | None = None
    round: int = 0
    done: int = 0
    gradients: int = 0
    queries: int = 0
    refuted: int = 0
    outside: int = 0
    seconds: float = 0.0

    @staticmethod
    def fresh(standing: Tensor, delta: Tensor | None = None) -> Progress:
        """Return the progress of an attack that has not begun."""
        return Progress(standing.clone(), standing.clone(), torch.zeros_like(standing), delta)

    def next_round(self) -> None:
        """Begin the next round on those who still stand."""
        self.round, self.done, self.began = self.round + 1, 0, self.standing.clone()


_TENSORS = ("standing", "began", "blind", "delta")


@dataclass
class Ledger:
    """The progress of every attack of an evaluation, in a file (None: in memory alone)."""

    path: Path | None
    fingerprint: str
    logits: Tensor
    attacks: dict[str, Progress] = field(default_factory=dict)
    resumed: bool = False
    written: float = field(default_factory=time.monotonic)
    pause: float = 0.0

    @staticmethod
    def open(path: Path | None, fingerprint: str, logits: Tensor) -> Ledger:
        """Read the progress of this very evaluation, or begin anew."""
        ledger = Ledger(path, fingerprint, logits.detach().cpu())
        if path is None or not path.is_file():
            return ledger
        try:
            with safetensors.safe_open(path, framework="pt", device="cpu") as file:
                meta = json.loads((file.metadata() or {}).get("progress", "{}"))
                if meta.get("fingerprint") != fingerprint or not ledger._is_of(file.get_tensor("logits")):
                    return ledger
                for key, counts in meta["attacks"].items():
                    names = [n for n in _TENSORS if f"{key}/{n}" in set(file.keys())]
                    tensors = {n: file.get_tensor(f"{key}/{n}") for n in names}
                    ledger.attacks[key] = Progress(**tensors, **counts)
        except (safetensors.SafetensorError, OSError, ValueError, TypeError, KeyError):
            # progress is a convenience: what cannot be read is done again
            ledger.attacks = {}
        ledger.resumed = bool(ledger.attacks)
        return ledger

    def _is_of(self, logits: Tensor) -> bool:
        """Whether the clean logits are those of this model, up to the rounding of another number of threads."""
        same = logits.shape == self.logits.shape
        return same and bool((logits - self.logits).abs().max() <= _SAME * self.logits.abs().max())

    def find(self, key: str, device: torch.device) -> Progress | None:
        """Return the progress of an attack, if any."""
        progress = self.attacks.get(key)
        if progress is None:
            return None
        delta = None if progress.delta is None else progress.delta.to(device)
        standing, began, blind = (t.to(device) for t in (progress.standing, progress.began, progress.blind))
        return replace(progress, standing=standing, began=began, blind=blind, delta=delta)

    def note(self, key: str, progress: Progress, *, force: bool = False) -> None:
        """Remember progress, and write it where the last writing is a while ago."""
        self.attacks[key] = progress
        since = time.monotonic() - self.written
        if self.path is None or (not force and since < max(_WRITE_EVERY, self.pause)):
            return
        began = time.monotonic()
        tensors: dict[str, Tensor] = {"logits": self.logits}
        counts: dict[str, dict[str, Any]] = {}
        for name, entry in self.attacks.items():
            counts[name] = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in _TENSORS}
            for part in _TENSORS:
                if (tensor := getattr(entry, part)) is not None:
                    tensors[f"{name}/{part}"] = tensor.detach().cpu().clone()
        meta = {"progress": json.dumps({"fingerprint": self.fingerprint, "attacks": counts})}
        write_bytes(self.path, safetensors.torch.save(tensors, metadata=meta))
        self.written = time.monotonic()
        self.pause = _WRITE_SHARE * (self.written - began)

    def close(self) -> None:
        """Remove the file: the evaluation is complete."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
