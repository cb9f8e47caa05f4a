# SPDX-License-Identifier: BSD-3-Clause
"""vmap: how the private operators take a mapped dimension, of size B. Public ones are made of these.

One call of the kernels does all B. The mapped dimension becomes part of N or of H, by a view wherever strides allow:

* ``BEFORE_BATCH``, (B*N, H, L, D): always possible;
* ``BEFORE_HEADS``, (N, B*H, L, D): where one key_padding_mask serves all B and weights are not averaged over heads;
* ``AFTER_HEADS``, (N, H*B, L, D): as ``BEFORE_HEADS``, where keys and values are not mapped; they serve all B as those
  of grouped queries do.

Of those possible the one that copies the fewest bytes is taken, so a mask is read in place where any of them can.

Additive attention is folded likewise. Its score_weight has one row a head and none a sample, so where it is mapped, or
its gradient wanted for each, there are the places beside the heads alone; where these are barred, each has a call of
its own.

With dropout each of the B has a call of its own: an element's bits depend on (n, h, l, s), and must be those that a
loop would have had. ``randomness=`` takes effect where the state of the generator is drawn: a mapped state makes
another mask for each, one that is not mapped the same for all.

In Python, because ``torch.library.register_vmap`` is what PyTorch promises for this; the headers with which its own
rules are written in C++ cannot be compiled from an installed torch.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_AVERAGED = 1  # core::WeightsMode::kAveraged

#: Places of query, key, value, key_padding_mask, attn_mask and sink in what follows. Additive attention has
#: score_weight, seen as (1, H, 1, D), in the place of the sink.
_QUERY, _KEY, _VALUE, _PADDING, _MASK, _SINK = range(6)
#: Those that may have size 1 where the others have N or H.
_BROADCAST = (_MASK, _SINK)


class _Place(enum.IntEnum):
    """The number is where the mapped dimension then is in (N, H, ...)."""

    BEFORE_BATCH = 0
    BEFORE_HEADS = 1
    AFTER_HEADS = 2

    @property
    def merged_dim(self) -> int:
        """The dimension of (N, H, ...) that the mapped one is merged with."""
        return min(self.value, 1)


class _Operand(NamedTuple):
    """A tensor below the vmap at hand; its first dimension is the mapped one if it has one."""

    tensor: Tensor
    mapped: bool

    def size(self, dim: int) -> int:
        """Of the tensor as each of the B sees it."""
        return self.tensor.size(dim + self.mapped)

    def of_sample(self, sample: int) -> Tensor:
        return self.tensor.select(0, sample) if self.mapped else self.tensor


def _operand(tensor: Tensor | None, mapped_dim: int | None) -> _Operand | None:
    if tensor is None:
        return None
    return _Operand(tensor, False) if mapped_dim is None else _Operand(tensor.movedim(mapped_dim, 0), True)


def _with_mapped_dim(operand: _Operand, place: _Place, batch_size: int) -> Tensor:
    """(N, H, ...) with the mapped dimension put in; stride 0 where the operand has none."""
    if operand.mapped:
        return operand.tensor.movedim(0, place)
    sizes = list(operand.tensor.shape)
    sizes.insert(place, batch_size)
    return operand.tensor.unsqueeze(place).expand(sizes)


def _merge(operand: _Operand, place: _Place, batch_size: int) -> Tensor:
    return _with_mapped_dim(operand, place, batch_size).flatten(place.merged_dim, place.merged_dim + 1)


def _unmerge(tensor: Tensor, place: _Place, batch_size: int, own: int) -> Tensor:
    """(B, N, H, ...) from what was merged; ``own`` is the size that the mapped dimension was merged with."""
    dim, sizes = place.merged_dim, list(tensor.shape)
    sizes[dim : dim + 1] = (own, batch_size) if place is _Place.AFTER_HEADS else (batch_size, own)
    return tensor.view(sizes).movedim(place, 0)


def _copied_bytes(operand: _Operand, place: _Place, batch_size: int) -> int:
    """What _merge copies."""
    split, dim = _with_mapped_dim(operand, place, batch_size), place.merged_dim
    outer, inner = split.shape[dim : dim + 2]
    is_view = outer == 1 or inner == 1 or split.stride(dim) == inner * split.stride(dim + 1)
    return 0 if is_view else split.numel() * split.element_size()


class _Folded:
    """The tensors of a call, apart from the generator's state, and how all B of them become one call.

    ``wanted`` says for which the call computes gradients: one for each of the B, whether the tensor is mapped or not.
    ``beside_heads`` bars the place beside the batch.
    """

    def __init__(
        self,
        operands: list[_Operand | None],
        batch_size: int,
        averages_heads: bool,
        wanted: list[bool],
        beside_heads: bool = False,
    ) -> None:
        self.operands = operands
        self.batch_size = batch_size
        self.serves_all = [o is None or not (o.mapped or w) for o, w in zip(operands, wanted, strict=True)]
        self.place = self._choose_place(averages_heads, beside_heads)

    def argument(self, which: int) -> Tensor | None:
        """As the one call takes it."""
        operand = self.operands[which]
        if operand is None or self._stays(which, operand, self.place):
            return None if operand is None else operand.tensor
        return _merge(self._to_merge(which, operand, self.place), self.place, self.batch_size)

    def arguments(self) -> list[Tensor | None]:
        return [self.argument(which) for which in range(len(self.operands))]

    def like_query(self, operand: _Operand | None) -> Tensor | None:
        """Something else that is (N, H, ...) with the sizes of the query."""
        return None if operand is None else _merge(operand, self.place, self.batch_size)

    def result(self, merged: Tensor) -> Tensor:
        """A result of the one call, with the mapped dimension in front."""
        return _unmerge(merged, self.place, self.batch_size, self._size_of(_QUERY))

    def gradient(self, merged: Tensor, which: int) -> Tensor:
        """The same for the gradient of an argument."""
        own = self._size_of(which)
        broadcast = which in _BROADCAST
        split = _unmerge(merged, self.place, self.batch_size, self._size_of(_QUERY) if broadcast else own)
        return split.sum(1 + self.place.merged_dim, keepdim=True) if broadcast and own == 1 else split

    def _size_of(self, which: int) -> int:
        operand = self.operands[which]
        assert operand is not None
        return operand.size(self.place.merged_dim)

    def _stays(self, which: int, operand: _Operand, place: _Place) -> bool:
        """Whether one and the same tensor serves all B."""
        if not self.serves_all[which]:
            return False
        if which in _BROADCAST:
            return operand.size(place.merged_dim) == 1
        if which == _PADDING:
            return place is not _Place.BEFORE_BATCH
        return which != _QUERY and place is _Place.AFTER_HEADS

    def _to_merge(self, which: int, operand: _Operand, place: _Place) -> _Operand:
        """As large as the query where it may be of size 1."""
        if which not in _BROADCAST:
            return operand
        query = self.operands[_QUERY]
        assert query is not None
        sizes = list(operand.tensor.shape)
        sizes[place.merged_dim + operand.mapped] = query.size(place.merged_dim)
        return _Operand(operand.tensor.expand(sizes), operand.mapped)

    def _places(self, averages_heads: bool, beside_heads: bool) -> list[_Place]:
        """Those possible; of two that cost the same the first is taken."""
        places = [] if beside_heads else [_Place.BEFORE_BATCH]
        if not averages_heads and self.serves_all[_PADDING]:
            if self.serves_all[_KEY] and self.serves_all[_VALUE]:
                places.append(_Place.AFTER_HEADS)
            places.append(_Place.BEFORE_HEADS)
        return places

    def _choose_place(self, averages_heads: bool, beside_heads: bool) -> _Place:
        places = self._places(averages_heads, beside_heads)
        given = [(which, operand) for which, operand in enumerate(self.operands) if operand is not None]
        sizes = [self.batch_size, *(size for _, operand in given for size in operand.tensor.shape)]
        if any(isinstance(size, torch.SymInt) for size in sizes):
            # Costs cannot be compared without guards, for which other sizes would be compiled again.
            return places[0]

        def cost(place: _Place) -> int:
            return sum(
                _copied_bytes(self._to_merge(which, operand, place), place, self.batch_size)
                for which, operand in given
                if not self._stays(which, operand, place)
            )

        return min(places, key=cost)


def _stacked(
    batch_size: int, call: Callable[[int], tuple[Tensor, ...]]
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """Results of a call for each of the B, and where their mapped dimension is."""
    results = tuple(torch.stack(parts) for parts in zip(*map(call, range(batch_size)), strict=True))
    return results, (0,) * len(results)


def _of_sample(operand: _Operand | None, sample: int) -> Tensor | None:
    return None if operand is None else operand.of_sample(sample)


def _forward_rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    op = torch.ops.fused_mha._attention_forward
    *operands, state = (_operand(args[i], in_dims[i]) for i in (0, 1, 2, 3, 4, 8))
    is_causal, dropout_p, scale = args[5:8]
    visible, mode = args[9:11]
    bottom_right, sink, before_dropout = _options(args[11:], in_dims[11:])
    operands.append(sink)
    if dropout_p > 0 and info.batch_size > 0:

        def call(sample: int) -> tuple[Tensor, ...]:
            *tensors, own_sink = (_of_sample(operand, sample) for operand in operands)
            numbers = (is_causal, dropout_p, scale, _of_sample(state, sample), visible, mode)
            results: tuple[Tensor, ...] = op(*tensors, *numbers, bottom_right, own_sink, before_dropout)
            return results

        return _stacked(info.batch_size, call)
    folded = _Folded(operands, info.batch_size, mode == _AVERAGED, [False] * 6)
    *tensors, merged_sink = folded.arguments()
    numbers = (is_causal, 0.0, scale, None, visible, mode)
    output, weights, *statistics = op(*tensors, *numbers, bottom_right, merged_sink, before_dropout)
    weights_dim = 0 if mode else None
    results = (folded.result(output), folded.result(weights) if mode else weights, *map(folded.result, statistics))
    return results, (0, weights_dim, 0, 0)


def _backward_rule(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    op = torch.ops.fused_mha._attention_backward
    grad_output, grad_weights, *operands, output, row_max, row_sum, state = (
        _operand(args[i], in_dims[i]) for i in (*range(10), 13)
    )
    is_causal, dropout_p, scale = args[10:13]
    visible, mode, wanted = args[14:17]
    bottom_right, sink, before_dropout = _options(args[17:], in_dims[17:])
    operands.append(sink)
    if dropout_p > 0 and info.batch_size > 0:

        def call(sample: int) -> tuple[Tensor, ...]:
            gradients = (_of_sample(operand, sample) for operand in (grad_output, grad_weights))
            *tensors, own_sink = (_of_sample(operand, sample) for operand in operands)
            statistics = (_contiguous(_of_sample(operand, sample)) for operand in (row_max, row_sum))
            numbers = (is_causal, dropout_p, scale, _of_sample(state, sample), visible, mode, wanted)
            options = (bottom_right, own_sink, before_dropout)
            results: tuple[Tensor, ...] = op(
                *gradients, *tensors, _of_sample(output, sample), *statistics, *numbers, *options
            )
            return results

        return _stacked(info.batch_size, call)
    averages_heads = mode == _AVERAGED and grad_weights is not None
    folded = _Folded(operands, info.batch_size, averages_heads, list(wanted))
    *tensors, merged_sink = folded.arguments()
    results = op(
        folded.like_query(grad_output),
        folded.like_query(grad_weights),
        *tensors,
        folded.like_query(output),
        _contiguous(folded.like_query(row_max)),
        _contiguous(folded.like_query(row_sum)),
        is_causal,
        0.0,
        scale,
        None,
        visible,
        mode,
        wanted,
        bottom_right,
        merged_sink,
        before_dropout,
    )
    # One that nobody wants is an empty tensor, the same for all.
    return (
        tuple(folded.gradient(result, i) if wanted[i] else result for i, result in enumerate(results)),
        tuple(0 if w else None for w in wanted),
    )


def _options(given: tuple[Any, ...], in_dims: tuple[Any, ...]) -> tuple[bool, _Operand | None, bool]:
    """bottom_right, sink and weights_before_dropout: the dispatcher leaves defaults at the end out."""
    options: list[Any] = [False, None, False]
    options[: len(given)] = given
    bottom_right, sink, before_dropout = options
    return bottom_right, _operand(sink, in_dims[1] if len(given) > 1 else None), before_dropout


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """As the kernels want row_max and row_sum."""
    return None if tensor is None else tensor.contiguous()


def _dropout_mask_rule(info: Any, in_dims: tuple[Any, ...], rng_state: Tensor, *args: Any) -> tuple[Tensor, int]:
    states = rng_state.movedim(in_dims[0], 0)
    if info.batch_size == 0:
        N, H, L, S, _ = args
        return states.new_empty((0, N, H, L, S), dtype=torch.bool), 0
    return torch.stack([torch.ops.fused_mha.dropout_mask(state, *args) for state in states.unbind()]), 0


def _meta_sample(arg: Any, mapped_dim: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    sizes = [size for dim, size in enumerate(arg.shape) if dim != mapped_dim]
    return arg.new_empty(sizes, device="meta")


def _loop_rule(op: Callable[..., tuple[Tensor, ...]], statistics: tuple[int, ...] = ()) -> Callable[..., Any]:
    """A call for each of the B. ``statistics`` are the places of row_max and row_sum, which have to be contiguous."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        def own(place: int, sample: int) -> Any:
            arg, mapped_dim = args[place], in_dims[place]
            if not isinstance(arg, Tensor) or mapped_dim is None:
                return arg
            part = arg.select(mapped_dim, sample)
            return part.contiguous() if place in statistics else part

        def call(sample: int) -> tuple[Tensor, ...]:
            return op(*(own(place, sample) for place in range(len(args))))

        if info.batch_size > 0:
            return _stacked(info.batch_size, call)
        # No call to stack: what one would have given, without its numbers.
        shapes = op(*(_meta_sample(arg, mapped_dim) for arg, mapped_dim in zip(args, in_dims, strict=True)))
        return tuple(torch.empty_like(s, device=args[0].device)[None][:0] for s in shapes), (0,) * len(shapes)

    return rule


