# SPDX-License-Identifier: BSD-3-Clause
"""Which way a call takes through the library, and why."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fused_mha import _C, functional
from fused_mha.module import MultiheadAttention, _in_parameters, _why_called
from fused_mha.replace import _why_left

__all__ = ["AttentionCall", "Choice", "Explanation", "explain"]

_WEIGHTS = ("none", "averaged", "per head", "none, log-sum-exps instead")
_GRADIENTS = ("query", "key", "value", "key_padding_mask", "attn_mask")  # and sink or score_weight


@dataclass(frozen=True)
class Choice:
    """One thing that a call chose: ``topic`` is what, ``choice`` is how, ``reason`` is why."""

    topic: str
    choice: str
    reason: str = ""


@dataclass(frozen=True)
class AttentionCall:
    """One run of the fused kernel.

    Attributes:
        module: name of the :class:`fused_mha.MultiheadAttention` that made it, as ``named_modules`` has it ("" where
            the module itself was explained), or None for an operator called otherwise.
        choices: in the order in which they are made.
        facts: the numbers behind them, as the kernel's door noted them: sizes by their letters, ``instruction_set``,
            ``few_rows``, ``threads``, ``kept_keys``, ``hidden_tiles`` and so on.
    """

    module: str | None
    choices: tuple[Choice, ...]
    facts: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, topic: str) -> Choice:
        for choice in self.choices:
            if choice.topic == topic:
                return choice
        raise KeyError(topic)

    def __str__(self) -> str:
        width = max(len(choice.topic) for choice in self.choices)
        return "\n".join(
            f"  {choice.topic:{width}}  {choice.choice}" + (f": {choice.reason}" if choice.reason else "")
            for choice in self.choices
        )


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. ``print`` shows it.

    Attributes:
        calls: runs of the fused kernel, in order.
        not_fused: name and reason of each stock attention module in the model.
        error: what the call raised, where it was refused.
    """

    calls: tuple[AttentionCall, ...]
    not_fused: tuple[tuple[str, str], ...] = ()
    error: Exception | None = None

    @property
    def fused(self) -> bool:
        """Whether the call went through and all attention that is known of was fused."""
        return bool(self.calls) and not self.not_fused and self.error is None

    def __str__(self) -> str:
        parts = []
        for i, call in enumerate(self.calls, 1):
            of = f" of {call.module}" if call.module else ""
            parts.append(f"attention call {i}{of}: fused\n{call}")
        if self.error is not None:
            parts.append(f"refused: {type(self.error).__name__}: {self.error}")
        elif not self.calls:
            parts.append("no fused kernel noted a call")
        parts += [f"not fused: {name or '(the module itself)'}: {reason}" for name, reason in self.not_fused]
        return "\n".join(parts)


def explain(target: Callable[..., Any] | Tensor, /, *args: Any, **kwargs: Any) -> Explanation:
    r"""Say which way a call takes: the door, the kernel, the instruction set, what the masks leave, with reasons.

    The call is made, once and for real: the kernel notes what it is about to do, so the explanation cannot differ from
    what happens. The states of the random generators, of the CPU and of GPUs in use, are put back afterwards. Hooks
    run, and so does whatever else the model does.

    Args:
        target: a :class:`fused_mha.MultiheadAttention`, any other module or function that leads to fused attention, or
            a query: ``explain(query, key, value, ...)`` explains :func:`fused_mha.functional.attention`, or
            :func:`fused_mha.functional.attention_with_weights` where ``average_attn_weights`` is given.
        args, kwargs: what the target is called with.

    Returns:
        An :class:`Explanation`. A call that is refused is explained by its error rather than raised, as far as it is a
        ``RuntimeError``, ``ValueError``, ``TypeError`` or ``AssertionError``. On a device without a kernel that notes
        calls, such as meta, there are no calls.

    Example::

        >>> query, key = torch.randn(2, 4, 1, 16), torch.randn(2, 4, 300, 16)
        >>> found = fused_mha.explain(query, key, key, is_causal=True)
        >>> found.fused, found.calls[0]["rows"].choice
        (True, 'few')
        >>> print(fused_mha.explain(query, key, key, dropout_p=2.0))
        refused: ValueError: fused_mha::attention: dropout_p must be in [0, 1], got 2
    """
    function = target
    if isinstance(target, Tensor):
        args = (target, *args)
        with_weights = "average_attn_weights" in kwargs
        function = functional.attention_with_weights if with_weights else functional.attention
    modules = dict(target.named_modules()) if isinstance(target, nn.Module) else {}
    compiled = any(_is_compiled(module) for module in modules.values())
    notes = _Notes()
    error: Exception | None = None
    with ExitStack() as stack:
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        stack.enter_context(torch.random.fork_rng(devices=gpus))
        for name, module in modules.items():
            # A hook would have a compiled model compiled again.
            if isinstance(module, MultiheadAttention) and not compiled:
                hook = module.register_forward_pre_hook(notes.hook(name), with_kwargs=True)
                stack.callback(hook.remove)
        _C.start_call_records()
        stack.callback(notes.take)
        try:
            function(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError, TypeError, AssertionError) as raised:
            error = raised.with_traceback(None)  # which would keep every tensor of its frames alive
    calls = tuple(
        AttentionCall(name, (*at_door, *_kernel_choices(facts, compiled)), facts)
        for name, at_door, facts in notes.calls()
    )
    return Explanation(calls, tuple(_stock_modules(modules)), error)


