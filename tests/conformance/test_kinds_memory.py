"""Memory, leaks and cycles, beyond cases 053-057, and 062: each in a process of its own, with values of 4 MiB.

The garbage collector is off where a reference cycle would show as growth. The figures are for the default policy: a
contender that saves nothing is only checked for leaks.
"""

from __future__ import annotations

import gc
import os
import tempfile
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.equality import assert_same_bits, grads, plain
from tests.conformance.resident import MIB, VALUE, VALUE_BYTES, growth_bytes, prepare, resident_bytes

SLACK = 2 * MIB


def chain(t: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        t = t.sin()  # saves its input
    return t


def net_of_linears() -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.Tanh()) for _ in range(4)]
    )


def _held_after_forward(ck: Any) -> None:
    """Four blocks: only their inputs and outputs are alive after the forward, call after call."""
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)
    for _ in range(3):

        def forward() -> torch.Tensor:
            y = x
            for _ in range(4):
                y = ck.checkpoint(chain, y)
            return y

        held, y = growth_bytes(forward)
        limit = 4 * VALUE_BYTES + SLACK if ck.saves_memory else 24 * VALUE_BYTES + SLACK
        assert held <= limit, f"{held / MIB:.1f} MiB alive after the forward, at most {limit / MIB:.1f} expected"
        y.sum().backward()
        x.grad = None


def test_kind_053_held_after_forward_every_call(isolated: Any) -> None:
    isolated(_held_after_forward)


def _held_by_linears(ck: Any) -> None:
    """The same for layers with weights, in training and with a mode in between."""
    prepare(ck)
    torch.manual_seed(0)
    model = net_of_linears()
    x = torch.randn(2048, 512, requires_grad=True)  # 4 MiB
    model(x)  # the BLAS library takes its workspace
    for step in range(4):
        held, y = growth_bytes(lambda: through_regions(ck, model, x))
        limit = 4 * VALUE_BYTES + SLACK if ck.saves_memory else 20 * VALUE_BYTES
        assert held <= limit, (
            f"step {step}: {held / MIB:.1f} MiB alive after the forward, at most {limit / MIB:.1f} expected"
        )
        y.sum().backward()


def through_regions(ck: Any, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for block in model.children():
        x = ck.checkpoint(block, x)
    return x


def test_kind_053_layers_with_weights(isolated: Any) -> None:
    isolated(_held_by_linears)


def _all_given_back(ck: Any) -> None:
    """After backward nothing of the step is left but the gradient, with the garbage collector off."""
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)
    chain(torch.ones(3))
    gc.collect()
    gc.disable()
    before = resident_bytes()
    for step in range(8):
        y = x
        for _ in range(3):
            y = ck.checkpoint(chain, y)
        if step % 3 != 1:
            y.sum().backward()
            x.grad = None
        del y
        left = resident_bytes() - before
        assert left < SLACK, f"step {step}: {left / MIB:.1f} MiB left"


def test_kind_057_all_given_back(isolated: Any) -> None:
    isolated(_all_given_back)


def _inputs_die_in_backward(ck: Any) -> None:
    """Objects, inputs and outputs a region reaches die when the user lets go, with the garbage collector off."""

    class Owner:
        def __init__(self) -> None:
            self.outputs: list[torch.Tensor] = []
            self.lin = nn.Linear(4, 4)

        def block(self, t: torch.Tensor) -> torch.Tensor:
            return self.lin(t.sin()).exp() * (1 + len(self.outputs))

    def body(with_backward: bool) -> list[weakref.ref[Any]]:
        owner, x = Owner(), torch.randn(3, 4, requires_grad=True)
        h = x * 2
        y = ck.checkpoint(owner.block, h)
        owner.outputs.append(y)
        z = ck.checkpoint(lambda t: owner.block(t).sin(), y)
        if with_backward:
            z.sum().backward()
        else:
            owner.outputs.clear()
        return [weakref.ref(o) for o in (owner, owner.lin, x, h, y, z)]

    prepare(ck)
    gc.collect()
    gc.disable()
    for with_backward in (True, True, False):
        alive = [
            n for n, r in zip(("owner", "lin", "x", "h", "y", "z"), body(with_backward), strict=True) if r() is not None
        ]
        assert not alive, f"still alive {'after backward' if with_backward else 'without backward'}: {alive}"