def _fold_additive(
    operands: list[_Operand | None], batch_size: int, averages_heads: bool, wanted: list[bool]
) -> _Folded | None:
    """The one call, or None where there is no place for the mapped dimension."""
    weight, padding = operands[_SINK], operands[_PADDING]
    assert weight is not None
    beside_heads = weight.mapped or wanted[_SINK]
    one_padding = padding is None or not (padding.mapped or wanted[_PADDING])
    if beside_heads and (averages_heads or not one_padding):
        return None
    tensor = weight.tensor
    if tensor.dim() - weight.mapped == 1:
        tensor = tensor.unsqueeze(-2)
    as_heads = _Operand(tensor.unsqueeze(-2).unsqueeze(-4), weight.mapped)
    return _Folded([*operands[:_SINK], as_heads], batch_size, averages_heads, wanted, beside_heads)


def _folded_additive_arguments(folded: _Folded) -> list[Tensor | None]:
    """query, key, value, score_weight, key_padding_mask, attn_mask of the one call."""
    query, key, value, padding, mask, weight = folded.arguments()
    assert weight is not None
    rows = weight[0, :, 0]
    return [query, key, value, rows[0] if rows.size(0) == 1 else rows, padding, mask]


def _additive_forward_rule(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    op = torch.ops.fused_mha._additive_attention_forward
    query, key, value, weight, padding, mask = (_operand(args[i], in_dims[i]) for i in range(6))
    is_causal, dropout_p, _, mode = args[6:]
    operands = [query, key, value, padding, mask, weight]
    folded = None if dropout_p > 0 else _fold_additive(operands, info.batch_size, mode == _AVERAGED, [False] * 6)
    if folded is None:
        results: tuple[tuple[Tensor, ...], tuple[int | None, ...]] = _loop_rule(op)(info, in_dims, *args)
        return results
    output, weights, *statistics = op(*_folded_additive_arguments(folded), is_causal, 0.0, None, mode)
    returned = folded.result(weights) if mode else weights
    return (folded.result(output), returned, *map(folded.result, statistics)), (0, 0 if mode else None, 0, 0)


def _additive_backward_rule(
    info: Any, in_dims: tuple[Any, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    op = torch.ops.fused_mha._additive_attention_backward
    grad_output, grad_weights, query, key, value, weight, padding, mask, output, row_max, row_sum = (
        _operand(args[i], in_dims[i]) for i in range(11)
    )
    is_causal, dropout_p, _, mode, wanted = args[11:]
    operands = [query, key, value, padding, mask, weight]
    places = (_QUERY, _KEY, _VALUE, _SINK, _PADDING, _MASK)  # of the gradients in the order in which they come
    wanted_places = [wanted[places.index(place)] for place in range(6)]
    averages_heads = mode == _AVERAGED and grad_weights is not None
    folded = None if dropout_p > 0 else _fold_additive(operands, info.batch_size, averages_heads, wanted_places)
    if folded is None:
        looped: tuple[tuple[Tensor, ...], tuple[int | None, ...]] = _loop_rule(op, (9, 10))(info, in_dims, *args)
        return looped
    results = op(
        folded.like_query(grad_output),
        folded.like_query(grad_weights),
        *_folded_additive_arguments(folded),
        folded.like_query(output),
        _contiguous(folded.like_query(row_max)),
        _contiguous(folded.like_query(row_sum)),
        is_causal,
        0.0,
        None,
        mode,
        wanted,
    )

    def gradient(which: int) -> Tensor:
        result: Tensor = results[which]
        if places[which] != _SINK:
            return folded.gradient(result, places[which])
        assert weight is not None
        rows = folded.gradient(result.view(1, -1, 1, result.size(-1)), _SINK)[:, 0, :, 0]
        return rows[:, 0] if weight.tensor.dim() - weight.mapped == 1 else rows

    # One that nobody wants is an empty tensor, the same for all.
    return (
        tuple(gradient(i) if wanted[i] else result for i, result in enumerate(results)),
        tuple(0 if w else None for w in wanted),
    )


def register() -> None:
    # Sequences differ in length.
    for name, statistics in (("_varlen_forward", ()), ("_varlen_backward", (7, 8))):
        torch.library.register_vmap(f"fused_mha::{name}", _loop_rule(getattr(torch.ops.fused_mha, name), statistics))
    torch.library.register_vmap("fused_mha::_additive_attention_forward", _additive_forward_rule)
    torch.library.register_vmap("fused_mha::_additive_attention_backward", _additive_backward_rule)
    torch.library.register_vmap("fused_mha::_attention_forward", _forward_rule)
    torch.library.register_vmap("fused_mha::_attention_backward", _backward_rule)
    torch.library.register_vmap("fused_mha::dropout_mask", _dropout_mask_rule)
