"""Findings about torch around and inside a region: F4 (compile), F14 (fake, nested), F20 (higher order), F21 (func)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.equality import assert_equal_to_plain, grads, training

pytestmark = [
    # torch.compile and torch.func use what torch itself has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# F4: torch.compile.


@pytest.mark.parametrize("backend", BACKENDS)
def test_f04_compiled_callee_stays_compiled(equal_to_plain: Any, backend: str) -> None:
    """A compiled function inside a region runs compiled, with the bits it gives outside, and is not traced anew."""
    compilations = []

    def count(gm: Any, inputs: Any) -> Any:
        compilations.append(1)
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    inner = torch.compile(lambda t, w: torch.relu(F.dropout(t @ w, 0.5) + 0.1).sin(), backend=count)

    def program(call: Any) -> Any:
        x, w, seen = leaf(6, 6), leaf(6, 6), []
        for _ in range(4):
            y = call(lambda t: inner(t.cos(), w).exp().tanh(), x)
            y.sum().backward()
            seen.append(y.detach())
        return seen, grads(x, w)

    equal_to_plain(program)
    # one for the plain run, and at most one more for calls that are watched while they are recorded
    assert len(compilations) <= 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_f04_compiled_module_whose_first_batch_is_positive(equal_to_plain: Any, backend: str) -> None:
    """An artifact's own in-place relu changes nothing in the first call: its results are opaque, not proved by luck."""
    module = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU())
    with torch.no_grad():
        for p in module.parameters():
            p.abs_()
    compiled = torch.compile(module, backend=backend)

    def program(call: Any) -> Any:
        seen = []
        for sign in (1, -1, 1, -1):
            x = (torch.rand(4, 5) * sign).requires_grad_()
            module.zero_grad()
            y = call(lambda t: compiled(t).sin().exp(), x)
            y.sum().backward()
            seen.append([y.detach(), grads(x, module)])
        return seen

    equal_to_plain(program)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_f04_region_inside_compile(contender: Any, backend: str, fullgraph: bool) -> None:
    """A region inside a compiled function is traced as one graph, and computes the same."""
    if not getattr(contender, "takes_torch_options", True):
        pytest.skip("wrap() is not for compiled code; a module wrapped before is tested below")
    graphs = []

    def count(gm: Any, inputs: Any) -> Any:
        graphs.append(gm)
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    w = leaf(6, 6)

    def block(t: torch.Tensor) -> torch.Tensor:
        return torch.tanh(t @ w).sin()

    def model(t: torch.Tensor) -> torch.Tensor:
        return contender.checkpoint(block, contender.checkpoint(block, t.cos())).exp()

    compiled = torch.compile(model, backend=count, fullgraph=fullgraph)
    for _ in range(2):
        x = leaf(4, 6)
        y = compiled(x)
        y.sum().backward()
        found = grads(x, w)
        x.grad = w.grad = None
        plain_y = block(block(x.cos())).exp()
        plain_y.sum().backward()
        torch.testing.assert_close(y, plain_y)
        torch.testing.assert_close(found, grads(x, w))
        w.grad = None
    assert len(graphs) == 1


def test_f04_wrapped_module_inside_compile(contender: Any) -> None:
    """A model whose blocks are wrapped can be compiled as a whole, and used uncompiled beside that."""
    torch.manual_seed(0)
    model = nn.Sequential(*[contender.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)])
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(3, 4)
    for m in (model, compiled, model, compiled):
        model.zero_grad()
        m(x).pow(2).sum().backward()
        found = grads(model)
        model.zero_grad()
        h = x
        for block in model:
            h = torch.tanh(F.linear(h, block[0].weight, block[0].bias))
        h.pow(2).sum().backward()
        torch.testing.assert_close(found, grads(model))


@pytest.mark.parametrize("compiler", [lambda graph: graph, torch.compile(backend="eager")], ids=["traced", "compiled"])
def test_f04_compiled_backward(equal_to_plain: Any, compiler: Any) -> None:
    """Compiled autograd traces backward through handles, and may hand its trace to the compiler."""

    def program(call: Any) -> Any:
        x, w, seen = leaf(4, 4), leaf(4, 4), []
        for _ in range(2):
            y = call(lambda t: torch.tanh(t @ w).sin(), x)
            with torch._dynamo.compiled_autograd._enable(compiler):
                y.sum().backward()
            seen.append(grads(x, w))
        return seen

    equal_to_plain(program)


