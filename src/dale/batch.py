"""A batch: what one step of training, sampling or evaluation sees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Images in [0, 1], their labels, and who they are.

    `index` holds each example's number in its data set: random numbers depend on it and not on the place in the batch.
    `groups` holds each example's group for constraints by group (None where there are none).
    """

    images: Tensor
    labels: Tensor
    index: Tensor
    groups: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, item: slice | Tensor) -> Batch:
        """Select examples: a slice, an index tensor or a mask."""
        groups = None if self.groups is None else self.groups[item]
        return Batch(self.images[item], self.labels[item], self.index[item], groups)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on another device."""
        groups = None if self.groups is None else self.groups.to(device)
        return Batch(self.images.to(device), self.labels.to(device), self.index.to(device), groups)

    @staticmethod
    def of(images: Tensor, labels: Tensor, index: Tensor | None = None, groups: Tensor | None = None) -> Batch:
        """Make a batch of tensors at hand, numbering the examples 0, 1, ... where no numbers are given."""
        if index is None:
            index = torch.arange(len(labels), device=labels.device)
        return Batch(images, labels, index, groups)
