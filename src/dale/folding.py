"""A frozen replica of a model for attacks: BatchNorm folded into convolutions, activations fused, weights refreshed.

In eval mode BatchNorm is an affine map per channel, so a convolution followed by one is a convolution:

    BN(conv(x, w)) = conv(x, w * s) + t,      s = gamma / sqrt(var + eps),   t = beta - mean * s

The replica holds the folded weights in a dtype and memory layout of its own, asks for no parameter gradient, and takes
the live model's weights over when told to. On a GPU convolution, bias, residual sum and ReLU run as one kernel of the
vendor's library; elsewhere they run as they are. A model that torch.fx cannot trace has no replica.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from dale import winograd
from dale.compiling import Compiler, as_it_is
from dale.errors import told_of
from dale.folded import Copied, FoldedBlock, FoldedConv, FoldedNorm, refresh_together
from dale.kernels import WIDE, blocks_pay


class Replica(nn.Module):
    """A model's eval-mode function with folded weights; `refresh` takes the live weights over.

    Images come in and logits go out as float32; in between runs `dtype`, in channels-last layout where asked.
    """

    def __init__(
        self, graph: fx.GraphModule, dtype: torch.dtype, channels_last: bool, minimal_filtering: bool = False
    ) -> None:
        super().__init__()
        self.graph = graph
        self.compiler: Compiler = as_it_is  # for samplers that climb this model, and for its refresh
        self.dtype = dtype
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.parts = [m for m in graph.modules() if isinstance(m, (FoldedConv, FoldedNorm, Copied))]
        self.together = [part for part in self.parts if isinstance(part, FoldedConv) and part.regular]
        self.apart = [part for part in self.parts if not (isinstance(part, FoldedConv) and part.regular)]
        graph.to(dtype)
        if channels_last:
            graph.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        convs = [part for part in self.parts if isinstance(part, FoldedConv) and part.fusable and part.same]
        self.wide = [part for part in convs if minimal_filtering and winograd.fits(part.weight)]
        self.eval()
        self.refresh()

    def refresh(self) -> None:
        """Take the live model's weights and statistics over."""
        refresh_together(self.together, self.compiler)
        for part in self.apart:
            part.refresh()
        for conv in self.wide:
            conv.filters = winograd.transform_both(conv.weight, conv.filters)

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
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    fuse: bool = True,
    minimal_filtering: bool = False,
) -> Replica | str:
    """Return a replica of the model's eval mode, or the reason why there is none.

    `fuse`: ReLUs into convolutions. `minimal_filtering`: wide convolutions on a CPU by Winograd's method (winograd.py).
    """
    if (reason := hooked(model)) is not None:
        return reason
    training = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        for name, module in model.named_modules():
            if module.training:
                return f"{name or 'the model'} stays in training mode when it is put into eval mode"
        try:
            traced = fx.GraphModule(model, _Tracer().trace(model))
        except Exception as error:
            return f"torch.fx cannot trace the model: {told_of(error)}"
        if any(node.op == "get_attr" for node in traced.graph.nodes):
            return "the model reads a tensor of its own outside its layers"
        # a graph module of its own, so that replacing layers leaves the model alone. What looks like dead code stays:
        # a statement without a value may work in place
        graph = fx.GraphModule(dict(traced.named_modules()), traced.graph)
        try:
            _replace_layers(graph)
            if fuse:
                _fuse_relu(graph)
                if any(blocks_pay(parameter.device) for parameter in itertools.islice(model.parameters(), 1)):
                    _fuse_blocks(graph)
            graph.delete_all_unused_submodules()
            graph.recompile()
            return Replica(graph, dtype, channels_last, minimal_filtering)
        except Exception as error:  # a layer that cannot be copied, a weight without this memory layout
            return f"its layers cannot be replaced by copies: {told_of(error)}"
    finally:
        for module, flag in training:
            module.training = flag