# F14: fake tensors, meta tensors, nested tensors, wrapper subclasses.


def _fake_tensors(ck: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for inside in (False, True):
        for _ in range(2):
            with FakeTensorMode() as mode:
                x = torch.randn(4, 4, requires_grad=True)
                w = torch.randn(4, 4, requires_grad=True)
                y = ck.checkpoint(lambda t, w=w: F.dropout(torch.tanh(t @ w), 0.5).exp(), x)
                if inside:
                    y.sum().backward()
            if not inside:
                with mode:
                    total = y.sum()
                total.backward()
            assert x.grad.shape == (4, 4)
            assert w.grad.shape == (4, 4)
            assert type(x.grad).__name__ == "FakeTensor"


def test_f14_fake_tensors(isolated: Any) -> None:
    """A Python exception from a mode over fake tensors ends the process, so this runs in one of its own."""
    isolated(_fake_tensors)


def _fake_errors(ck: Any) -> None:
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    with FakeTensorMode():
        x = torch.randn(4, requires_grad=True)
        try:
            ck.checkpoint(lambda t: t.sin()[t > 0].exp() * int(t.detach().sum()), x)
        except (DataDependentOutputException, RuntimeError):
            return
    raise AssertionError("a data-dependent number of a fake tensor was read")


def test_f14_errors_under_fake_tensors(isolated: Any) -> None:
    isolated(_fake_errors)


def test_f14_meta_tensors(contender: Any) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.LayerNorm(4))
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            contender.checkpoint(module, x).sum().backward()
            assert x.grad.device.type == "meta"


def _jagged(ck: Any) -> None:
    def program(call: Any) -> Any:
        w, seen = torch.randn(8, 8, requires_grad=True), []

        def block(t: torch.Tensor) -> torch.Tensor:
            q = (t @ w).sin()
            heads = q.unflatten(-1, (2, 4)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2).exp()

        for lengths in ((2, 3), (2, 3), (4, 1)):
            parts = [torch.randn(n, 8) for n in lengths]
            x = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
            y = call(block, x)
            y.values().sum().backward()
            seen.append([y.values().detach(), x.grad.values(), w.grad.clone()])
        return seen

    assert_equal_to_plain(ck, program)


def test_f14_jagged_nested_tensors(isolated: Any) -> None:
    isolated(_jagged)


def _strided_nested(ck: Any) -> None:
    def program(call: Any) -> Any:
        seen = []
        for _ in range(3):
            a, b = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
            y = call(
                lambda p, q: torch.nested.to_padded_tensor(
                    torch.nested.as_nested_tensor([p.sin(), q.exp()]), 0.0
                ).cos(),
                a,
                b,
            )
            y.sum().backward()
            seen.append([y.detach(), grads(a, b)])
        return seen

    assert_equal_to_plain(ck, program)


def test_f14_strided_nested_tensors(isolated: Any) -> None:
    isolated(_strided_nested)


def test_f14_two_tensor_subclass(equal_to_plain: Any) -> None:
    """A traceable wrapper: its inner operators are recorded, and what it saves is flattened."""
    from torch.testing._internal.two_tensor import TwoTensor

    def program(call: Any) -> Any:
        seen = []
        for _ in range(3):
            x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
            y = call(lambda t: t.sin().exp().tanh(), x)
            y.sum().backward()
            seen += [x.grad.a, x.grad.b]
        return seen

    equal_to_plain(program)


