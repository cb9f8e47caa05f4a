# SPDX-License-Identifier: BSD-3-Clause
"""``torch.nn.MultiheadAttention`` with fused attention."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import has_torch_function

from fused_mha import _nested

__all__ = ["MultiheadAttention"]

# The overloads themselves: calling the packet would look the overload up every time.
_forward_op = torch.ops.fused_mha.multi_head_attention_forward.default
_projected_op = torch.ops.fused_mha._multi_head_attention_projected.default


class MultiheadAttention(nn.MultiheadAttention):
    r"""Multi-head attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2), fused.

    It stands where ``torch.nn.MultiheadAttention`` stood: the same constructor, attributes, parameter names, initial
    numbers for the same seed, ``state_dict``, forward arguments and results. Letters: N batch, H heads, L query
    length, S key length, E ``embed_dim``.

    Args:
        embed_dim: E, the width of the query and of the output.
        num_heads: H; divides E.
        dropout: probability with which an attention weight is dropped in training.
        bias: give the projections a bias.
        add_bias_kv: append one learned key and value, visible to every row.
        add_zero_attn: append one key and value of zeros, visible to every row.
        kdim: width of the key; E by default.
        vdim: width of the value; E by default.
        batch_first: batched inputs and outputs are (N, L, E) instead of (L, N, E).
        device, dtype: of the parameters.

    What the stock module lacks, each left as it is there unless given:

    Args:
        head_dim: D, the width of a head of queries and keys; E / H by default. E need then not be divisible.
        v_head_dim: Dv, the width of a head of values; D by default.
        num_kv_heads: Hkv, the heads of keys and values, each shared by H / Hkv query heads; H by default.
        out_dim: the width of the output; E by default.
        causal_alignment: "top_left", or "bottom_right", with which ``is_causal`` hides s > l + S - L, so that the last
            query sees every key.
        weights_before_dropout: return weights that dropout is yet to act on.
        sink: "zero" adds exp(0) to each softmax's denominator, so that a row may attend to nothing; "learned" adds
            exp(sink[h]), where ``sink`` is a parameter (H) that starts at 0.

    ``in_proj_weight`` is then (H * D + Hkv * D + Hkv * Dv, E), or, where kdim or vdim differ from E, ``q_proj_weight``
    (H * D, E), ``k_proj_weight`` (Hkv * D, kdim), ``v_proj_weight`` (Hkv * Dv, vdim); ``out_proj`` is
    (out_dim, H * Dv).

    What is better than in the stock module: a row that sees no key attends to nothing (its output is ``out_proj.bias``)
    instead of NaN; what a mask hides is not read; two masks may differ in type; ``attn_mask`` may be anything that
    broadcasts to (N, H, L, S); ``is_causal=True`` needs no mask; ``need_weights=True`` costs no (N, H, L, S) tensor
    when averaged; hooks, adapters and quantized layers put on ``out_proj`` take effect; nested tensors, of both
    layouts, work in training too; training and evaluation, with and without gradients, give the same answer.

    Example::

        >>> attention = fused_mha.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
        >>> x = torch.randn(2, 5, 16)
        >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        >>> output, weights = attention(x, x, x, key_padding_mask=padding)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    v_head_dim: int
    num_kv_heads: int
    causal_alignment: str
    weights_before_dropout: bool
    zero_sink: bool
    sink: Tensor | None
    _has_options: bool

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        num_kv_heads: int | None = None,
        out_dim: int | None = None,
        causal_alignment: str = "top_left",
        weights_before_dropout: bool = False,
        sink: str | None = None,
    ) -> None:
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = _Widths.of(embed_dim, num_heads, head_dim, v_head_dim, num_kv_heads, out_dim)
        _check_choices(causal_alignment, sink)
        if widths is None:
            super().__init__(
                embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, **factory
            )
        else:
            nn.Module.__init__(self)
            self.embed_dim = embed_dim
            self.kdim = embed_dim if kdim is None else kdim
            self.vdim = embed_dim if vdim is None else vdim
            self.num_heads = num_heads
            self.dropout = dropout
            self.batch_first = batch_first
            self.add_zero_attn = add_zero_attn
            self.head_dim = widths.head_dim
            self.v_head_dim = widths.v_head_dim
            self.num_kv_heads = widths.num_kv_heads
            _register_parameters(self, widths, bias, add_bias_kv, factory)
        self.causal_alignment = causal_alignment
        self.weights_before_dropout = weights_before_dropout
        self.zero_sink = sink == "zero"
        learned = nn.Parameter(torch.zeros(num_heads, **factory)) if sink == "learned" else None
        self.register_parameter("sink", learned)
        self._has_options = widths is not None or causal_alignment != "top_left" or weights_before_dropout or bool(sink)
        _complete(self)
        if widths is not None:
            self._reset_parameters()

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        if self._parameters.get("sink") is not None:
            nn.init.zeros_(self._parameters["sink"])  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The options that the stock module lacks, where there are any."""
        if not self._has_options:
            return ""
        sink = "'zero'" if self.zero_sink else "'learned'" if self.sink is not None else None
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}, "
            f"v_head_dim={self.v_head_dim}, num_kv_heads={self.num_kv_heads}, out_dim={self.out_proj.out_features}, "
            f"causal_alignment={self.causal_alignment!r}, weights_before_dropout={self.weights_before_dropout}, "
            f"sink={sink}"
        )

    # Whether the inputs share one in-projection weight. A scripted nn.TransformerEncoderLayer, which sees no hooks,
    # keeps off its own kernel in evaluation where this is False. Nothing else in TorchScript asks.
    @property
    def _qkv_same_embed_dim(self) -> bool:
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return False
        return bool(self.kdim == self.embed_dim and self.vdim == self.embed_dim)

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        """What the stock constructor sets follows from the widths."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        r"""Attend from the query to keys and values.

        Args:
            query: (L, N, E), (N, L, E) with ``batch_first``, or (L, E) unbatched; or nested (N, each sample's L, E).
            key: (S, N, kdim), (N, S, kdim) or (S, kdim); or nested.
            value: (S, N, vdim), (N, S, vdim) or (S, vdim); or nested.
            key_padding_mask: (N, S), or (S) unbatched; bool (True hides the key) or floating (added to the scores).
            need_weights: return the attention weights too.
            attn_mask: (L, S), (N * H, L, S), or anything that broadcasts to (N, H, L, S); bool (True hides) or
                floating (added).
            average_attn_weights: return the weights' mean over heads rather than each head's.
            is_causal: causal attention where no ``attn_mask`` is given; where one is given it alone decides.

        Returns:
            The output, in the query's layout, and the weights, after dropout, or None: (N, L, S) averaged, (N, H, L, S)
            per head, without N where the input is unbatched. With nested input the weights are padded with zeros.

        Raises:
            AssertionError, RuntimeError, ValueError: shapes that do not fit, of the type that the stock module raises.
            TypeError: a mask that is neither bool nor floating.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            # TorchScript knows nothing of the types that choose the way below; this one is right for all of them.
            nested: Tensor | None = None
            if query.is_nested and query is key and key is value and key_padding_mask is None:
                # What a scripted nn.TransformerEncoder makes of a padded batch in evaluation.
                nested = query
                query = _nested.to_padded_strided(nested)
                key = query
                value = query
                key_padding_mask = _nested.padding(_nested.lengths_strided(nested), query.size(1))
            q, k, v = _project_in(
                query,
                key,
                value,
                self.in_proj_weight,
                self.in_proj_bias,
                self.q_proj_weight,
                self.k_proj_weight,
                self.v_proj_weight,
                [
                    self.num_heads * self.head_dim,
                    self.num_kv_heads * self.head_dim,
                    self.num_kv_heads * self.v_head_dim,
                ],
            )
            sink: Tensor | None = self.sink
            if self.zero_sink:
                sink = q.new_zeros([self.num_heads])
            context, weights = torch.ops.fused_mha._multi_head_attention_projected(
                q,
                k,
                v,
                self.num_heads,
                self.bias_k,
                self.bias_v,
                self.add_zero_attn,
                self.dropout if self.training else 0.0,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
                self.batch_first,
                self.num_kv_heads,
                self.causal_alignment,
                sink,
                self.weights_before_dropout,
            )
            output = self.out_proj(context)
            if nested is not None:
                output = _nested.from_padded_strided(output, nested)
                weights = _nested.hide_weights(weights, _nested.lengths_strided(nested))
            return output, weights
        if isinstance(query, torch.fx.Proxy):
            # What is recorded without numbers takes the way that is right whatever the arguments turn out to be.
            results = _project_and_attend(
                self,
                _in_parameters_by_attribute(self),
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
            return self.out_proj(results[0]), results[1]
        if query.is_nested or key.is_nested or value.is_nested:
            return _nested_forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return _padded_forward(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _complete(self)


class _Widths(NamedTuple):
    """Those of heads and output where they are not all as in the stock module."""

    head_dim: int
    v_head_dim: int
    num_kv_heads: int
    out_dim: int

    @staticmethod
    def of(
        embed_dim: int,
        num_heads: int,
        head_dim: int | None,
        v_head_dim: int | None,
        num_kv_heads: int | None,
        out_dim: int | None,
    ) -> "_Widths | None":
        """None where all are as in the stock module, whose own checks then follow."""
        given = {"head_dim": head_dim, "v_head_dim": v_head_dim, "num_kv_heads": num_kv_heads, "out_dim": out_dim}
        if all(size is None for size in given.values()):
            return None
        for name, size in {"embed_dim": embed_dim, "num_heads": num_heads, **given}.items():
            if size is not None and size <= 0:
                raise ValueError(f"fused_mha::MultiheadAttention: {name} must be positive, got {size}")
        if head_dim is None:
            if embed_dim % num_heads != 0:
                return None
            head_dim = embed_dim // num_heads
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % kv_heads != 0:
            raise ValueError(
                f"fused_mha::MultiheadAttention: num_kv_heads must divide num_heads = {num_heads}, got {kv_heads}"
            )
        widths = _Widths(head_dim, v_head_dim or head_dim, kv_heads, out_dim or embed_dim)
        stock = (widths.head_dim * num_heads, widths.v_head_dim * num_heads, widths.num_kv_heads, widths.out_dim)
        return None if stock == (embed_dim, embed_dim, num_heads, embed_dim) else widths


def _check_choices(causal_alignment: str, sink: str | None) -> None:
    if causal_alignment not in ("top_left", "bottom_right"):
        raise ValueError(
            "fused_mha::MultiheadAttention: causal_alignment must be 'top_left' or 'bottom_right', got "
            f"{causal_alignment!r}"
        )
    if sink not in (None, "zero", "learned"):
        raise ValueError(f"fused_mha::MultiheadAttention: sink must be None, 'zero' or 'learned', got {sink!r}")


def _register_parameters(
    module: MultiheadAttention, widths: _Widths, bias: bool, add_bias_kv: bool, factory: dict[str, Any]
) -> None:
    """As the stock constructor registers them, in its order, so that one seed gives the C++ module the same numbers."""

    def parameter(name: str, *sizes: int) -> None:
        module.register_parameter(name, nn.Parameter(torch.empty(sizes, **factory)))

    rows = (
        module.num_heads * widths.head_dim,
        widths.num_kv_heads * widths.head_dim,
        widths.num_kv_heads * widths.v_head_dim,
    )
    absent = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    if module._qkv_same_embed_dim:
        parameter("in_proj_weight", sum(rows), module.embed_dim)
    else:
        columns = (module.embed_dim, module.kdim, module.vdim)
        for name, row, column in zip(absent, rows, columns, strict=True):
            parameter(name, row, column)
        absent = ["in_proj_weight"]
    if bias:
        parameter("in_proj_bias", sum(rows))
    else:
        absent.append("in_proj_bias")
    for name in absent:
        module.register_parameter(name, None)
    module.out_proj = NonDynamicallyQuantizableLinear(
        module.num_heads * widths.v_head_dim, widths.out_dim, bias=bias, **factory
    )
    if add_bias_kv:
        parameter("bias_k", 1, 1, rows[1])
        parameter("bias_v", 1, 1, rows[2])
    else:
        module.bias_k = module.bias_v = None


def _complete(module: MultiheadAttention) -> None:
    """What a module has that was made by the stock constructor, or by one of ours that had no options yet."""
    state = module.__dict__
    state.setdefault("_has_options", False)
    state.setdefault("num_kv_heads", module.num_heads)
    state.setdefault("v_head_dim", module.head_dim)
    state.setdefault("causal_alignment", "top_left")
    state.setdefault("weights_before_dropout", False)
    state.setdefault("zero_sink", False)
    state["_parameters"].setdefault("sink", None)
    _refuse_fast_path(module)


class _ForwardPreHooks(OrderedDict[int, Callable[..., Any]]):
    """Forward pre-hooks with one entry of ours that is counted but never run.

    ``nn.TransformerEncoderLayer`` in evaluation replaces its attention by a kernel of its own, past the module, unless
    a module inside it has forward hooks. It counts them by ``len``. The entry is seen by ``len`` (and by a tracer, for
    which it does nothing), while ``bool``, which ``nn.Module.__call__`` asks, and ``values``, which whoever compiles
    or copies hooks reads, know only the user's: a call costs no more, and TorchScript has no hook to compile.
    """

    MARKER = -1  # hooks of others have ids from 0 on

    def __bool__(self) -> bool:
        return len(self) > (self.MARKER in self)

    def values(self):  # type: ignore[no-untyped-def]
        return OrderedDict((key, hook) for key, hook in self.items() if key != self.MARKER).values()

    def __reduce__(self) -> Any:
        # A plain dictionary is all that torch.load takes with weights_only; the module's __setstate__ makes one of
        # these of it. Where there are hooks of the user's, their handles may come along, which know the dictionary by
        # identity.
        return super().__reduce__() if self else (OrderedDict, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> "_ForwardPreHooks":
        # Parametrized modules copy what they hold without a __setstate__.
        copied = memo[id(self)] = type(self)()
        copied.update((key, copy.deepcopy(hook, memo)) for key, hook in self.items())
        return copied


def _no_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The entry of _ForwardPreHooks, for those who run hooks without asking whether there are any."""


def _refuse_fast_path(module: nn.Module) -> None:
    """Have ``nn.TransformerEncoderLayer`` call the module in evaluation: eager by hooks, scripted by a property."""
    # TorchScript would take what the stock constructor left here for the attribute, and not see the property.
    module.__dict__.pop("_qkv_same_embed_dim", None)
    hooks = module._forward_pre_hooks
    # Where there are hooks, their handles know the dictionary by identity and remove them from it: it has to stay.
    if not hooks and not isinstance(hooks, _ForwardPreHooks):
        hooks = _ForwardPreHooks()
        module._forward_pre_hooks = hooks
    hooks.setdefault(_ForwardPreHooks.MARKER, _no_hook)


def _in_parameters(module: MultiheadAttention) -> tuple[Tensor | None, ...]:
    """in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight, bias_k, bias_v."""
    parameters = module._parameters
    try:
        # An attribute that is a parameter is found only after everything else has failed, ten times slower than this.
        return (
            parameters["in_proj_weight"],
            parameters["in_proj_bias"],
            parameters["q_proj_weight"],
            parameters["k_proj_weight"],
            parameters["v_proj_weight"],
            module.bias_k,
            module.bias_v,
        )
    except KeyError:
        return _in_parameters_by_attribute(module)


def _in_parameters_by_attribute(module: MultiheadAttention) -> tuple[Tensor | None, ...]:
    """The same where something else answers for an attribute: parametrized, pruned, sharded or traced."""
    return (
        module.in_proj_weight,
        module.in_proj_bias,
        module.q_proj_weight,
        module.k_proj_weight,
        module.v_proj_weight,
        module.bias_k,
        module.bias_v,
    )


def _why_called(layer: nn.Module, name: str, beside: tuple[Tensor | None, ...] = ()) -> str:
    """Why the operator cannot be given the weights of this Linear; '' where it can, as a rule.

    Otherwise the layer is called as a module, and the parameters ``beside`` it go through F.linear as the attributes
    give them, so that what hangs on them takes effect. The answers are the same.
    """
    kind = type(layer)
    if kind is not NonDynamicallyQuantizableLinear and kind is not nn.Linear:
        return f"{name} is a {kind.__name__}"
    state = layer.__dict__
    if (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    ):
        return f"{name} has hooks"
    if _has_any_global_hook():  # type: ignore[no-untyped-call]
        return "hooks for every module are registered"
    if "forward" in state:
        return f"{name}.forward has been replaced"
    parameters = state["_parameters"]
    if "weight" not in parameters or "bias" not in parameters:
        return f"a parameter of {name} has been replaced"
    if _any_overrides((*beside, parameters["weight"], parameters["bias"])):
        return "a parameter is of a tensor subclass that overrides torch functions"
    return ""


def _any_overrides(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether one is of a subclass that overrides torch functions.

    has_torch_function alone says so of every tensor under a mode, such as a default device or an export.
    """
    if not has_torch_function(tensors):
        return False
    not_overridden = nn.Parameter.__torch_function__
    return any(
        tensor is not None and type(tensor) is not Tensor and type(tensor).__torch_function__ is not not_overridden
        for tensor in tensors
    )


def _parts(packed: Tensor, widths: list[int], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value."""
    q, k, v = packed.split(widths, dim)  # type: ignore[no-untyped-call]
    return q, k, v


def _bias_parts(bias: Tensor | None, widths: list[int]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if bias is None:
        return None, None, None
    return _parts(bias, widths, 0)


def _projected_widths(module: MultiheadAttention) -> list[int]:
    return [
        module.num_heads * module.head_dim,
        module.num_kv_heads * module.head_dim,
        module.num_kv_heads * module.v_head_dim,
    ]


def _project_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_weight: Tensor | None,
    widths: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The three in-projections, by F.linear alone."""
    if weight is not None:
        if query is key and key is value:
            return _parts(F.linear(query, weight, bias), widths, -1)
        project_whole = False
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            # A statement of its own: TorchScript would compile the call in a condition.
            project_whole = _any_overrides((weight,))
        if project_whole:
            # A subclass may know F.linear and nothing else, no slicing: project whole, keep a third.
            q, _, _ = _parts(F.linear(query, weight, bias), widths, -1)
            _, k, v = _parts(F.linear(key, weight, bias), widths, -1)
            if value is not key:
                _, _, v = _parts(F.linear(value, weight, bias), widths, -1)
            return q, k, v
        q_weight, k_weight, v_weight = _parts(weight, widths, 0)
    assert q_weight is not None
    assert k_weight is not None
    assert v_weight is not None
    q_bias, k_bias, v_bias = _bias_parts(bias, widths)
    return F.linear(query, q_weight, q_bias), F.linear(key, k_weight, k_bias), F.linear(value, v_weight, v_bias)


def _project_and_attend(
    module: MultiheadAttention,
    in_parameters: tuple[Tensor | None, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> Any:
    """What out_proj is given, and the weights or None. Under torch.fx a proxy of the pair."""
    in_proj_weight, in_proj_bias, q_weight, k_weight, v_weight, bias_k, bias_v = in_parameters
    q, k, v = _project_in(
        query,
        key,
        value,
        in_proj_weight,
        in_proj_bias,
        q_weight,
        k_weight,
        v_weight,
        _projected_widths(module),
    )
    return _projected_op(
        q,
        k,
        v,
        module.num_heads,
        bias_k,
        bias_v,
        module.add_zero_attn,
        module.dropout if module.training else 0.0,
        key_padding_mask,
        need_weights,
        attn_mask,
        average_attn_weights,
        is_causal,
        module.batch_first,
        *(_options(module, q) if module._has_options else ()),
    )


def _options(module: MultiheadAttention, like: Tensor) -> tuple[int, str, Tensor | None, bool]:
    """The arguments of the operator that stand for what the stock module lacks."""
    sink = like.new_zeros(module.num_heads) if module.zero_sink else module.sink
    return module.num_kv_heads, module.causal_alignment, sink, module.weights_before_dropout


def _padded_forward(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    in_parameters = _in_parameters(module)
    in_proj_weight, in_proj_bias, q_weight, k_weight, v_weight, bias_k, bias_v = in_parameters
    out_proj = module._modules["out_proj"]
    assert out_proj is not None
    try:
        if not (module.__dict__["_has_options"] or _why_called(out_proj, "out_proj", in_parameters)):
            output, weights = _forward_op(
                query,
                key,
                value,
                module.embed_dim,
                module.num_heads,
                in_proj_weight,
                in_proj_bias,
                bias_k,
                bias_v,
                module.add_zero_attn,
                module.dropout,
                out_proj._parameters["weight"],
                out_proj._parameters["bias"],
                module.training,
                key_padding_mask,
                need_weights,
                attn_mask,
                in_proj_weight is None,
                q_weight,
                k_weight,
                v_weight,
                None,
                None,
                average_attn_weights,
                is_causal,
                module.batch_first,
            )
            return output, weights
        if not torch.jit.is_tracing() and query.size(-1) != module.embed_dim:  # type: ignore[attr-defined,no-untyped-call]
            raise ValueError(
                f"fused_mha::MultiheadAttention: query must have width E = {module.embed_dim}, got shape "
                f"{tuple(query.shape)}"
            )
        context, weights = _project_and_attend(
            module,
            in_parameters,
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
    except (RuntimeError, ValueError) as error:
        if _stock_asserts(module, query, key, value, key_padding_mask, attn_mask):
            raise AssertionError(str(error)) from None
        raise
    return out_proj(context), weights


def _stock_asserts(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> bool:
    """Whether these arguments, already refused, are refused with an AssertionError by the stock module."""
    dims = query.dim()
    if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
        return True
    if query.size(-1) != module.embed_dim:
        return True
    together = slice(None) if module._qkv_same_embed_dim else slice(-1)
    if key.shape[together] != value.shape[together]:
        return True
    batch_dim = 0 if module.batch_first else 1
    batch, keys = ([key.size(batch_dim)], key.size(1 - batch_dim)) if dims == 3 else ([], key.size(0))
    if key_padding_mask is not None and list(key_padding_mask.shape) != [*batch, keys]:
        return True
    if attn_mask is None or attn_mask.dim() == 2:
        return False
    return attn_mask.dim() != 3 or dims == 2


def _lengths(tensor: Tensor) -> Tensor:
    """Length of each sample, (N), of a nested tensor or of a batch of equal ones."""
    if tensor.is_nested:
        return _nested.lengths(tensor)
    return torch.full((tensor.size(0),), tensor.size(1), device=tensor.device)


def _nested_forward(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    need_weights: bool,
    attn_mask: Tensor | None,
    average_attn_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Nested tensors by way of the padded form: the padding of keys is hidden, that of queries dropped."""
    if not module.batch_first:
        raise AssertionError("fused_mha::MultiheadAttention: nested tensors are (N, L, E) and need batch_first=True")
    if key.is_nested != value.is_nested:
        raise AssertionError("fused_mha::MultiheadAttention: key and value must both be nested, or neither")
    if key.is_nested and key_padding_mask is not None:
        raise AssertionError(
            "fused_mha::MultiheadAttention: a nested key has no padding; key_padding_mask must be None, got "
            f"{tuple(key_padding_mask.shape)}"
        )
    padded_query = _nested.to_padded(query) if query.is_nested else query
    padded_key = key
    padded_value = value
    if key.is_nested:
        # One tensor stays one tensor: it then takes one in-projection.
        padded_key = padded_query if key is query else _nested.to_padded(key)
        padded_value = padded_query if value is query else padded_key if value is key else _nested.to_padded(value)
        key_lengths = _nested.lengths(key)
        if value is not key and not torch.equal(key_lengths, _nested.lengths(value)):
            raise AssertionError(
                "fused_mha::MultiheadAttention: key and value must have the same length in each sample"
            )
        key_padding_mask = _nested.padding(key_lengths, padded_key.size(1))
    if is_causal and attn_mask is None and module.causal_alignment == "bottom_right" and key is not query:
        # Each sample has a bottom right corner of its own, not that of the padded form.
        attn_mask = _nested.hidden_from_bottom_right(
            _lengths(query), _lengths(key), padded_query.size(1), padded_key.size(1)
        )
    output, weights = _padded_forward(
        module,
        padded_query,
        padded_key,
        padded_value,
        key_padding_mask,
        need_weights,
        attn_mask,
        average_attn_weights,
        is_causal,
    )
    if not query.is_nested:
        return output, weights
    return _nested.from_padded(output, like=query), _nested.hide_weights(weights, _nested.lengths(query))
