# SPDX-License-Identifier: BSD-3-Clause
"""Put fused attention into a model that exists already."""

import sys
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from fused_mha.module import MultiheadAttention, _complete

__all__ = ["ReplacementReport", "replace_multihead_attention"]


@dataclass(frozen=True)
class ReplacementReport:
    """What :func:`replace_multihead_attention` did. Names are those of ``model.named_modules()``.

    Attributes:
        model: the model that was given.
        replaced: names of the attention modules that are fused now.
        left: name and reason of each attention module that was left as it was.
    """

    model: nn.Module
    replaced: tuple[str, ...]
    left: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        lines = [f"replaced {len(self.replaced)} of {len(self.replaced) + len(self.left)} attention modules"]
        lines += [f"  fused  {name or '(the model itself)'}" for name in self.replaced]
        lines += [f"  left   {name or '(the model itself)'}: {reason}" for name, reason in self.left]
        return "\n".join(lines)


def replace_multihead_attention(model: nn.Module) -> ReplacementReport:
    """Make every ``nn.MultiheadAttention`` in a model a :class:`fused_mha.MultiheadAttention`, in place.

    The modules stay the objects they are and only change their class: parameters, buffers, hooks, parametrizations,
    the training flag, device and dtype are untouched, an optimizer that holds the parameters goes on, and references
    to the modules stay good. The model may be a ``nn.MultiheadAttention`` itself.

    Modules that ``fully_shard`` has sharded already stay sharded. Left as they are: subclasses of
    ``nn.MultiheadAttention``, whose own behaviour would be lost (quantizable ones are such), and modules whose
    ``forward`` has been replaced on the instance.

    Returns:
        What was replaced, and what was left and why. ``print`` shows it as a table.

    Example::

        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        >>> print(fused_mha.replace_multihead_attention(torch.nn.TransformerEncoder(layer, 2)))
        replaced 2 of 2 attention modules
          fused  layers.0.self_attn
          fused  layers.1.self_attn
    """
    replaced: list[str] = []
    left: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        reason = _why_left(module)
        if reason:
            left.append((name, reason))
        else:
            _change_class(module)
            replaced.append(name)
    return ReplacementReport(model, tuple(replaced), tuple(left))


def _why_left(module: nn.MultiheadAttention) -> str:
    if isinstance(module, MultiheadAttention):
        return "already fused"
    kind = type(module)
    while _is_wrapper(kind, module):
        kind = _wrapped(kind)
    if kind is not nn.MultiheadAttention:
        return f"{kind.__module__}.{kind.__qualname__} is a subclass whose own behaviour would be lost"
    if "forward" in module.__dict__:
        return "its forward has been replaced on the instance"
    return ""


def _wrapped(kind: type) -> type:
    base: type = next(base for base in kind.__bases__ if issubclass(base, nn.MultiheadAttention))
    return base


def _is_wrapper(kind: type, module: nn.Module) -> bool:
    """Whether the class was made for modules on the fly: for one, by parametrize, or by fully_shard."""
    if kind is nn.MultiheadAttention:
        return False
    if parametrize.is_parametrized(module) and kind.__name__ == f"Parametrized{_wrapped(kind).__name__}":
        return True
    fully_sharded = sys.modules.get("torch.distributed.fsdp")  # not imported: nothing is sharded
    return fully_sharded is not None and fully_sharded.FSDPModule in kind.__bases__


def _fused_class(kind: type) -> type:
    """MultiheadAttention, or a class as `kind` on top of it, so that undoing what made `kind` ends at ours."""
    if kind is nn.MultiheadAttention:
        fused: type = MultiheadAttention
        return fused
    bases = tuple(_fused_class(base) if issubclass(base, nn.MultiheadAttention) else base for base in kind.__bases__)
    members = {key: member for key, member in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    return type(kind.__name__, bases, members)


def _change_class(module: nn.MultiheadAttention) -> None:
    module.__class__ = _fused_class(type(module))
    assert isinstance(module, MultiheadAttention)
    _complete(module)
