# SPDX-License-Identifier: BSD-3-Clause
"""The one table of benchmark cases, their goals, and the tensors that they run on.

Letters: N batch, H heads, Hkv key/value heads, L query length, S key length, E embedding, D query/key head dimension,
Dv value head dimension. Goals are ratios, each from one run on one machine, with two threads.
"""

import fnmatch
import operator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

COMPARATORS = {">=": operator.ge, "<=": operator.le}
#: What a goal may be about, and how it is written in the table.
METRICS = {
    "peak": "of peak",
    "bandwidth": "of read bandwidth",
    "sdpa": "x SDPA",
    "stock": "x stock module",
    "dense": "of dense time",
    "no dropout": "of time without dropout",
    "no weights": "of time without weights",
    "one thread": "x one thread",
    "extra": "GiB extra",
}
#: The metrics that compare a case with the same case made simpler.
SIMPLER = {
    "dense": {"padding": "", "kept": 1.0, "mask": ""},
    "no dropout": {"dropout": 0.0},
    "no weights": {"weights": False},
}
SEED = 0


@dataclass(frozen=True)
class Goal:
    metric: str
    comparator: str
    value: float
    #: Whether the goal is meant for processors with bfloat16 dot products (True), for others (False), or for all.
    native_bfloat16: bool | None = None

    def met(self, value: float) -> bool:
        return COMPARATORS[self.comparator](value, self.value)

    def __str__(self) -> str:
        return f"{self.comparator} {self.value:.2f} {METRICS[self.metric]}"


@dataclass(frozen=True)
class Case:
    name: str
    N: int
    H: int
    L: int
    S: int
    D: int = 64
    Dv: int = 64
    Hkv: int = 0  # 0: as many as H
    dtype: torch.dtype = torch.float32
    passes: str = "forward"  # forward, backward, or both
    padding: str = ""  # right, left, or scattered
    kept: float = 1.0  # fraction of the keys that the padding leaves
    mask: str = ""  # causal (the flag), causal bool (L, S), float (L, S), or bias: learned, (1, H, L, S)
    dropout: float = 0.0
    weights: bool = False  # return the weights averaged over heads
    module: bool = False  # projections too, E = H * D; the default call, which returns weights
    goal: tuple[Goal, ...] = ()
    quick: bool = False
    plots: tuple[str, ...] = field(default=(), repr=False)  # the panels that show it

    @property
    def key_heads(self) -> int:
        return self.Hkv or self.H

    @property
    def has_backward(self) -> bool:
        return self.passes != "forward"

    def simpler(self, metric: str) -> "Case":
        """The case that `metric` compares this one with."""
        return replace(self, name=f"{self.name} ({metric})", goal=(), **SIMPLER[metric])

    def goals(self, native_bfloat16: bool) -> list[Goal]:
        return [goal for goal in self.goal if goal.native_bfloat16 in (None, native_bfloat16)]

    def key_bytes(self) -> int:
        return self.N * self.key_heads * self.S * (self.D + self.Dv) * torch.finfo(self.dtype).bits // 8


@dataclass
class Inputs:
    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    key_padding_mask: Tensor | None
    attn_mask: Tensor | None
    is_causal: bool

    def leaves(self) -> list[Tensor]:
        """The tensors that a backward pass differentiates."""
        tensors = [self.query, self.key, self.value, self.attn_mask]
        return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]


def padding_mask(kind: str, kept: float, N: int, S: int, generator: torch.Generator) -> Tensor:
    """(N, S) bool, True = hidden, exactly round(kept * S) keys left in each sample."""
    count = round(kept * S)
    if kind == "scattered":
        order = torch.rand(N, S, generator=generator).argsort(dim=1)
        return order >= count
    positions = torch.arange(S)
    hidden = positions >= count if kind == "right" else positions < S - count
    return hidden.expand(N, S).contiguous()


