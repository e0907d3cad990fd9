"""A frozen replica of a model for attacks: BatchNorm folded into convolutions, activations fused, weights refreshed.

In eval mode BatchNorm is an affine map per channel, so a convolution followed by one is a convolution:

    BN(conv(x, w)) = conv(x, w * s) + t,      s = gamma / sqrt(var + eps),   t = beta - mean * s

The replica holds the folded weights in a dtype and memory layout of its own, asks for no parameter gradient, and takes
the live model's weights over when told to. On a GPU convolution, bias, residual sum and ReLU run as one kernel of the
vendor's library; elsewhere they run as they are. A model that torch.fx cannot trace has no replica.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn


@torch.library.custom_op("dale::conv_relu", mutates_args=())
def conv_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> Tensor:
    """relu(conv(x, weight) + bias + z) in one kernel where the library has one; dilation 1."""
    if x.device.type == "cuda" and torch.backends.cudnn.enabled:
        if z is None:
            fused: Tensor = torch.cudnn_convolution_relu(x, weight, bias, stride, padding, (1, 1), groups)
            return fused
        added: Tensor = torch.cudnn_convolution_add_relu(x, weight, z, 1.0, bias, stride, padding, (1, 1), groups)
        return added
    plain = F.conv2d(x, weight, bias, list(stride), list(padding), 1, groups)
    return (plain if z is None else plain.add_(z)).relu_()


@conv_relu.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    z: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> Tensor:
    return F.conv2d(x, weight, bias, list(stride), list(padding), 1, groups)


def _setup(ctx: object, inputs: tuple[object, ...], output: Tensor) -> None:
    x, weight, _, z, stride, padding, groups = inputs
    ctx.save_for_backward(x, weight, output)  # type: ignore[attr-defined]
    ctx.geometry = (stride, padding, groups)  # type: ignore[attr-defined]
    ctx.has_z = z is not None  # type: ignore[attr-defined]


def _backward(ctx: object, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, output = ctx.saved_tensors  # type: ignore[attr-defined]
    stride, padding, groups = ctx.geometry  # type: ignore[attr-defined]
    masked = torch.ops.aten.threshold_backward(gradient, output, 0)
    inner = torch.ops.aten.convolution_backward(
        masked, x, weight, None, stride, padding, (1, 1), False, (0, 0), groups, (True, False, False)
    )[0]
    return inner, None, None, masked if ctx.has_z else None, None, None, None  # type: ignore[attr-defined]


conv_relu.register_autograd(_backward, setup_context=_setup)


class FoldedConv(nn.Module):
    """A convolution with its BatchNorm folded in and, where one follows, the sum and the ReLU after it."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d | None) -> None:
        super().__init__()
        self.conv = (conv,)  # in a tuple: the live model's modules are not ours
        self.norm = (norm,)
        self.relu = False
        self.register_buffer("weight", torch.empty_like(conv.weight, requires_grad=False), persistent=False)
        bias = torch.zeros(conv.out_channels, device=conv.weight.device, dtype=conv.weight.dtype)
        self.register_buffer("bias", bias, persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the live weights anew."""
        conv, norm = self.conv[0], self.norm[0]
        weight, bias = conv.weight.float(), conv.bias
        if norm is None:
            self.weight.copy_(weight)
            if bias is not None:
                self.bias.copy_(bias)
            return
        scale, shift = _affine(norm)
        self.weight.copy_(weight * scale.view(-1, 1, 1, 1))
        self.bias.copy_(shift if bias is None else shift + bias.float() * scale)

    @property
    def fusable(self) -> bool:
        """Whether the library has one kernel for it with the ReLU."""
        conv = self.conv[0]
        return conv.dilation == (1, 1) and isinstance(conv.padding, tuple) and conv.padding_mode == "zeros"

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """conv(x) + bias, plus z and the ReLU where they were fused."""
        conv = self.conv[0]
        if self.relu:
            assert isinstance(conv.padding, tuple)
            fused: Tensor = conv_relu(x, self.weight, self.bias, z, conv.stride, conv.padding, conv.groups)
            return fused
        plain: Tensor = conv._conv_forward(x, self.weight, self.bias)
        return plain


class FoldedNorm(nn.Module):
    """A BatchNorm that follows no convolution: x * s + t per channel."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.norm = (norm,)
        for name, value in zip(("scale", "shift"), _affine(norm), strict=True):
            self.register_buffer(name, value.clone(), persistent=False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the live statistics and parameters over."""
        scale, shift = _affine(self.norm[0])
        self.scale.copy_(scale)
        self.shift.copy_(shift)

    def forward(self, x: Tensor) -> Tensor:
        """x * s + t."""
        return x * self.scale.view(-1, 1, 1) + self.shift.view(-1, 1, 1)


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.float() + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().float()
    shift = -norm.running_mean.float() * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().float()


class _Copied(nn.Module):
    """Any other layer: a copy in eval mode whose tensors follow the live one's."""

    def __init__(self, live: nn.Module) -> None:
        super().__init__()
        import copy

        self.live = (live,)
        self.copy = copy.deepcopy(live).eval().requires_grad_(False)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the live tensors."""
        theirs = dict((*self.live[0].named_parameters(), *self.live[0].named_buffers()))
        for name, mine in (*self.copy.named_parameters(), *self.copy.named_buffers()):
            mine.copy_(theirs[name])

    def forward(self, *args: Tensor) -> Tensor:
        """Run the copy."""
        result: Tensor = self.copy(*args)
        return result


class Replica(nn.Module):
    """A model's eval-mode function with folded weights; `refresh` takes the live weights over.

    Images come in and logits go out as float32; in between runs `dtype`, in channels-last layout where asked.
    """

    # a function that compiles tensor functions, for samplers that climb this model; None: they run as they are
    compiler: Callable[[Callable[..., Tensor]], Callable[..., Tensor]] | None = None

    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype, channels_last: bool) -> None:
        super().__init__()
        self.graph = graph
        self.dtype = dtype
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.parts = [m for m in graph.modules() if isinstance(m, (FoldedConv, FoldedNorm, _Copied))]
        graph.to(dtype)
        if channels_last:
            graph.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.eval()
        self.refresh()

    def refresh(self) -> None:
        """Take the live model's weights and statistics over."""
        for part in self.parts:
            part.refresh()

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        logits: Tensor = self.graph(x.to(dtype=self.dtype, memory_format=self.format))
        return logits.float()


class _Tracer(fx.Tracer):
    """Treats layers that hold tensors of their own as leaves, so that they can be copied and refreshed."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """torch's own layers, and any childless one with tensors."""
        own = any(True for _ in m.parameters(recurse=False)) or any(True for _ in m.buffers(recurse=False))
        return super().is_leaf_module(m, module_qualified_name) or (own and not any(True for _ in m.children()))


def replicate(
    model: nn.Module, *, dtype: torch.dtype = torch.float32, channels_last: bool = False, fuse: bool = True
) -> Replica | str:
    """Return a replica of the model's eval mode, or the reason why there is none. `fuse`: ReLUs into convolutions."""
    training = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        traced = fx.GraphModule(model, _Tracer().trace(model))
    except Exception as error:
        return f"torch.fx cannot trace the model: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    finally:
        for module, flag in training:
            module.training = flag
    if any(node.op == "get_attr" for node in traced.graph.nodes):
        return "the model reads a tensor of its own outside its layers"
    # a graph module of its own, so that replacing layers leaves the model alone
    graph = fx.GraphModule(dict(traced.named_modules()), traced.graph)
    _replace_layers(graph)
    if fuse:
        _fuse_relu(graph)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return Replica(graph, dtype, channels_last)


def fold_batchnorm(model: nn.Module) -> nn.Module | None:
    """Return a replica for repeated passes in eval mode and float32, or None where there is nothing to gain.

    That is, where torch.fx cannot trace the model, or it has no BatchNorm to fold.
    """
    replica = replicate(model, channels_last=True)
    if isinstance(replica, str):
        return None
    folded = any(isinstance(part, FoldedConv) and part.norm[0] is not None for part in replica.parts)
    return replica if folded else None


def _replace_layers(graph: fx.GraphModule) -> None:
    """Put folded convolutions, folded norms and copies in the place of the live model's layers."""
    modules = dict(graph.named_modules())
    for node in list(graph.graph.nodes):
        if node.op != "call_module":
            continue
        live = modules[str(node.target)]
        if isinstance(live, nn.Conv2d):
            norm_node = next(iter(node.users)) if len(node.users) == 1 else None
            norm = (
                modules.get(str(norm_node.target)) if norm_node is not None and norm_node.op == "call_module" else None
            )
            if norm_node is not None and isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None:
                _swap(graph, node, FoldedConv(live, norm))
                norm_node.replace_all_uses_with(node)
                graph.graph.erase_node(norm_node)
            else:
                _swap(graph, node, FoldedConv(live, None))
        elif isinstance(live, nn.BatchNorm2d) and live.running_mean is not None:
            _swap(graph, node, FoldedNorm(live))
        elif isinstance(live, (nn.Dropout, nn.Dropout2d, nn.Identity)):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif any(True for _ in live.parameters()) or any(True for _ in live.buffers()):
            _swap(graph, node, _Copied(live))


def _swap(graph: fx.GraphModule, node: fx.Node, module: nn.Module) -> None:
    name = f"part_{node.name}"  # the node's, not the layer's: a layer that is called twice may be folded twice
    graph.add_submodule(name, module)
    node.target = name


def _fuse_relu(graph: fx.GraphModule) -> None:
    """Fuse conv -> relu and conv -> (+ z) -> relu into the convolution."""
    modules = dict(graph.named_modules())
    for relu in list(graph.graph.nodes):
        if relu.op != "call_module" or not isinstance(modules.get(str(relu.target)), nn.ReLU):
            continue
        source = relu.args[0]
        conv, z = source, None
        if source.op == "call_function" and source.target in (operator.add, torch.add) and len(source.users) == 1:
            first, second = source.args[:2]
            if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
                continue
            # the later of the two convolutions takes the other in, which exists by then
            conv, z = (first, second) if _fusable(first, modules) else (second, first)
            if list(graph.graph.nodes).index(z) > list(graph.graph.nodes).index(conv):
                conv, z = z, conv
        if not _fusable(conv, modules):
            continue
        folded = modules[str(conv.target)]
        assert isinstance(folded, FoldedConv)
        folded.relu = True
        conv.args = (conv.args[0],) if z is None else (conv.args[0], z)
        relu.replace_all_uses_with(conv)
        graph.graph.erase_node(relu)
        if source is not conv:
            graph.graph.erase_node(source)


def _fusable(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    return isinstance(module, FoldedConv) and not module.relu and module.fusable and len(node.users) == 1
