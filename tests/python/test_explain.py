# SPDX-License-Identifier: BSD-3-Clause
"""fused_mha.explain says what really happens, and why; python -m fused_mha says what the build is and checks it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import fused_mha
import pytest
import torch
from cases import later
from fused_mha import _C, __main__, functional
from torch import nn

explain = fused_mha.explain


def tensors(L: int = 50, S: int = 70, H: int = 4, Hkv: int = 4, D: int = 8, **options) -> list[torch.Tensor]:
    return [torch.randn(2, heads, length, D, **options) for heads, length in ((H, L), (Hkv, S), (Hkv, S))]


def only_call(explanation: fused_mha.Explanation) -> fused_mha.AttentionCall:
    assert explanation.error is None, explanation
    assert len(explanation.calls) == 1
    assert str(explanation).startswith("attention call 1")
    return explanation.calls[0]


# Each choice, and the reason for it.


@pytest.mark.parametrize("L", [1, 4, 5, 50])
def test_rows(L: int) -> None:
    call = only_call(explain(*tensors(L=L)))
    few = call.facts["few_rows_limit"] >= L
    assert call.facts["few_rows"] == few
    assert call["rows"].choice == ("few" if few else "tiles of 48")
    assert f"L = {L} is {'at most' if few else 'more than'} {call.facts['few_rows_limit']}" in call["rows"].reason


def test_few_rows_split_long_keys() -> None:
    call = only_call(explain(*tensors(L=1, S=4096, H=1, Hkv=1)))
    assert call.facts["key_splits"] > 1
    assert f"split into {call.facts['key_splits']} parts" in call["rows"].reason
    assert only_call(explain(*tensors(L=1, S=64))).facts["key_splits"] == 1


def test_instruction_set(isa: str) -> None:
    call = only_call(explain(*tensors()))
    assert call["kernel"].choice == isa
    quickest = _C.quickest_cpu_isa()
    assert call["kernel"].reason.startswith("the quickest" if isa == quickest else "chosen by set_cpu_isa")


def test_threads(threads) -> None:
    threads(3)
    small, large = only_call(explain(*tensors(L=5, S=5))), only_call(explain(*tensors(L=600, S=600, D=64)))
    assert small["threads"].choice == "1 of 3"
    assert "multiply-adds are fewer than" in small["threads"].reason
    assert large["threads"].choice == "3 of 3"
    few_items = only_call(explain(*[t[:1, :1] for t in tensors(L=48, S=600, D=64)]))
    assert few_items.facts["work_items"] == 1
    assert few_items["threads"].choice == "1 of 3"
    assert "no more than 1 work item" in few_items["threads"].reason


def test_sizes_and_groups() -> None:
    call = only_call(explain(*tensors(H=4, Hkv=2)))
    assert call["sizes"].choice == "N = 2, H = 4, L = 50, S = 70, D = 8, Dv = 8"
    assert call["sizes"].reason == "groups of 2 heads share one of 2 key heads"
    assert only_call(explain(*tensors()))["sizes"].reason == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    call = only_call(explain(*tensors(dtype=dtype)))
    assert call["dtype"].choice == str(dtype).removeprefix("torch.")
    assert call["dtype"].reason == f"sums are kept in {'float64' if dtype == torch.float64 else 'float32'}"


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = only_call(explain(*tensors()))
    assert call["dtype"].choice == "bfloat16"
    assert "autocast chose it" in call["dtype"].reason


@pytest.mark.parametrize("floating", [False, True])
def test_padding(floating: bool) -> None:
    padding = torch.arange(70) >= torch.tensor([[70], [20]])
    mask = torch.zeros(2, 70).masked_fill(padding, float("-inf")) if floating else padding
    call = only_call(explain(*tensors(), key_padding_mask=mask))
    assert call["key_padding_mask"].choice == "90 of 140 keys kept"
    assert ("float32" if floating else "bool") in call["key_padding_mask"].reason
    assert "finite numbers" not in call["key_padding_mask"].reason
    if floating:
        mask[0, 0] = 0.5
        assert "finite numbers" in only_call(explain(*tensors(), key_padding_mask=mask))["key_padding_mask"].reason


def test_tiles_that_a_mask_leaves() -> None:
    """Of 2 x 4 times 3 x 4 tiles (48 rows, 32 keys) of a causal call, those above the diagonal are skipped."""
    query, key, value = tensors(L=144, S=128)
    classes = [0, 0, 0]
    for row in range(0, 144, 48):
        for column in range(0, 128, 32):
            tile = later(144, 128)[row : row + 48, column : column + 32]
            classes[0 if tile.all() else 2 if tile.any() else 1] += 1
    expected = "{} tiles skipped, {} free of masks, {} masked by element".format(*(8 * count for count in classes))
    assert classes[0] > 0
    for masks in ({"is_causal": True}, {"attn_mask": later(144, 128)}):
        call = only_call(explain(query, key, value, **masks))
        assert call["attn_mask"].choice == expected
        assert ("is_causal" in call["attn_mask"].reason) == ("is_causal" in masks)
    assert only_call(explain(query, key, value))["masks"].choice == "none"


def test_weights() -> None:
    query, key, value = tensors()
    assert only_call(explain(query, key, value))["weights"].choice == "none"
    for average, choice in ((True, "averaged"), (False, "per head")):
        assert only_call(explain(query, key, value, average_attn_weights=average))["weights"].choice == choice


def test_derivatives() -> None:
    query, key, value = tensors()
    bias = torch.zeros(50, 70, requires_grad=True)
    assert only_call(explain(query, key, value))["backward"].choice == "none"
    call = only_call(explain(query.requires_grad_(), key, value, attn_mask=bias))
    assert call["backward"].choice == "fused"
    assert call["backward"].reason.startswith("for query, attn_mask;")
    with torch.no_grad():
        call = only_call(explain(query, key, value))
    assert (call["backward"].choice, call["backward"].reason) == ("none", "gradients are switched off")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(key, torch.ones_like(key))
        call = only_call(explain(query.detach(), dual, value))
    assert call["forward mode"].choice == "unfused"


def test_dropout_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    call = only_call(explain(*tensors(), dropout_p=0.25))
    assert call["dropout"].choice == "0.25"
    torch.set_rng_state(state)
    before = tensors()
    torch.set_rng_state(state)
    explain(*before, dropout_p=0.25)
    assert torch.equal(torch.get_rng_state(), state)


def test_refusals_are_explained() -> None:
    query, key, value = tensors()
    found = explain(query, key, value, key_padding_mask=torch.zeros(2, 69, dtype=torch.bool))
    assert isinstance(found.error, RuntimeError)
    assert not found.fused
    assert not found.calls
    assert "refused: RuntimeError: fused_mha::attention: key_padding_mask must have shape" in str(found)
    assert isinstance(explain(query, key, value, attn_mask=torch.zeros(50, 70, dtype=torch.int64)).error, TypeError)
    assert isinstance(explain(query).error, TypeError)


def test_nothing_is_noted_outside() -> None:
    functional.attention(*tensors())
    assert _C.take_call_records() == []
    only_call(explain(*tensors()))
    assert _C.take_call_records() == []


def test_functions_that_call_several_times() -> None:
    query, key, value = tensors()

    def twice(x: torch.Tensor) -> torch.Tensor:
        return functional.attention(functional.attention(x, key, value), key, value, is_causal=True)

    found = explain(twice, query)
    assert [call.facts["is_causal"] for call in found.calls] == [False, True]
    assert found.fused
    assert not explain(torch.nn.functional.relu, query).fused
    assert str(explain(torch.nn.functional.relu, query)) == "no fused kernel noted a call"
    assert not explain(functional.attention, *(t.to("meta") for t in (query, key, value))).calls


# Modules.


def test_module() -> None:
    module, x = fused_mha.MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True), torch.randn(2, 5, 8)
    call = only_call(explain(module, x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)))
    assert call.module == ""
    assert call["projections"].choice == "in one operator with the attention"
    assert call["weights"].choice == "averaged"
    assert call["backward"].reason.startswith("for query, key, value;")
    assert "the last 1 keys were appended" in call["sizes"].reason
    assert len(module._forward_pre_hooks.values()) == 0


def computed_weight(linear: nn.Linear) -> None:
    """A weight that is no parameter any more, as peft leaves it for the time of a call."""
    weight = linear.weight
    del linear.weight
    linear.weight = 2 * weight


REASONS = {
    "out_proj has hooks": lambda m: m.out_proj.register_forward_hook(lambda *_: None),
    "out_proj is a Sequential": lambda m: setattr(m, "out_proj", nn.Sequential(m.out_proj)),
    "out_proj is a ParametrizedNonDynamicallyQuantizableLinear": lambda m: nn.utils.parametrizations.weight_norm(
        m.out_proj
    ),
    "out_proj.forward has been replaced": lambda m: setattr(m.out_proj, "forward", m.out_proj.forward),
    "a parameter of out_proj has been replaced": lambda m: computed_weight(m.out_proj),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_out_proj_is_called(reason: str) -> None:
    module, x = fused_mha.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    REASONS[reason](module)
    call = only_call(explain(module, x, x, x))
    assert (call["projections"].choice, call["projections"].reason) == ("as modules", reason)


def test_hint_beside_a_mask() -> None:
    module, x = fused_mha.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    call = only_call(explain(module, x, x, x, attn_mask=torch.zeros(5, 5), is_causal=True))
    assert call["is_causal"].choice == "a hint, not applied"
    with pytest.raises(KeyError):
        only_call(explain(module, x, x, x, is_causal=True))["is_causal"]


def test_nested() -> None:
    module = fused_mha.MultiheadAttention(8, 2, batch_first=True)
    x = torch.nested.as_nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)
    call = only_call(explain(module, x, x, x))
    assert call["nested tensors"].choice == "padded"
    assert call["key_padding_mask"].choice == "5 of 6 keys kept"


def test_model_with_stock_and_fused_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    for i in (0, 2):
        fused_mha.replace_multihead_attention(model.layers[i])
    found = explain(model, torch.randn(2, 5, 8))
    assert [call.module for call in found.calls] == ["layers.0.self_attn", "layers.2.self_attn"]
    ((name, reason),) = found.not_fused
    assert name == "layers.1.self_attn"
    assert "replace_multihead_attention" in reason
    assert not found.fused
    fused_mha.replace_multihead_attention(model)
    found = explain(model, torch.randn(2, 5, 8))
    assert found.fused
    assert "attention call 2 of layers.1.self_attn: fused" in str(found)


def test_stock_module() -> None:
    stock, x = nn.MultiheadAttention(8, 2), torch.randn(2, 5, 8)
    found = explain(stock, x, x, x)
    assert not found.fused
    assert "no fused kernel noted a call" in str(found)
    assert "not fused: (the module itself): a stock module" in str(found)

    class Special(nn.MultiheadAttention):
        pass

    ((_, reason),) = explain(Special(8, 2), x, x, x).not_fused
    assert reason.endswith("Special is a subclass whose own behaviour would be lost")


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning")
def test_scripted_module_and_functional_form() -> None:
    module, x = fused_mha.MultiheadAttention(8, 2, bias=False), torch.randn(2, 5, 8)
    call = only_call(explain(torch.jit.script(module), x, x, x, is_causal=True))
    assert call.module is None
    assert call.facts["is_causal"]
    weights = (module.in_proj_weight, None, None, None, False, 0.0, module.out_proj.weight, None)
    call = only_call(explain(functional.multi_head_attention_forward, x, x, x, 8, 2, *weights, need_weights=False))
    assert call["sizes"].choice == "N = 5, H = 2, L = 2, S = 2, D = 4, Dv = 4"
    assert call["weights"].choice == "none"


def test_refused_module_call() -> None:
    module, x = fused_mha.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    assert isinstance(explain(module, x, x, x, attn_mask=torch.zeros(4, 5)).error, RuntimeError)
    assert isinstance(explain(module, x).error, TypeError)
    assert len(module._forward_pre_hooks.values()) == 0


def test_compiled_module() -> None:
    module, x = fused_mha.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager", fullgraph=True)
    call = only_call(explain(compiled, x, x, x))
    assert call["sizes"].choice == "N = 2, H = 2, L = 5, S = 5, D = 4, Dv = 4"
    assert call["backward"].choice == "not known here"


# python -m fused_mha.


def test_the_command() -> None:
    environment = {**os.environ, "FUSED_MHA_MAX_ISA": "generic"}
    command = [sys.executable, "-m", "fused_mha"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"torch              {torch.__version__}, built for" in run.stdout
    assert "generic (FUSED_MHA_MAX_ISA=generic)" in run.stdout
    for name in _C.supported_cpu_isas():
        assert any(line.split() == ["self-check", name, "passed"] for line in run.stdout.splitlines())


def test_the_command_without_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--no-check"]) == 0
    printed = capsys.readouterr().out
    assert "self-check" not in printed
    assert _C.build_info()["compiler"] in printed


@pytest.mark.parametrize("fault", ["output", "grad_value"])
def test_the_command_finds_a_fault(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = functional.attention

    def wrong(query, key, value, **masks):
        if fault == "output":
            return right(query, key, value, **masks) * 1.01
        return right(query, key, value.detach() + 1.01 * (value - value.detach()), **masks)

    before = _C.get_cpu_isa()
    monkeypatch.setattr(functional, "attention", wrong)
    assert __main__.main([]) == 1
    assert f"{fault} is off by" in capsys.readouterr().out
    assert _C.get_cpu_isa() == before
