# SPDX-License-Identifier: BSD-3-Clause
"""The one place that says how close is close enough.

An error is the largest absolute difference from a float64 reference. Ours may be twice what PyTorch's own attention
makes in the same dtype on the same input (three times for gradients), plus a floor: a few epsilons of the dtype,
relative to the largest number of the reference, because PyTorch's error can be 0 by luck on tiny inputs.
"""

from __future__ import annotations

import torch

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
FORWARD_FLOOR = 2.0
GRADIENT_FLOOR = 4.0
# float64 results are compared with a float64 reference, whose own rounding is as large as theirs.
FLOAT64_FLOOR_SCALE = 8.0


def largest(tensor: torch.Tensor) -> float:
    """Largest finite magnitude; 0 for an empty tensor."""
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference where both are finite."""
    difference = actual.detach().double().cpu() - reference.detach().cpu()
    return largest(difference)


def allowed(
    reference: torch.Tensor,
    torch_result: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    gradient: bool,
    scale: float = 0.0,
) -> float:
    """The bound for `error`. `scale` raises the magnitude to which the floor is relative."""
    factor, floor = (GRADIENT_FACTOR, GRADIENT_FLOOR) if gradient else (FORWARD_FACTOR, FORWARD_FLOOR)
    if dtype == torch.float64:
        floor *= FLOAT64_FLOOR_SCALE
    magnitude = max(largest(reference.detach()), scale, torch.finfo(dtype).tiny)
    own = 0.0 if torch_result is None else error(torch_result, reference)
    return factor * own + floor * torch.finfo(dtype).eps * magnitude


def assert_close_as_torch(
    actual: torch.Tensor,
    reference: torch.Tensor,
    torch_result: torch.Tensor | None = None,
    *,
    what: str,
    gradient: bool = False,
    scale: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Fails unless `actual` has the reference's shape and NaN pattern, and an error within the rule above.

    `dtype` is that of the query where it is not that of `actual`: a float32 mask beside bfloat16 inputs has a float32
    gradient made of bfloat16 numbers.
    """
    assert tuple(actual.shape) == tuple(reference.shape), f"{what}: shape {tuple(actual.shape)}"
    actual_nan, reference_nan = actual.detach().isnan().cpu(), reference.detach().isnan().cpu()
    assert torch.equal(actual_nan, reference_nan), (
        f"{what}: {int(actual_nan.sum())} NaN where the reference has {int(reference_nan.sum())}"
    )
    assert not actual.isinf().any() or reference.isinf().any(), f"{what}: infinite"
    coarser = max(actual.dtype, dtype or actual.dtype, key=lambda d: torch.finfo(d).eps)
    bound = allowed(reference, torch_result, coarser, gradient=gradient, scale=scale)
    found = error(actual, reference)
    assert found <= bound, f"{what}: error {found:.3e}, allowed {bound:.3e} ({actual.dtype})"


def assert_unchanged(actual: torch.Tensor, before: torch.Tensor, what: str = "result") -> None:
    """The same numbers: bit for bit on the CPU. A GPU's kernels take scores through other arithmetic where a mask is
    float, and add up in another order where what is hidden is infinite or NaN: the same but for rounding."""
    if actual.device.type == "cpu":
        assert torch.equal(actual, before), what
    else:
        exact = before.detach().double().cpu()
        assert_close_as_torch(actual, exact, what=what, gradient=True, scale=1.0)
