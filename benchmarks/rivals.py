# SPDX-License-Identifier: BSD-3-Clause
"""The sides of a case: this library, and what else computes the same on the device of its inputs.

Each function takes a case and its inputs and returns a callable for the whole of the case's work, or raises Unsupported
with the reason. Merging masks into the one that a rival takes, and exporting a model, happens here and is not timed:
the rivals are shown at their best.
"""

import contextlib
from collections.abc import Callable, Iterator

import fused_mha
import torch
import torch.nn.functional as F
from cases import Case, Inputs, hidden_mask
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Call = Callable[[], object]
Builder = Callable[[Case, Inputs], Call]


class UnsupportedError(Exception):
    """A rival cannot do a case, or is not installed; the text says why."""


def _with_backward(case: Case, forward: Callable[[], Tensor], leaves: list[Tensor], grad_output: Tensor) -> Call:
    """Add the case's backward pass to a callable that returns the output."""
    if case.passes == "forward":

        def run() -> Tensor:
            with torch.no_grad():
                return forward()

        return run
    if case.passes == "backward":
        output = forward()
        return lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

    def step() -> tuple[Tensor, ...]:
        output = forward()
        return output, *torch.autograd.grad(output, leaves, grad_output)

    return step


# ------------------------------------------------------------------------------------------------------- this library


def ours(case: Case, inputs: Inputs) -> Call:
    if case.module:
        return _module_call(case, inputs, _module(fused_mha.MultiheadAttention, case, inputs), need_weights=True)
    operator = torch.ops.fused_mha.attention_with_weights if case.weights else torch.ops.fused_mha.attention

    def forward() -> Tensor:
        result = operator(
            inputs.query,
            inputs.key,
            inputs.value,
            key_padding_mask=inputs.key_padding_mask,
            attn_mask=inputs.attn_mask,
            is_causal=inputs.is_causal,
            dropout_p=case.dropout,
        )
        return result[0] if case.weights else result

    return _with_backward(case, forward, inputs.leaves(), inputs.grad_output)


# ------------------------------------------------------------------------------------- scaled_dot_product_attention


def _sdpa_mask(case: Case, inputs: Inputs) -> Tensor | None:
    """The single mask that SDPA takes: bool, True = visible, or floating in the dtype of the query."""
    only_causal = inputs.is_causal and inputs.key_padding_mask is None and inputs.attn_mask is None
    hidden = None if only_causal else hidden_mask(inputs, case.L, case.S)
    added = inputs.attn_mask
    if added is None or added.dtype == torch.bool:
        return None if hidden is None else ~hidden
    added = added.to(case.dtype)
    return added if hidden is None else added.masked_fill(hidden, -torch.inf)


@contextlib.contextmanager
def _backend(backend: SDPBackend | None) -> Iterator[None]:
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        yield


def _sdpa(case: Case, inputs: Inputs, backend: SDPBackend | None) -> Call:
    if case.module:
        raise UnsupportedError("not a module")
    if case.weights:
        raise UnsupportedError("returns no weights")
    mask = _sdpa_mask(case, inputs)

    def forward() -> Tensor:
        with _backend(backend):
            return F.scaled_dot_product_attention(
                inputs.query,
                inputs.key,
                inputs.value,
                attn_mask=mask,
                dropout_p=case.dropout,
                is_causal=inputs.is_causal and mask is None,
                enable_gqa=case.key_heads != case.H,
            )

    return _with_backward(case, forward, inputs.leaves(), inputs.grad_output)


def sdpa(case: Case, inputs: Inputs) -> Call:
    """The backend that torch chooses."""
    return _sdpa(case, inputs, None)


def sdpa_flash(case: Case, inputs: Inputs) -> Call:
    return _sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)


def sdpa_efficient(case: Case, inputs: Inputs) -> Call:
    return _sdpa(case, inputs, SDPBackend.EFFICIENT_ATTENTION)