def test_kind_054_nothing_is_reached(isolated: Any) -> None:
    isolated(_inputs_die_in_backward)


def _failed_regions_leave_nothing(ck: Any) -> None:
    """A loop that catches exceptions from forward and backward grows by nothing."""
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)

    def bad(t: torch.Tensor) -> torch.Tensor:
        chain(t)
        raise ValueError("bad batch")

    gc.collect()
    gc.disable()
    for step in range(8):
        for fn in (bad, lambda t: ck.checkpoint(bad, t.exp())):
            try:
                ck.checkpoint(fn, x)
            except ValueError:
                pass
            else:
                raise AssertionError("the exception was swallowed")
        if step == 1:
            before = resident_bytes()
    left = resident_bytes() - before
    assert left < SLACK, f"{left / MIB:.1f} MiB left after failed regions"


def test_kind_057_failed_regions(isolated: Any) -> None:
    isolated(_failed_regions_leave_nothing)


def _attributes_read_often(ck: Any) -> None:
    """Graph walkers read ``_saved_*`` attributes of every node, many times: nothing accumulates."""
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)
    y = ck.checkpoint(lambda t: chain(t).tanh().exp(), x)

    def read_all() -> None:
        todo, seen = [y.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
            todo += [n for n, _ in node.next_functions]

    read_all()
    before = resident_bytes()
    for _ in range(6):
        read_all()
    grown = resident_bytes() - before
    assert grown < 3 * VALUE_BYTES, f"{grown / MIB:.1f} MiB more after reading the saved attributes six times more"
    y.sum().backward()


def test_kind_055_attributes_read_often(isolated: Any) -> None:
    isolated(_attributes_read_often)


def _retained_graph_keeps_the_saving(ck: Any) -> None:
    """After backward with retain_graph, and after a backward of one branch, replayed values are gone again."""
    prepare(ck)
    x = torch.randn(VALUE, requires_grad=True)

    def forward() -> Any:
        y = x
        for _ in range(3):
            y = ck.checkpoint(chain, y)
        return y, ck.checkpoint(lambda t: chain(t).exp(), y)

    held, (y, z) = growth_bytes(forward)
    if ck.saves_memory:
        assert held <= 5 * VALUE_BYTES + SLACK, f"{held / MIB:.1f} MiB alive after the forward"
    before = resident_bytes()
    for root in (z, y, z):
        torch.autograd.grad(root.sum(), x, retain_graph=True)
        left = resident_bytes() - before
        assert left < SLACK, f"{left / MIB:.1f} MiB more after a backward over a retained graph"


def test_kind_057_retained_graph(isolated: Any) -> None:
    isolated(_retained_graph_keeps_the_saving)


class Tied(nn.Module):
    """A block used three times, one that is not always used, and a BatchNorm."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.block, self.other, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.call, self.use_other = call, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.call(lambda t: torch.tanh(self.block(t)), x)
        if self.use_other:
            x = self.call(self.other, x)
        return self.call(lambda t: F.dropout(self.norm(t), 0.3), x)


def _ddp(ck: Any) -> None:
    """DistributedDataParallel of one process: tied and unused blocks, static graph, gradients as bucket views."""
    import torch.distributed as dist

    def train(call: Any, wrapped: dict[str, Any] | None) -> Any:
        torch.manual_seed(0)
        net = Tied(call)
        model = net if wrapped is None else nn.parallel.DistributedDataParallel(net, **wrapped)
        for step in range(4):
            net.use_other = bool(step % 2) or bool(wrapped and wrapped.get("static_graph"))
            x = torch.randn(4, 6)
            model(x).pow(2).sum().backward()
        return grads(net), list(net.norm.buffers())

    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        for options in (
            {"find_unused_parameters": True},
            {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        ):
            assert_same_bits(train(plain, options), train(ck.checkpoint, options))
        assert_same_bits(train(plain, None), train(ck.checkpoint, None))
        assert_same_bits(train(plain, {"static_graph": True}), train(ck.checkpoint, {"static_graph": True}))
    finally:
        dist.destroy_process_group()


def test_kind_062_data_parallel(isolated: Any) -> None:
    isolated(_ddp)