def _attn_mask(case: Case, generator: torch.Generator) -> Tensor:
    if case.mask == "causal bool":
        return torch.ones(case.L, case.S, dtype=torch.bool).triu(1)
    shape = (1, case.H, case.L, case.S) if case.mask == "bias" else (case.L, case.S)
    return torch.randn(shape, generator=generator)


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(SEED)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, case.dtype)

    if case.module:
        E = case.H * case.D
        query = tensor(case.N, case.L, E)
        key = value = query if case.L == case.S else tensor(case.N, case.S, E)
        grad_output = tensor(case.N, case.L, E)
    else:
        query = tensor(case.N, case.H, case.L, case.D)
        key = tensor(case.N, case.key_heads, case.S, case.D)
        value = tensor(case.N, case.key_heads, case.S, case.Dv)
        grad_output = tensor(case.N, case.H, case.L, case.Dv)
    for leaf in (query, key, value):
        leaf.requires_grad_(case.has_backward)
    padding = mask = None
    if case.padding:
        padding = padding_mask(case.padding, case.kept, case.N, case.S, generator).to(device)
    if case.mask not in ("", "causal"):
        mask = _attn_mask(case, generator).to(device).requires_grad_(case.mask == "bias" and case.has_backward)
    return Inputs(query, key, value, grad_output, padding, mask, case.mask == "causal")


def hidden_mask(inputs: Inputs, L: int, S: int) -> Tensor | None:
    """All that is hidden, as one bool mask that broadcasts to (N, H, L, S) and is as small as can be."""
    parts = []
    if inputs.key_padding_mask is not None:
        parts.append(inputs.key_padding_mask[:, None, None, :])
    if inputs.is_causal:
        parts.append(torch.ones(L, S, dtype=torch.bool, device=inputs.query.device).triu(1))
    if inputs.attn_mask is not None and inputs.attn_mask.dtype == torch.bool:
        parts.append(inputs.attn_mask)
    hidden = None
    for part in parts:
        hidden = part if hidden is None else hidden | part
    return hidden


def flops(case: Case) -> float:
    """Floating-point operations on visible scores: two products forward, five backward. Projections do not count."""
    inputs = make_inputs(replace(case, D=1, Dv=1, dtype=torch.float32, passes="forward"))
    hidden = hidden_mask(inputs, case.L, case.S)
    scores = case.N * case.H * case.L * case.S
    if hidden is not None:
        scores *= 1 - hidden.double().mean().item()
    forward = 2 * scores * (case.D + case.Dv)
    backward = 2 * scores * (3 * case.D + 2 * case.Dv)
    return {"forward": forward, "backward": backward, "both": forward + backward}[case.passes]


def _dense_forward() -> list[Case]:
    sizes = [(128, 16, 0.75), (512, 4, 0.85), (1024, 2, 0.90), (2048, 1, 0.90)]
    cases = [
        Case(
            f"forward float32 L={L}",
            N,
            8,
            L,
            L,
            goal=(Goal("peak", ">=", value),),
            quick=True,
            plots=("peak", "length"),
        )
        for L, N, value in sizes
    ]
    cases += [
        Case(
            f"forward float32 L=1024 D={D}", 2, 8, 1024, 1024, D, D, goal=(Goal("peak", ">=", value),), plots=("peak",)
        )
        for D, value in [(40, 0.75), (80, 0.82), (128, 0.90)]
    ]
    cases.append(Case("forward float32 L=1024 D=64 Dv=128", 2, 8, 1024, 1024, 64, 128))
    cases.append(Case("forward float32 L=1024 Hkv=2", 2, 8, 1024, 1024, Hkv=2))
    cases.append(Case("forward float64 L=512", 4, 8, 512, 512, dtype=torch.float64))
    cases.append(Case("forward float16 L=1024", 2, 8, 1024, 1024, dtype=torch.float16))
    return cases