class _Notes:
    """What the kernel notes of its calls, and which module made each."""

    def __init__(self) -> None:
        self._facts: list[dict[str, Any]] = []
        self._modules: dict[int, tuple[str, tuple[Choice, ...]]] = {}  # by the number of the call that is to come

    def take(self) -> None:
        self._facts += _C.take_call_records()

    def hook(self, name: str) -> Callable[..., None]:
        def note_entry(module: MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.take()
            self._modules[len(self._facts)] = (name, tuple(_door_choices(module, args, kwargs)))
            _C.start_call_records()

        return note_entry

    def calls(self) -> Iterator[tuple[str | None, tuple[Choice, ...], dict[str, Any]]]:
        for i, facts in enumerate(self._facts):
            yield (*self._modules.get(i, (None, ())), facts)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _stock_modules(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    for name, module in modules.items():
        if isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            yield name, _why_left(module) or "a stock module, which replace_multihead_attention makes fused"


def _door_choices(module: MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Choice]:
    """How the module brings its inputs to the kernel."""
    why_called = _why_called(module.out_proj, "out_proj", _in_parameters(module))
    if module._has_options:
        why_called = "the module has options that stock lacks"
    if why_called:
        yield Choice("projections", "as modules", why_called)
    else:
        yield Choice("projections", "in one operator with the attention", "out_proj is a plain Linear")
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except TypeError:
        return  # the call itself is about to say so
    if any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in given.values()):
        yield Choice("nested tensors", "padded", "the kernel reads padded samples and hides what was added")
    if given.get("is_causal") and given.get("attn_mask") is not None:
        yield Choice("is_causal", "a hint, not applied", "attn_mask is given and alone decides")


def _kernel_choices(facts: Mapping[str, Any], compiled: bool) -> Iterator[Choice]:
    on_cpu = facts["device"] == "cpu"
    yield _sizes(facts)
    yield _dtype(facts)
    yield _device(facts)
    is_additive = bool(facts["score_weight"])
    if is_additive:
        yield Choice("scores", "additive", f"score_weight {facts['score_weight']}; no tensor of sums is made")
    if on_cpu:
        yield _instruction_set(facts)
    if on_cpu and not is_additive:
        yield _rows(facts)
        yield _threads(facts)
    if not on_cpu:
        yield _tensor_cores(facts)
    yield from _masks(facts) if on_cpu else _masks_unread(facts)
    before_dropout = "as they are before dropout" if facts["weights_before_dropout"] else ""
    yield Choice("weights", _WEIGHTS[facts["weights_mode"]], before_dropout)
    if facts["sink"]:
        yield Choice("sink", facts["sink"], "rows begin with it as with a key whose value is 0")
    if facts["dropout_p"] > 0:
        yield Choice("dropout", f"{facts['dropout_p']:g}", "drawn in the kernel, the same bits on every path")
    yield from _derivatives(facts, compiled)


def _sizes(facts: Mapping[str, Any]) -> Choice:
    sizes = ", ".join(f"{letter} = {facts[letter]}" for letter in ("N", "H", "L", "S", "D", "Dv"))
    reasons = ["packed without padding; L and S are the longest"] if facts["is_packed"] else []
    if facts["Hkv"] != facts["H"]:
        reasons.append(f"groups of {facts['H'] // max(facts['Hkv'], 1)} heads share one of {facts['Hkv']} key heads")
    if facts["always_visible_keys"]:
        reasons.append(f"the last {facts['always_visible_keys']} keys were appended and are outside all masks")
    return Choice("sizes", sizes, "; ".join(reasons))


def _dtype(facts: Mapping[str, Any]) -> Choice:
    sums = "sums are kept in " + ("float64" if facts["dtype"] == "float64" else "float32")
    device = facts["device"].partition(":")[0]
    autocast = "autocast chose it; " if torch.is_autocast_enabled(device) else ""
    return Choice("dtype", facts["dtype"], autocast + sums)


def _device(facts: Mapping[str, Any]) -> Choice:
    architectures = ", ".join(_C.build_info()["cuda_architectures"])
    return Choice("device", facts["device"], f"CUDA kernels for {architectures} are built" if architectures else "")


def _tensor_cores(facts: Mapping[str, Any]) -> Choice:
    forward, backward = facts["cuda_forward_refusal"], facts["cuda_backward_refusal"]
    if forward:
        return Choice("kernel", "multiply-adds", forward)
    return Choice("kernel", "tensor cores", f"but not backward: {backward}" if backward else "")


def _instruction_set(facts: Mapping[str, Any]) -> Choice:
    active = facts["instruction_set"]
    if active == _C.quickest_cpu_isa():
        return Choice("kernel", active, "the quickest that this build holds and this processor runs")
    cap = os.environ.get("FUSED_MHA_MAX_ISA")
    chosen_by = f"FUSED_MHA_MAX_ISA={cap}" if cap == active else "set_cpu_isa"
    return Choice("kernel", active, f"chosen by {chosen_by}; {_C.quickest_cpu_isa()} is the quickest here")


def _rows(facts: Mapping[str, Any]) -> Choice:
    limit = facts["few_rows_limit"]
    if not facts["few_rows"]:
        reason = f"L = {facts['L']} is more than {limit}, so packing keys pays"
        return Choice("rows", f"tiles of {facts['tile_rows']}", reason)
    splits = facts["key_splits"]
    reason = f"L = {facts['L']} is at most {limit}, so keys are read where they lie"
    return Choice("rows", "few", reason + (f", split into {splits} parts" if splits > 1 else ""))


def _threads(facts: Mapping[str, Any]) -> Choice:
    available = torch.get_num_threads()
    choice = f"{facts['threads']} of {available}"
    if facts["threads"] == available:
        return Choice("threads", choice, f"{facts['work_items']} work items")
    if facts["multiply_adds"] < facts["serial_multiply_adds"]:
        reason = f"{facts['multiply_adds']:.2g} multiply-adds are fewer than {facts['serial_multiply_adds']:.2g}"
        return Choice("threads", choice, reason)
    return Choice("threads", choice, f"no more than {facts['work_items']} work items")


def _causal_text(facts: Mapping[str, Any]) -> str:
    return "is_causal from the bottom right" if facts["bottom_right"] else "is_causal"


def _masks_unread(facts: Mapping[str, Any]) -> Iterator[Choice]:
    """Masks that lie on a device: reading them here would wait for it."""
    if facts["key_padding_mask"]:
        yield Choice("key_padding_mask", facts["key_padding_mask"], "read on the device")
    if facts["attn_mask"] or facts["is_causal"]:
        masks = [facts["attn_mask"]] if facts["attn_mask"] else []
        masks += [_causal_text(facts)] if facts["is_causal"] else []
        yield Choice("attn_mask", " and ".join(masks), "hidden tiles are skipped on the device")
    elif not facts["key_padding_mask"]:
        yield Choice("masks", "none")


def _masks(facts: Mapping[str, Any]) -> Iterator[Choice]:
    if facts["key_padding_mask"]:
        kept = f"{facts['kept_keys']} of {facts['all_keys']} keys kept"
        bias = "; finite numbers are added to scores" if facts["has_padding_bias"] else ""
        yield Choice("key_padding_mask", kept, f"{facts['key_padding_mask']}; hidden keys are never read{bias}")
    if facts["attn_mask"] or facts["is_causal"]:
        counts = [facts[f"{kind}_tiles"] for kind in ("hidden", "free", "mixed")]
        choice = "{} tiles skipped, {} free of masks, {} masked by element".format(*counts)
        masks = [facts["attn_mask"]] if facts["attn_mask"] else []
        if facts["is_causal"]:
            masks.append(_causal_text(facts))
        tile = f"tiles of {facts['tile_rows']} x {facts['tile_keys']}"
        yield Choice("attn_mask", choice, f"{' and '.join(masks)}; {tile}")
    elif not facts["key_padding_mask"]:
        yield Choice("masks", "none")


def _derivatives(facts: Mapping[str, Any], compiled: bool) -> Iterator[Choice]:
    names = (*_GRADIENTS, "score_weight" if facts["score_weight"] else "sink")
    wanted = [name for name, is_wanted in zip(names, facts["gradients"], strict=True) if is_wanted]
    if compiled:
        yield Choice("backward", "not known here", "torch.compile made the derivative a graph of its own")
    elif wanted:
        splits = 1 if facts["score_weight"] else facts.get("backward_key_splits", 1)
        parts = f"; keys in {splits} parts" if splits > 1 else ""
        yield Choice("backward", "fused", f"for {', '.join(wanted)}; weights are computed again tile by tile{parts}")
    else:
        off = "" if torch.is_grad_enabled() else "gradients are switched off"
        yield Choice("backward", "none", off or "nothing that reaches the kernel requires a gradient")
    if facts["has_tangent"]:
        yield Choice("forward mode", "unfused", "a tangent reaches the kernel; PyTorch's own operations carry it")