def sdpa_cudnn(case: Case, inputs: Inputs) -> Call:
    return _sdpa(case, inputs, SDPBackend.CUDNN_ATTENTION)


def sdpa_math(case: Case, inputs: Inputs) -> Call:
    if not case.weights:
        return _sdpa(case, inputs, SDPBackend.MATH)
    return _math_with_weights(case, inputs)


def _math_with_weights(case: Case, inputs: Inputs) -> Call:
    """Attention that returns weights, from the operator that torch's own math backend consists of."""
    if case.has_backward:
        raise UnsupportedError("weights are timed forward only")
    mask = _sdpa_mask(case, inputs)

    def forward() -> Tensor:
        output, weights = torch.ops.aten._scaled_dot_product_attention_math(
            inputs.query, inputs.key, inputs.value, mask, case.dropout, inputs.is_causal and mask is None
        )
        weights.mean(dim=1)
        return output

    return _with_backward(case, forward, inputs.leaves(), inputs.grad_output)


# ---------------------------------------------------------------------------------------------------------- modules


def _module(kind: type[nn.MultiheadAttention], case: Case, inputs: Inputs) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = kind(case.H * case.D, case.H, dropout=case.dropout, batch_first=True, dtype=case.dtype)
    return module.to(inputs.query.device).train(case.has_backward)


def _module_call(case: Case, inputs: Inputs, module: nn.MultiheadAttention, need_weights: bool) -> Call:
    def forward() -> Tensor:
        return module(
            inputs.query,
            inputs.key,
            inputs.value,
            key_padding_mask=inputs.key_padding_mask,
            attn_mask=inputs.attn_mask,
            need_weights=need_weights,
        )[0]

    distinct = {id(leaf): leaf for leaf in inputs.leaves()}
    return _with_backward(case, forward, [*distinct.values(), *module.parameters()], inputs.grad_output)


def _stock(case: Case, inputs: Inputs, need_weights: bool) -> Call:
    if not case.module:
        raise UnsupportedError("is a module")
    return _module_call(case, inputs, _module(nn.MultiheadAttention, case, inputs), need_weights)


def stock(case: Case, inputs: Inputs) -> Call:
    """The default call."""
    return _stock(case, inputs, need_weights=True)


def stock_without_weights(case: Case, inputs: Inputs) -> Call:
    return _stock(case, inputs, need_weights=False)


# ---------------------------------------------------------------------------------------------------- other engines


def flex(case: Case, inputs: Inputs) -> Call:
    if case.module or case.weights or case.dropout:
        raise UnsupportedError("no dropout, no weights")
    if case.has_backward and inputs.query.device.type == "cpu":
        raise UnsupportedError("on a CPU: forward only")
    if case.has_backward and case.mask == "bias":
        raise UnsupportedError("a mask that score_mod captures gets no gradient here")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    padding, mask = inputs.key_padding_mask, inputs.attn_mask
    bool_mask = mask if mask is not None and mask.dtype == torch.bool else None
    block_mask = score_mod = None
    if padding is not None or bool_mask is not None or inputs.is_causal:

        def visible(n: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            seen = row >= column if inputs.is_causal else row >= 0
            if padding is not None:
                seen = seen & ~padding[n, column]
            if bool_mask is not None:
                seen = seen & ~bool_mask[row, column]
            return seen

        N = case.N if padding is not None else None
        block_mask = create_block_mask(visible, N, None, case.L, case.S, device=inputs.query.device)
    if mask is not None and bool_mask is None:
        added = mask.expand(1, case.H, case.L, case.S)[0]

        def score_mod(score: Tensor, n: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + added[h, row, column]

    # Forget the earlier cases: past a limit of variants torch would run uncompiled, and slowly.
    torch.compiler.reset()
    attention = torch.compile(flex_attention, dynamic=False)
    return _with_backward(
        case,
        lambda: attention(
            inputs.query,
            inputs.key,
            inputs.value,
            score_mod=score_mod,
            block_mask=block_mask,
            enable_gqa=case.key_heads != case.H,
        ),
        inputs.leaves(),
        inputs.grad_output,
    )


def _only_plain_forward(case: Case) -> None:
    plain = not (case.module or case.weights or case.has_backward or case.dropout or case.mask or case.padding)
    if not plain or case.dtype != torch.float32 or case.key_heads != case.H:
        raise UnsupportedError("compared on float32 forward without masks only")


def onnx_runtime(case: Case, inputs: Inputs) -> Call:
    """The contributed operator MultiHeadAttention, which takes (N, L, H * D)."""
    _only_plain_forward(case)
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed") from error

    def info(name: str) -> object:
        return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)

    names = ["query", "key", "value"]
    node = onnx.helper.make_node("MultiHeadAttention", names, ["output"], domain="com.microsoft", num_heads=case.H)
    graph = onnx.helper.make_graph([node], "attention", [info(name) for name in names], [info("output")])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = torch.get_num_threads()
    session_options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options, ["CPUExecutionProvider"])
    tensors = (inputs.query, inputs.key, inputs.value)
    feed = {name: t.transpose(1, 2).flatten(2).numpy() for name, t in zip(names, tensors, strict=True)}

    def run() -> Tensor:
        output = torch.from_numpy(session.run(None, feed)[0])
        return output.unflatten(2, (case.H, case.Dv)).transpose(1, 2)

    return run