def _bfloat16(passes: str, of_peak: float, of_sdpa: float) -> list[Case]:
    goals = (
        Goal("peak", ">=", of_peak, native_bfloat16=True),
        Goal("sdpa", ">=", of_sdpa, native_bfloat16=True),
        Goal("sdpa", ">=", 1.15, native_bfloat16=False),
    )
    name = "forward" if passes == "forward" else "forward+backward"
    return [
        Case(
            f"{name} bfloat16 L={L}",
            N,
            8,
            L,
            L,
            dtype=torch.bfloat16,
            passes=passes,
            goal=goals,
            quick=L == 512,
            plots=("peak",),
        )
        for L, N in [(512, 4), (2048, 1)]
    ]


def _dense_backward() -> list[Case]:
    cases = [
        Case(
            f"backward float32 L={L}",
            N,
            8,
            L,
            L,
            passes="backward",
            goal=(Goal("peak", ">=", 0.92),),
            quick=L == 480,
            plots=("peak",),
        )
        for L, N in [(480, 4), (1008, 2), (2016, 1)]
    ]
    cases += [
        Case(
            f"forward+backward float32 L={L}",
            N,
            8,
            L,
            L,
            passes="both",
            goal=(Goal("peak", ">=", value), Goal("sdpa", ">=", 1.4)),
            quick=L == 512,
            plots=("peak", "length both"),
        )
        for L, N, value in [(512, 4, 0.86), (1024, 2, 0.90), (2048, 1, 0.90)]
    ]
    return cases


def _extras() -> list[Case]:
    size = {"N": 2, "H": 8, "L": 1024, "S": 1024}
    return [
        Case(
            "forward+backward dropout=0.1",
            **size,
            passes="both",
            dropout=0.1,
            goal=(Goal("sdpa", ">=", 5), Goal("no dropout", "<=", 1.2)),
            quick=True,
        ),
        Case("forward+backward bias (1,H,L,S)", **size, passes="both", mask="bias", goal=(Goal("sdpa", ">=", 3),)),
        Case("forward float mask (L,S)", **size, mask="float", goal=(Goal("dense", "<=", 1.10),), quick=True),
        Case("forward averaged weights", **size, weights=True, goal=(Goal("no weights", "<=", 1.25),), quick=True),
        Case("forward, two threads over one", **size, goal=(Goal("one thread", ">=", 1.9),), quick=True),
        Case("forward+backward, two threads over one", **size, passes="both", goal=(Goal("one thread", ">=", 1.9),)),
        # The table of goals says "bound by memory bandwidth": three quarters of plain reading is taken for that.
        Case("one query, S=8192", 8, 8, 1, 8192, goal=(Goal("bandwidth", ">=", 0.75),), quick=True),
        Case("one query, one head, S=65536", 1, 1, 1, 65536),
    ]


def _padded() -> list[Case]:
    cases = []
    for passes, name in [("forward", "forward"), ("both", "forward+backward")]:
        for kind in ("right", "left", "scattered"):
            for kept in (0.25, 0.5, 0.75):
                case = Case(
                    f"{name} {kind} padding, kept={kept}",
                    2,
                    8,
                    1024,
                    1024,
                    passes=passes,
                    padding=kind,
                    kept=kept,
                    goal=(Goal("dense", "<=", kept + 0.05),),
                    quick=kept == 0.5 and passes == "forward",
                    plots=("padding",) if passes == "forward" else (),
                )
                if passes == "forward" or kept == 0.5:
                    cases.append(case)
    return cases


def _causal() -> list[Case]:
    return [
        Case(
            f"{name} {label}",
            1,
            8,
            2048,
            2048,
            passes=passes,
            mask=mask,
            goal=(Goal("dense", "<=", value),),
            quick=passes == "forward",
        )
        for passes, name in [("forward", "forward"), ("both", "forward+backward")]
        for mask, label, value in [("causal", "causal by flag", 0.55), ("causal bool", "causal as bool mask", 0.58)]
    ]