def hooked(model: nn.Module) -> str | None:
    """Say which layer has a hook, if one has: a trace does not see what it does."""
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if any(hooks):  # one that renews a weight before each pass, such as weight_norm's, among them
            return f"{name or 'the model'} has a hook"
    return None


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
        simple = len(node.args) == 1 and not node.kwargs
        if simple and _is_plain(live, nn.Conv2d):
            assert isinstance(live, nn.Conv2d)
            norm_node = next(iter(node.users)) if len(node.users) == 1 else None
            norm = (
                modules.get(str(norm_node.target)) if norm_node is not None and norm_node.op == "call_module" else None
            )
            if norm_node is not None and not norm_node.kwargs and _is_affine(norm):
                assert isinstance(norm, nn.BatchNorm2d)
                _swap(graph, node, FoldedConv(live, norm))
                norm_node.replace_all_uses_with(node)
                graph.graph.erase_node(norm_node)
            else:
                _swap(graph, node, FoldedConv(live, None))
        elif simple and _is_affine(live):
            assert isinstance(live, nn.BatchNorm2d)
            _swap(graph, node, FoldedNorm(live))
        elif simple and any(_is_plain(live, kind) for kind in (nn.Dropout, nn.Dropout2d, nn.Identity)):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif any(True for _ in live.parameters()) or any(True for _ in live.buffers()):
            _swap(graph, node, Copied(live))


def _is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a layer is of a kind and computes what that kind does, from parameters of its own."""
    if not isinstance(module, kind) or parametrize.is_parametrized(module):  # reading such a weight may change it
        return False
    return all(
        getattr(type(module), name) is getattr(kind, name)
        for name in ("forward", "_conv_forward")
        if hasattr(kind, name)
    )


def _is_affine(module: nn.Module | None) -> bool:
    """Whether a layer is a BatchNorm of images that is an affine map in eval mode."""
    return _is_plain(module, nn.BatchNorm2d) and getattr(module, "running_mean", None) is not None


def _swap(graph: fx.GraphModule, node: fx.Node, module: nn.Module) -> None:
    name = f"part_{node.name}"  # the node's, not the layer's: a layer that is called twice may be folded twice
    graph.add_submodule(name, module)
    node.target = name


def _fuse_relu(graph: fx.GraphModule) -> None:
    """Fuse conv -> relu and conv -> (+ z) -> relu into the convolution."""
    modules = dict(graph.named_modules())
    for relu in list(graph.graph.nodes):
        if relu.op != "call_module" or relu.kwargs or not _is_plain(modules.get(str(relu.target)), nn.ReLU):
            continue
        source = relu.args[0]
        conv, z = source, None
        added = source.op == "call_function" and source.target in (operator.add, torch.add)
        if added and len(source.args) == 2 and not source.kwargs and len(source.users) == 1:
            first, second = source.args
            if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)) or first is second:
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
        if z is not None and _fusable(z, modules):
            other = modules[str(z.target)]
            assert isinstance(other, FoldedConv)
            if other.regular and folded.regular:
                folded.carry(other)
        conv.args = (conv.args[0],) if z is None else (conv.args[0], z)
        relu.replace_all_uses_with(conv)
        graph.graph.erase_node(relu)
        if source is not conv:
            graph.graph.erase_node(source)


def _fusable(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    return isinstance(module, FoldedConv) and not module.relu and module.fusable and len(node.users) == 1


def _fuse_blocks(graph: fx.GraphModule) -> None:
    """Join two fused convolutions and the sum around them, and hand each ReLU's mask to a block alone behind it."""
    modules = dict(graph.named_modules())
    blocks = []
    for node in list(graph.graph.nodes):
        second = modules.get(str(node.target)) if node.op == "call_module" else None
        if not (isinstance(second, FoldedConv) and len(node.args) == 2 and _square(second)):
            continue
        inner, outer = node.args
        first = modules.get(str(inner.target)) if inner.op == "call_module" else None
        if isinstance(first, FoldedConv) and first.relu and _square(first) and inner.args == (outer,):
            if len(inner.users) > 1:
                continue
            _swap(graph, node, FoldedBlock(first, second))
            node.args = (outer,)
            graph.graph.erase_node(inner)
            blocks.append(node)
    modules = dict(graph.named_modules())
    for node in blocks:
        block, source = modules[str(node.target)], node.args[0]
        front = modules.get(str(source.target)) if source.op == "call_module" else None
        alone = len(source.users) == 1
        if alone and (isinstance(front, FoldedBlock) or (isinstance(front, FoldedConv) and front.relu and front.same)):
            assert isinstance(block, FoldedBlock)
            front.premasked = block.mask_input = True


def _square(conv: FoldedConv) -> bool:
    return conv.same and conv.conv[0].in_channels == conv.conv[0].out_channels == WIDE
