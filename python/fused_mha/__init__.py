# SPDX-License-Identifier: BSD-3-Clause
"""Masked multi-head attention for PyTorch: fused kernels that read the masks where they lie.

Three doors lead to the same kernels:

* the operators ``torch.ops.fused_mha.*``, with documented Python signatures in :mod:`fused_mha.functional`;
* :class:`fused_mha.MultiheadAttention`, which stands where ``torch.nn.MultiheadAttention`` stood, and
  :func:`fused_mha.replace_multihead_attention`, which puts it there throughout a model;
* C++: ``find_package(FusedMHA)`` with ``CMAKE_PREFIX_PATH`` set to :data:`fused_mha.cmake_prefix_path`.

    >>> import torch, fused_mha
    >>> attention = fused_mha.MultiheadAttention(64, 8, batch_first=True)
    >>> x = torch.randn(2, 5, 64)
    >>> padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    >>> output, weights = attention(x, x, x, key_padding_mask=padding)
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 64]), torch.Size([2, 5, 5]))
"""

from fused_mha import _library

# The operators must be registered before the modules below look them up.
_library.load()

from fused_mha import _batching, functional, onnx  # noqa: E402
from fused_mha._explain import AttentionCall, Choice, Explanation, explain  # noqa: E402
from fused_mha._flops import flop_formulas  # noqa: E402
from fused_mha.additive import AdditiveAttention  # noqa: E402
from fused_mha.formulations import ValidLengthsAttention  # noqa: E402
from fused_mha.module import MultiheadAttention  # noqa: E402
from fused_mha.replace import ReplacementReport, replace_multihead_attention  # noqa: E402

_batching.register()

__version__: str = _library.version()
#: What ``CMAKE_PREFIX_PATH`` needs so that ``find_package(FusedMHA)`` succeeds.
cmake_prefix_path: str = str(_library.PACKAGE_FOLDER / "share" / "cmake")
#: The folder that holds ``fused_mha/fused_mha.h``.
include_path: str = str(_library.PACKAGE_FOLDER / "include")

__all__ = [
    "AdditiveAttention",
    "AttentionCall",
    "Choice",
    "Explanation",
    "MultiheadAttention",
    "ReplacementReport",
    "ValidLengthsAttention",
    "cmake_prefix_path",
    "explain",
    "flop_formulas",
    "functional",
    "include_path",
    "onnx",
    "replace_multihead_attention",
]
