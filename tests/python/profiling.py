# SPDX-License-Identifier: BSD-3-Clause
"""Which operators ran, as torch.profiler saw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

FUSED = "fused_mha::_attention_forward"


def operators_in(function: Callable[[], object]) -> Counter[str]:
    """How often each operator ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return Counter({event.key: event.count for event in profile.key_averages()})


def stock_attention_in(operators: Counter[str]) -> set[str]:
    """The operators that are PyTorch's own attention, of whatever form."""
    parts = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "scaled_dot_product", "softmax")
    return {name for name in operators if any(part in name for part in parts)}