SPECIAL = {
    "sparse_coo": lambda t: torch.sparse.mm(t.detach().relu().to_sparse(), t.sin()).exp(),
    "sparse_csr": lambda t: (t.detach().relu().to_sparse_csr() @ t.sin()).exp(),
    "sparse_grad": lambda t: F.embedding(torch.tensor([0, 2, 2]), t * 1.0, sparse=True).sin(),
    "mkldnn": lambda t: t.to_mkldnn().relu().to_dense().sin(),
    "quantized": lambda t: t.sin() * torch.quantize_per_tensor(t.detach(), 0.1, 0, torch.qint8).dequantize(),
    "fake_quantize": lambda t: torch.fake_quantize_per_tensor_affine(t.sin(), 0.1, 0, -128, 127).exp(),
    "embedding_bag": lambda t: F.embedding_bag(torch.tensor([[0, 1], [2, 2]]), t * 1.0, mode="max").sin(),
    "zero_tensor": lambda t: t.sin() + torch._efficientzerotensor(4, 4) * t,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
@pytest.mark.parametrize("name", SPECIAL)
def test_f14_tensors_without_plain_storage(equal_to_plain: Any, name: str) -> None:
    equal_to_plain(training(lambda: lambda t: SPECIAL[name](t), lambda: [leaf(4, 4)]))


# F20: higher-order operators.


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_f20_flex_attention(equal_to_plain: Any) -> None:
    """flex_attention has no backward on a CPU: here its result weighs a value that has one."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: torch.Tensor) -> torch.Tensor:
        return flex_attention(q.sin(), q.cos(), q, score_mod=lambda score, _b, _h, i, j: score + (i - j))

    def program(call: Any) -> Any:
        seen = []
        for _ in range(3):
            q = leaf(1, 2, 16, 8)
            y = call(lambda t: attend(t.detach()).exp() * t.sin(), q)
            y.sum().backward()
            seen.append([y.detach(), grads(q)])
        return seen

    equal_to_plain(program)


def test_f20_cond_and_loops(equal_to_plain: Any) -> None:
    def block(t: torch.Tensor) -> torch.Tensor:
        t = torch.cond(t.sum() > 0, lambda u: u.sin() * 2, lambda u: u.cos() + 1, (t * 1.0,))
        return t.exp().tanh()

    equal_to_plain(training(lambda: block, lambda: [leaf(4)], steps=6))


def test_f20_associative_scan(equal_to_plain: Any) -> None:
    from torch._higher_order_ops.associative_scan import associative_scan

    block = lambda t: associative_scan(lambda a, b: a + b, t.sin(), 0, combine_mode="generic").exp()  # noqa: E731
    equal_to_plain(training(lambda: block, lambda: [leaf(4, 3)]))


# F21: torch.func inside, tracing around.


def test_f21_func_grad_inside_names_the_remedy(contender: Any, elbowroom_only: None) -> None:
    """A gradient transform inside a region cannot work, as with torch's checkpoint: the error says what to do."""
    from elbowroom.errors import ElbowroomError

    def block(t: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda u: u.sin().sum())(t).exp()

    for _ in range(2):
        with pytest.raises(ElbowroomError, match=r"torch\.func"):
            contender.checkpoint(block, leaf(4))
    x = leaf(3)
    contender.checkpoint(lambda t: t.sin().exp(), x).sum().backward()
    assert torch.equal(x.grad, torch.exp(torch.sin(x.detach())) * torch.cos(x.detach()))


def test_f21_vmap_inside_and_around(equal_to_plain: Any) -> None:
    def program(call: Any) -> Any:
        w = torch.randn(4, 4)
        x = torch.randn(3, 4)
        per_sample = torch.func.vmap(lambda t: call(lambda u: (u @ w).sin().exp(), t).sum())
        gradients = torch.func.vmap(torch.func.grad(lambda t: call(lambda u: (u @ w).sin().exp(), t).sum()))
        return per_sample(x), gradients(x)

    equal_to_plain(program)


def test_f21_make_fx_bakes_nothing_in(contender: Any) -> None:
    """A region traced by make_fx is a plain call: the graph computes with the inputs it is given later."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradient(t: torch.Tensor) -> torch.Tensor:
        t = t.detach().requires_grad_()
        return torch.autograd.grad(contender.checkpoint(lambda u: u.sin().exp().tanh(), t).sum(), t)[0]

    graph = make_fx(gradient)(torch.ones(4))
    for _ in range(2):
        x = torch.randn(4)
        reference = x.clone().requires_grad_()
        reference.sin().exp().tanh().sum().backward()
        torch.testing.assert_close(graph(x), reference.grad)


def test_f21_export(contender: Any) -> None:
    """torch.export of a model with a region gives a program without a trace of it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return contender.checkpoint(lambda t: torch.tanh(self.lin(t)).exp(), x)

    net, x = Net(), torch.randn(2, 4)
    program = torch.export.export(net, (x,))
    torch.testing.assert_close(program.module()(x), net(x))