def openvino(case: Case, inputs: Inputs) -> Call:
    """Its ScaledDotProductAttention, float32 arithmetic."""
    _only_plain_forward(case)
    try:
        import openvino as ov
        from openvino import opset13
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed") from error

    tensors = (inputs.query, inputs.key, inputs.value)
    parameters = [opset13.parameter(list(t.shape), ov.Type.f32) for t in tensors]
    model = ov.Model([opset13.scaled_dot_product_attention(*parameters)], parameters)
    config = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
    feed = [ov.Tensor(t.numpy(), shared_memory=True) for t in tensors]

    def run() -> Tensor:
        request.infer(feed, share_inputs=True, share_outputs=True)
        return torch.from_numpy(request.get_output_tensor().data)

    return run


#: Sides of torch that a case's ratio may be taken to; the quickest counts.
SDPA: dict[str, Builder] = {"sdpa": sdpa, "sdpa flash": sdpa_flash, "sdpa math": sdpa_math}
SDPA_ON_GPU: dict[str, Builder] = {**SDPA, "sdpa efficient": sdpa_efficient, "sdpa cudnn": sdpa_cudnn}
STOCK: dict[str, Builder] = {"stock": stock, "stock, no weights": stock_without_weights}
OTHERS: dict[str, Builder] = {"onnx runtime": onnx_runtime, "openvino": openvino}
SLOW_TO_BUILD: dict[str, Builder] = {"flex": flex}


def chosen(case: Case, *, quick: bool, full: bool, device: str) -> dict[str, Builder]:
    """The rivals of a case. A quick run leaves out what repeats or is slow to build; a full one adds FlexAttention."""
    if case.module:
        return {"stock": stock} if quick else STOCK
    if quick:
        return {"sdpa math": sdpa_math} if case.weights else {"sdpa": sdpa}
    if device != "cpu":
        return SDPA_ON_GPU | (SLOW_TO_BUILD if full else {})
    return SDPA | OTHERS | (SLOW_TO_BUILD if full else {})


def build(case: Case, inputs: Inputs, builders: dict[str, Builder]) -> tuple[dict[str, Call], dict[str, str]]:
    """Build the rivals and call each once. Returns those that work, and the others with the reason why not."""
    calls, skipped = {}, {}
    for name, builder in builders.items():
        try:
            call = builder(case, inputs)
            call()
        except UnsupportedError as reason:
            skipped[name] = str(reason)
        except RuntimeError as error:  # how a backend of torch says that it does not do this
            skipped[name] = str(error).splitlines()[0]
        else:
            calls[name] = call
    return calls, skipped
