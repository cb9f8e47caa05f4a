# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face models with attn_implementation="fused_mha" beside their own attention, on small random weights."""

from __future__ import annotations

import copy
import math
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from fused_mha.integrations import transformers as integration
from tolerances import assert_close_as_torch

transformers = pytest.importorskip(
    "transformers", minversion="5.24"
)  # models move to the attention interface one by one

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 50}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    integration.register()


def pair(config, model_class) -> tuple[torch.nn.Module, torch.nn.Module]:
    """One model twice, with its eager attention and with ours."""
    torch.manual_seed(0)
    eager = model_class(config)
    eager.set_attn_implementation("eager")
    fused = copy.deepcopy(eager)
    fused.set_attn_implementation("fused_mha")
    assert fused.config._attn_implementation == "fused_mha"
    return eager, fused


def padded(lengths: list[int], side: str = "right") -> dict[str, torch.Tensor]:
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    if side == "left":
        mask = mask.flip(1)
    return {"input_ids": torch.randint(5, 50, mask.shape), "attention_mask": mask.long()}


def check(eager: torch.nn.Module, fused: torch.nn.Module, field: str = "last_hidden_state", **inputs) -> None:
    """Kept positions of the outputs, and the parameters' gradients, against the model in float64.

    With "sdpa" there: eager attention in float64 adds finfo.min to scores and gets NaN in rows that see nothing.
    """
    exact = copy.deepcopy(eager).double()
    exact.set_attn_implementation("sdpa")
    kept = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    results, gradients = [], []
    for model in (fused, exact, eager):
        result = getattr(model(**inputs), field)[kept]
        wanted = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(result.square().mean(), wanted, allow_unused=True)
        gradients.append(torch.cat([g.flatten() for g in found if g is not None]))
        results.append(result)
    assert_close_as_torch(*results, what="output", scale=1.0)
    assert_close_as_torch(*gradients, what="gradients", gradient=True, scale=1.0)


class Seen:
    """What reaches the attention function: masks and flags by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.masks: list[torch.Tensor | None] = []

        def spy(module, query, key, value, attention_mask, **kwargs):
            self.masks.append(attention_mask)
            return integration.attention(module, query, key, value, attention_mask, **kwargs)

        mapping = transformers.AttentionInterface._global_mapping
        monkeypatch.setitem(mapping, "fused_mha", spy)


def test_bert_takes_the_padding_mask_unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, fused = pair(transformers.BertConfig(**SMALL, **NO_DROPOUT), transformers.BertModel)
    seen = Seen(monkeypatch)
    check(eager, fused, **padded([7, 4, 1]))
    assert [tuple(m.shape) for m in seen.masks] == [(3, 1, 1, 7)] * 2
    assert seen.masks[0].data_ptr() == seen.masks[1].data_ptr()


def test_padding_is_not_read() -> None:
    _, fused = pair(transformers.BertConfig(**SMALL, **NO_DROPOUT), transformers.BertModel)
    fused.eval()
    inputs = padded([6, 3])
    before = fused(**inputs).last_hidden_state[1, :3]
    with torch.no_grad():
        fused.embeddings.word_embeddings.weight[49] = math.nan
    inputs["input_ids"] = inputs["input_ids"].clamp(max=48)
    clean = fused(**inputs).last_hidden_state[1, :3]
    inputs["input_ids"][1, 3:] = 49
    assert torch.equal(fused(**inputs).last_hidden_state[1, :3], clean)
    assert before.isfinite().all()


def test_albert_weights_are_those_of_eager() -> None:
    """output_attentions, which "sdpa" does not have."""
    config = transformers.AlbertConfig(**SMALL, **NO_DROPOUT, embedding_size=16)
    eager, fused = pair(config, transformers.AlbertModel)
    inputs = padded([6, 4])
    found = fused(**inputs, output_attentions=True).attentions
    expected = copy.deepcopy(eager).double()(**inputs, output_attentions=True).attentions
    yardstick = eager(**inputs, output_attentions=True).attentions
    assert len(found) == 2
    for layer in range(2):
        assert found[layer].shape == (2, 4, 6, 6)
        assert not found[layer][1, :, :, 4:].any()
        assert_close_as_torch(found[layer], expected[layer], yardstick[layer], what=f"weights of layer {layer}")
    assert fused(**inputs).attentions is None


LLAMA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize("side", ["left", "right"])
def test_llama_is_causal_beside_its_padding(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Grouped queries; the mask stays (N, S)."""
    eager, fused = pair(transformers.LlamaConfig(**LLAMA), transformers.LlamaModel)
    seen = Seen(monkeypatch)
    check(eager, fused, **padded([9, 5, 2], side))
    assert [tuple(m.shape) for m in seen.masks] == [(3, 9)] * 2


def test_llama_without_padding_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, fused = pair(transformers.LlamaConfig(**LLAMA), transformers.LlamaModel)
    seen = Seen(monkeypatch)
    ids = torch.randint(5, 50, (2, 6))
    torch.testing.assert_close(fused(ids).last_hidden_state, eager(ids).last_hidden_state, rtol=1e-5, atol=1e-5)
    assert seen.masks == [None, None]


