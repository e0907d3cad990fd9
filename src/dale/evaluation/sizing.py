"""How many examples a batch holds: as many as keep the device busy and leave it memory to spare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CPU = 256
_LARGEST, _SMALLEST = 2048, 16
_PROBE = 4  # examples whose memory is counted
# Beside what a backward pass keeps there are its gradients, the library's workspace and the attack's own state; half
# of the device is left to others.
_OVERHEAD, _SHARE = 3.0, 0.5


def memory_per_example(model: nn.Module, images: Tensor) -> float:
    """Return the bytes that a forward pass keeps for its backward pass, per image; the model's own are not counted."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        # the clone asks for a gradient and is no leaf: a model may write into it
        logits = model(images.detach().requires_grad_(True).clone())
    del logits  # alive until here, so that no two tensors shared a place
    return sum(kept.values()) / len(images)


def fitting(per_example: float, memory: float) -> int:
    """Return the largest power of two, from 16 to 2048, of examples that fit into a share of the memory."""
    size = _LARGEST
    while size > _SMALLEST and size * per_example * _OVERHEAD > memory * _SHARE:
        size //= 2
    return size


def default_batch_size(model: nn.Module, images: Tensor) -> int:
    """Return the size of batches for a model in eval mode: 256 on a CPU, by the device's whole memory on a GPU.

    The whole memory, not what is free at the moment, so that the same evaluation has the same shape every time.
    """
    if images.device.type != "cuda":
        return _CPU
    memory = torch.cuda.get_device_properties(images.device).total_memory
    return fitting(memory_per_example(model, images[:_PROBE]), memory)