def _modules() -> list[Case]:
    half = {"H": 8, "padding": "right", "kept": 0.5, "module": True}
    return [
        Case(
            "module training L=2048 E=512, dropout=0.1, half padded",
            2,
            L=2048,
            S=2048,
            passes="both",
            dropout=0.1,
            goal=(Goal("stock", ">=", 6),),
            **half,
        ),
        Case("module eval L=2048 E=512, half padded", 2, L=2048, S=2048, goal=(Goal("stock", ">=", 3.5),), **half),
        Case(
            "module eval L=512 E=512, half padded",
            4,
            L=512,
            S=512,
            goal=(Goal("stock", ">=", 1.8),),
            quick=True,
            **half,
        ),
    ]


CASES: list[Case] = [
    *_dense_forward(),
    *_bfloat16("forward", 0.78, 2.2),
    *_dense_backward(),
    *_bfloat16("both", 0.65, 1.8),
    *_extras(),
    *_padded(),
    *_causal(),
    *_modules(),
]


def _on_a_gpu() -> list[Case]:
    """Sizes that fill a GPU, 16384 queries in each batch; the rivals set no goals here."""
    cases = []
    for D, H in ((64, 32), (128, 16)):
        for L in (512, 2048, 8192):
            sizes = {"N": 16384 // L, "H": H, "L": L, "S": L, "D": D, "Dv": D, "dtype": torch.bfloat16}
            for passes, name in (("forward", "forward"), ("both", "forward+backward")):
                cases.append(Case(f"{name} bfloat16 L={L} D={D}", **sizes, passes=passes, quick=L == 2048))
                cases.append(Case(f"{name} bfloat16 L={L} D={D} causal", **sizes, passes=passes, mask="causal"))
    sizes = {"N": 8, "H": 16, "L": 2048, "S": 2048, "D": 128, "Dv": 128, "dtype": torch.bfloat16}
    both = {"passes": "both", **sizes}
    one_query = {**sizes, "N": 32, "Hkv": 4, "L": 1, "S": 16384}
    return [
        *cases,
        Case("forward float16 L=2048 D=128", **{**sizes, "dtype": torch.float16}),
        Case("forward float32 L=2048 D=64", 8, 16, 2048, 2048),
        Case("forward bfloat16 L=2048 D=256", **{**sizes, "D": 256, "Dv": 256}),
        Case("forward right padding, kept=0.5", padding="right", kept=0.5, **sizes, quick=True),
        Case("forward+backward right padding, kept=0.5", padding="right", kept=0.5, **both, quick=True),
        Case("forward+backward scattered padding, kept=0.5", padding="scattered", kept=0.5, **both),
        Case("forward causal bool (L,S)", mask="causal bool", **sizes),
        Case(
            "forward+backward causal bool (L,S), right padding", mask="causal bool", padding="right", kept=0.5, **both
        ),
        Case("forward+backward dropout=0.1", dropout=0.1, **both, quick=True),
        Case("forward+backward dropout=0.1, right padding", dropout=0.1, padding="right", kept=0.5, **both),
        Case("forward float mask (L,S)", mask="float", **sizes),
        Case("forward+backward bias (1,H,L,S)", mask="bias", **both, quick=True),
        Case("forward averaged weights", weights=True, **sizes),
        Case("one query, S=16384, Hkv=4", **one_query),
        Case("module training, dropout=0.1, half padded", module=True, dropout=0.1, padding="right", kept=0.5, **both),
        Case("module eval, half padded", module=True, padding="right", kept=0.5, **sizes),
    ]


GPU_CASES: list[Case] = _on_a_gpu()
#: Trains once, in a process of its own: L = S, both masks.
LONG = {"length": 32768, "heads": 8, "head_dim": 64}
LONG_GOAL = Goal("extra", "<=", 2.0)


def select(pattern: str = "*", quick: bool = False, device: str = "cpu") -> list[Case]:
    """The cases for the device whose name contains `pattern` or matches it as a shell pattern does."""
    return [
        case
        for case in (CASES if device == "cpu" else GPU_CASES)
        if (case.quick or not quick) and (pattern in case.name or fnmatch.fnmatchcase(case.name, pattern))
    ]
