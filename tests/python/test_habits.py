# SPDX-License-Identifier: BSD-3-Clause
"""What PyTorch's own modules survive, for every module of the package: saving, copying, sharing, late initialization,
modes, checkpoints, autocast, compilation, adapters of weights.

What is particular to the drop-in module is in files of its own (test_serialization.py, test_modes.py, ...).
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import fused_mha
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

N, L, S, E, H = 3, 5, 7, 12, 4


class Attention(nn.Module):
    """Any of the modules, called with the same tensors: queries (N, L, E), keys (N, S, E), True where one is hidden."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(queries, keys, keys, key_padding_mask=hidden)[0]


class ByLength(Attention):
    def forward(self, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(queries, keys, keys, hidden.logical_not().sum(-1))


OPTIONS = {"head_dim": 5, "v_head_dim": 6, "num_kv_heads": 2, "out_dim": 9, "causal_alignment": "bottom_right"}
MODULES: dict[str, Callable[..., nn.Module]] = {
    "drop_in": lambda **kw: Attention(fused_mha.MultiheadAttention(E, H, dropout=0.25, batch_first=True, **kw)),
    "drop_in_with_options": lambda **kw: Attention(
        fused_mha.MultiheadAttention(
            E, H, dropout=0.25, batch_first=True, add_bias_kv=True, sink="learned", **OPTIONS, **kw
        )
    ),
    "additive": lambda **kw: Attention(fused_mha.AdditiveAttention(E, E, 8, dropout=0.25, bias=True, **kw)),
    "by_length": lambda **kw: ByLength(fused_mha.ValidLengthsAttention(E, E, E, E, H, 0.25, bias=True, **kw)),
}


@pytest.fixture(params=MODULES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def module(kind: str) -> nn.Module:
    """In training mode; biases and the sink, which start as zeros, are not."""
    module = MODULES[kind]()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return module


def tensors(n: int = N, length: int = L, s: int = S, requires_grad: bool = False) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    queries, keys = (torch.randn(n, x, E, generator=generator).requires_grad_(requires_grad) for x in (length, s))
    hidden = torch.arange(s) >= torch.tensor([s, 1, 0, s][-n:])[:, None]
    return queries, keys, hidden


def results(module: nn.Module, call: Callable | None = None, seed: int = 7) -> list[torch.Tensor]:
    """Output, gradients of inputs and of every parameter."""
    queries, keys, hidden = tensors(requires_grad=True)
    torch.manual_seed(seed)
    output = (call or module)(queries, keys, hidden)
    leaves = [queries, keys, *module.parameters()]
    for leaf in leaves:
        leaf.grad = None
    output.float().square().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def through_file(thing: object, **options: object):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


# Copies, files, other processes.


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file", "state_dict", "by_assignment"])
def test_copies(kind: str, module: nn.Module, how: str) -> None:
    """The same bits, dropout included, and nothing shared."""
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif how == "file":
        other = through_file(module, weights_only=False)
    else:
        state = through_file(module.state_dict(), weights_only=True)
        other = MODULES[kind](device="meta" if how == "by_assignment" else None)
        assert not any(other.load_state_dict(state, assign=how == "by_assignment"))
    expected = results(module)
    assert_same(results(other), expected)
    with torch.no_grad():
        next(other.parameters()).zero_()
    assert_same(results(module), expected)
    assert not other.eval().training


def _zero(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()


def test_shared_memory(module: nn.Module) -> None:
    module.share_memory()
    assert all(parameter.is_shared() for parameter in module.parameters())
    process = torch.multiprocessing.get_context("spawn").Process(target=_zero, args=(module,))
    process.start()
    process.join(timeout=150)
    assert process.exitcode == 0
    assert not any(parameter.any() for parameter in module.parameters())


def test_late_initialization(kind: str, module: nn.Module) -> None:
    """On the meta device first; the shapes are right there, and a state brings it to life."""
    with torch.device("meta"):
        late = MODULES[kind]()
    output = late(*(tensor.to("meta") for tensor in tensors()))
    assert output.is_meta
    assert output.shape == module(*tensors()).shape
    late.to_empty(device="cpu")
    late.load_state_dict(module.state_dict())
    assert_same(results(late), results(module))


def test_other_dtypes(module: nn.Module) -> None:
    expected = module.eval()(*tensors())
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        low = copy.deepcopy(module).to(dtype)
        queries, keys, hidden = tensors()
        output = low(queries.to(dtype), keys.to(dtype), hidden)
        assert output.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float64 else 0.05
        torch.testing.assert_close(output.float(), expected, rtol=tolerance, atol=tolerance)


# Modes.


def test_inference_mode_and_no_grad(module: nn.Module) -> None:
    expected = module.eval()(*tensors())
    with torch.no_grad():
        assert torch.equal(module(*tensors()), expected)
    with torch.inference_mode():
        found = module(*tensors())
        assert found.is_inference()
        assert torch.equal(found, expected)


def test_anomaly_and_deterministic_modes(module: nn.Module) -> None:
    """A row that sees no key makes no NaN that would be found, and nothing says that it is not deterministic."""
    expected = results(module)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True, check_nan=True):
            warnings.filterwarnings("error", message=".*determin.*")
            assert_same(results(module), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_drop_what_was_dropped(module: nn.Module, use_reentrant: bool) -> None:
    def recomputed(*given: torch.Tensor) -> torch.Tensor:
        output = checkpoint(module, *given, use_reentrant=use_reentrant)
        torch.rand(3)  # the generator moves between the two computations
        return output

    expected = results(module)
    assert_same(results(module, recomputed), expected)
    assert not torch.equal(expected[0], results(module, seed=8)[0]), "nothing is dropped"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(module: nn.Module, dtype: torch.dtype) -> None:
    """The output in the lower dtype and near that of float32; gradients in the dtypes of what they belong to."""
    module.eval()
    expected = results(module)
    largest = max(float(gradient.abs().max()) for gradient in expected[1:])

    def lowered(*given: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return module(*given)

    found = results(module, lowered)
    assert found[0].dtype == dtype
    torch.testing.assert_close(found[0].float(), expected[0], rtol=0.05, atol=0.05)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * largest)


# Graphs.


def test_compiled_training_step_serves_new_sizes(module: nn.Module) -> None:
    """One graph forward and one backward for all N, L and S; with dropout, a new compilation would be an error."""
    graphs = {"forward": 0, "backward": 0}

    def count(direction: str):
        def compiler(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
            graphs[direction] += 1
            return make_boxed_func(graph.forward)

        return compiler

    from functorch.compile import aot_module_simplified, make_boxed_func

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        return aot_module_simplified(graph, example_inputs, fw_compiler=count("forward"), bw_compiler=count("backward"))

    torch._dynamo.reset()
    try:
        compiled = torch.compile(copy.deepcopy(module), backend=backend, fullgraph=True, dynamic=True)
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (module, compiled)]
        for n, length, s in ((3, 5, 7), (2, 9, 4), (4, 33, 65)):
            losses = []
            for one, optimizer in zip((module, compiled), optimizers, strict=True):
                torch.manual_seed(n)
                optimizer.zero_grad()
                losses.append(one(*tensors(n, length, s)).square().mean())
                losses[-1].backward()
                optimizer.step()
            torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        assert graphs == {"forward": 1, "backward": 1}
    finally:
        torch._dynamo.reset()
    for ours, theirs in zip(compiled.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_export(module: nn.Module) -> None:
    module.eval()
    n, length, s = (torch.export.Dim(name, min=2, max=99) for name in ("n", "length", "s"))
    program = torch.export.export(module, tensors(), dynamic_shapes=({0: n, 1: length}, {0: n, 1: s}, {0: n, 1: s}))
    torch.testing.assert_close(program.module()(*tensors(2, 9, 4)), module(*tensors(2, 9, 4)))


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_trace(module: nn.Module) -> None:
    module.eval()
    traced = torch.jit.trace(module, tensors())
    torch.testing.assert_close(traced(*tensors(2, 9, 4)), module(*tensors(2, 9, 4)))


def test_functional_call_and_per_sample_gradients(module: nn.Module) -> None:
    module = module.eval().double()
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    queries, keys, hidden = tensors()
    queries, keys = queries.double(), keys.double()

    def loss(given: dict[str, torch.Tensor], *sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, given, tuple(t[None] for t in sample)).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = torch.vmap(torch.func.grad(loss), (None, 0, 0, 0))(parameters, queries, keys, hidden)
    for i in range(N):
        for name, expected in torch.func.grad(loss)(parameters, queries[i], keys[i], hidden[i]).items():
            torch.testing.assert_close(found[name][i], expected, rtol=1e-9, atol=1e-11)


def test_derivatives_of_second_order_and_forward_mode(module: nn.Module) -> None:
    module = module.eval().double()
    _, _, hidden = tensors()
    queries, keys = (tensor[:, :2].double().requires_grad_() for tensor in tensors()[:2])

    def function(one: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return module(one, memory, hidden[:, :2])

    assert torch.autograd.gradcheck(function, (queries, keys), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (queries, keys), check_fwd_over_rev=True, fast_mode=True)


# What hangs on the parts.


def test_hooks_on_the_module_and_on_its_layers(module: nn.Module) -> None:
    calls: list[str] = []
    expected = results(module)
    layers = [(name, one) for name, one in module.attention.named_modules() if isinstance(one, nn.Linear)]
    assert layers
    for name, layer in layers:
        layer.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
        layer.register_full_backward_hook(lambda module, grad_in, grad_out, name=name: calls.append(f"d {name}"))
    module.attention.register_forward_pre_hook(lambda module, args: calls.append("before"))
    module.attention.register_forward_hook(lambda module, args, output: calls.append("after"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # w_v is given constants
        found = results(module)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    names = {name for name, _ in layers}
    assert set(calls) == {"before", "after", *names, *(f"d {name}" for name in names)}
    assert len(calls) == 2 + 2 * len(names)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_parametrizations_and_pruning(module: nn.Module) -> None:
    module.eval()
    plain = results(module)
    matrices = [
        (owner, name)
        for owner in list(module.modules())
        for name, parameter in list(owner.named_parameters(recurse=False))
        if parameter.dim() == 2
    ]
    assert matrices
    for owner, name in matrices:
        changed = copy.deepcopy(module)
        path = next(path for path, one in module.named_modules() if one is owner)
        part = changed.get_submodule(path)
        parametrize.register_parametrization(part, name, Doubled())
        doubled = copy.deepcopy(module)
        with torch.no_grad():
            getattr(doubled.get_submodule(path), name).mul_(2)
        found, expected = results(changed)[0], results(doubled)[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found, plain[0])
        assert part.parametrizations[name].original.grad.any()

        pruned = copy.deepcopy(module)
        prune.l1_unstructured(pruned.get_submodule(path), name, 0.5)
        assert not torch.allclose(results(pruned)[0], plain[0])
        assert getattr(pruned.get_submodule(path), f"{name}_orig").grad.any()


def test_every_parameter_gets_a_gradient(module: nn.Module) -> None:
    """As DistributedDataParallel wants it, of a sample without keys too."""
    queries, keys, hidden = tensors()
    module(queries[2:], keys[2:], hidden[2:]).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