@pytest.mark.parametrize("cache", [None, "static"])
def test_llama_generates_the_same_text(cache: str | None) -> None:
    """Decoding, where the one query is the last of the sequence; left padding, as generation wants it."""
    eager, fused = pair(transformers.LlamaConfig(**LLAMA), transformers.LlamaForCausalLM)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if cache is not None:
        options |= {"cache_implementation": cache, "disable_compile": True}
    inputs = padded([8, 5], "left")
    found, expected = fused.generate(**inputs, **options), eager.generate(**inputs, **options)
    assert found.shape == (2, 14)
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_prefill_in_two_parts_is_one_prefill() -> None:
    """More than one query behind a cache: causality is then no longer top-left."""
    _, fused = pair(transformers.LlamaConfig(**LLAMA), transformers.LlamaModel)
    inputs = padded([9, 6], "left")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = mask.cumsum(1).sub(1).clamp(min=0)
    whole = fused(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    first = fused(ids[:, :5], attention_mask=mask[:, :5], position_ids=positions[:, :5], use_cache=True)
    second = fused(
        ids[:, 5:], attention_mask=mask, position_ids=positions[:, 5:], past_key_values=first.past_key_values
    ).last_hidden_state
    torch.testing.assert_close(second, whole[:, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [3, 64])
def test_mistral_keeps_its_window(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """A window that is wider than the sequence is plain causality."""
    config = transformers.MistralConfig(**LLAMA, sliding_window=window)
    eager, fused = pair(config, transformers.MistralModel)
    seen = Seen(monkeypatch)
    check(eager, fused, **padded([9, 6]))
    assert {tuple(m.shape) for m in seen.masks} == {(2, 1, 9, 9) if window == 3 else (2, 9)}


def test_modernbert_mixes_windows_and_whole_layers() -> None:
    config = transformers.ModernBertConfig(
        **(SMALL | {"num_hidden_layers": 3}), local_attention=4, global_attn_every_n_layers=2, pad_token_id=0
    )
    eager, fused = pair(config, transformers.ModernBertModel)
    check(eager, fused, **padded([9, 6]))


def test_packed_sequences_do_not_see_one_another() -> None:
    _, fused = pair(transformers.LlamaConfig(**LLAMA), transformers.LlamaModel)
    ids = torch.randint(5, 50, (1, 9))
    packed = fused(ids, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False).last_hidden_state
    alone = fused(ids[:, 4:], use_cache=False).last_hidden_state
    torch.testing.assert_close(packed[:, 4:], alone, rtol=1e-5, atol=1e-5)


def test_t5_reads_its_position_bias_beside_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoder, causal decoder and cross attention; the bias is learned."""
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    eager, fused = pair(config, transformers.T5Model)
    seen = Seen(monkeypatch)
    source, target = padded([7, 4]), padded([5, 3])
    check(
        eager,
        fused,
        **source,
        decoder_input_ids=target["input_ids"],
        decoder_attention_mask=target["attention_mask"],
    )
    assert {tuple(m.shape) for m in seen.masks} == {(2, 1, 1, 7), (2, 5)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_gpt_oss_has_its_sinks(side: str) -> None:
    """In layers with a window and in whole ones. Every expert is used, so that rounding chooses none."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**LLAMA, **experts, head_dim=8, sliding_window=3, pad_token_id=0)
    eager, fused = pair(config, transformers.GptOssModel)
    with torch.no_grad():
        for model in (eager, fused):
            for i, layer in enumerate(model.layers):
                layer.self_attn.sinks.copy_(torch.linspace(-1.0, 2.0, 4) + i)
    inputs = padded([9, 6], side)
    results = []
    for model in (fused, eager):  # the experts' products are not to be had in float64
        output = model(**inputs).last_hidden_state[inputs["attention_mask"].bool()]
        output.square().mean().backward()
        results.append((output, *(layer.self_attn.sinks.grad for layer in model.layers)))
    assert all(gradient.all() for gradient in results[0][1:])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_the_users_own(kind: str) -> None:
    """Four dimensions pass through the mask interface; True keeps, as this library has it."""
    eager, fused = pair(transformers.BertConfig(**SMALL, **NO_DROPOUT), transformers.BertModel)
    ids = torch.randint(5, 50, (2, 6))
    keep = torch.rand(2, 1, 6, 6) < 0.5
    keep.diagonal(dim1=-2, dim2=-1).fill_(True)
    additive = torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    found = fused(ids, attention_mask=keep if kind == "bool" else additive).last_hidden_state
    expected = eager(ids, attention_mask=additive).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_dropout_is_on_in_training_only() -> None:
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    _, fused = pair(config, transformers.BertModel)
    inputs = padded([6, 4])
    fused.train()
    assert not torch.equal(fused(**inputs).last_hidden_state, fused(**inputs).last_hidden_state)
    fused.eval()
    assert torch.equal(fused(**inputs).last_hidden_state, fused(**inputs).last_hidden_state)


def test_what_is_not_there_is_refused() -> None:
    config = transformers.Gemma2Config(**LLAMA, head_dim=8, attn_logit_softcapping=30.0)
    _, fused = pair(config, transformers.Gemma2Model)
    with pytest.raises(ValueError, match="Gemma2Attention asks for softcap, which fused attention does not have"):
        fused(torch.randint(5, 50, (1, 4)))


def test_a_name_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    integration.register("another_name")
    config = transformers.BertConfig(**SMALL, **NO_DROPOUT)
    fused = transformers.AutoModel.from_config(config, attn_implementation="another_name")
    assert fused(**padded([3, 2])).last_hidden_state.shape == (2, 3, 32)


def test_an_old_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa_mask(batch_size, cache_position, kv_length, kv_offset=0, **kwargs):
        raise AssertionError

    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", sdpa_mask)
    with pytest.raises(ImportError, match=r"needs transformers 5\.5 or newer, got "):
        integration.register()


def test_bert_compiles_whole() -> None:
    _, fused = pair(transformers.BertConfig(**SMALL, **NO_DROPOUT), transformers.BertModel)
    inputs = padded([6, 4])
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    found, expected = compiled(**inputs).last_hidden_state, fused(**inputs).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
