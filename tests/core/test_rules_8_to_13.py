"""The engine rules 8 to 13, each with tests named after it; 1 to 7 are in test_rules.py.

Every test was seen failing once, with the engine broken in a scratch copy in the way that its comment names.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import elbowroom
from elbowroom.errors import ProofError, ReplayError, UsageError
from tests.conformance.equality import assert_same_bits
from tests.core.counting import (
    assert_equal_to_plain,
    drafted,
    fresh,
    gradients,
    plain,
    programs_of,
)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# 8. Opaque -----------------------------------------------------------------------------------------------------------


# Broken by: an AddressWatch that never calls `touch`; verify="never", so that no fingerprint helps.
def test_rule_8_opaque_by_structure_not_by_luck() -> None:
    def body(x: torch.Tensor, amount: float) -> torch.Tensor:
        h = x * 2
        h.detach().numpy()[:] += amount  # nothing changes at the first call
        return (h + 1).sin()

    fn = fresh(body)
    x = leaf(4)
    for amount in (0.0, 1.0, 2.0, 0.0):
        assert_equal_to_plain(fn, x, amount, calls=1, verify="never")
    assert [row.nbytes for row in elbowroom.proof(fn).kept] == [16]


# Broken by: `unfilled` always False.
def test_rule_8_opaque_memory_read_before_it_was_filled() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        mask = torch.empty(4)
        with torch._C.DisableTorchFunction():  # a kernel that nobody watches
            np.asarray(torch.from_dlpack(torch.utils.dlpack.to_dlpack(mask)))[:] = 3.0
        return (x * mask).sin()

    fn = fresh(body)
    assert_equal_to_plain(fn, leaf(4))
    assert "before any recorded operator filled it" in elbowroom.proof(fn).kept[0].why


# Broken by: `_beside` recording nothing (a process group as an argument); by `facts.communicates` always False.
@pytest.mark.parametrize("kind", ["process group", "functional"])
def test_rule_8_opaque_communication(tmp_path: Any, kind: str) -> None:
    import torch.distributed as dist
    import torch.distributed._functional_collectives  # registers the operators

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:

        def body(x: torch.Tensor) -> torch.Tensor:
            h = x * 2
            with torch.no_grad():
                total = h.detach().clone()
                if kind == "process group":
                    dist.all_reduce(total)
                else:
                    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
                    total = torch.ops._c10d_functional.all_reduce(total, "sum", name)
                    total = torch.ops._c10d_functional.wait_tensor(total)
            return (h * total).sin()

        fn = fresh(body)
        assert_equal_to_plain(fn, leaf(4), verify="never")
        (program,) = programs_of(fn)
        assert not any("c10d" in str(op.func) for op in program.ops), "never recorded, so never replayed"
        if kind == "process group":  # it wrote to what the region made; the other kind returned what nobody made
            assert any("communicates" in row.why for row in elbowroom.proof(fn).kept)
    finally:
        dist.destroy_process_group()


# 9. Proof ------------------------------------------------------------------------------------------------------------


_fickle = {"on": False, "n": 0}


@torch.library.custom_op("elbowroom_tests::sometimes_fickle", mutates_args=())
def sometimes_fickle(x: torch.Tensor) -> torch.Tensor:
    _fickle["n"] += _fickle["on"]
    return x + _fickle["n"]


sometimes_fickle.register_autograd(lambda ctx, grad: grad)


# Broken by: `Rerun.differing` saying that nothing differs.
def test_rule_9_proof_keeps_what_does_not_repeat() -> None:
    _fickle.update(on=True, n=0)
    fn = fresh(lambda x: (sometimes_fickle(x * 2) * 3).sin())
    elbowroom.checkpoint(fn, leaf(4)).sum().backward()
    found = elbowroom.proof(fn)
    assert (found.operators, found.proved) == (4, 3)
    assert [(row.operator, row.nbytes) for row in found.kept] == [("elbowroom_tests.sometimes_fickle.default", 16)]


# Broken by: `next_proof` never reached again.
def test_rule_9_proof_is_repeated_at_calls_2_4_8_and_raises() -> None:
    _fickle.update(on=False, n=0)
    fn = fresh(lambda x: (sometimes_fickle(x * 2) * 3).sin())
    with drafted() as seen:
        counts = []
        for _ in range(9):
            seen.clear()
            elbowroom.checkpoint(fn, leaf(4)).sum().backward()
            counts.append(len(seen))
    assert counts == [4, 4, 0, 4, 0, 0, 0, 4, 0]
    _fickle["on"] = True
    for _ in range(6):
        elbowroom.checkpoint(fn, leaf(4))  # calls 10 to 15: nobody looks
    with pytest.raises(ProofError) as caught:
        elbowroom.checkpoint(fn, leaf(4))
    assert caught.value.calls_in_doubt == 7  # calls 9 to 15
    assert caught.value.operator == "elbowroom_tests.sometimes_fickle.default"
    elbowroom.checkpoint(fn, leaf(4)).sum().backward()
    assert any("sometimes_fickle" in row.operator for row in elbowroom.proof(fn).kept)


# Broken by: `verify` not looked at.
def test_rule_9_proof_always_and_never() -> None:
    for verify, expected in [("never", [4, 0, 0, 0]), ("always", [4, 4, 4, 4])]:
        _fickle.update(on=False, n=0)
        fn = fresh(lambda x: (sometimes_fickle(x * 2) * 3).sin())
        counts = []
        for _ in range(4):
            with drafted() as seen:
                elbowroom.checkpoint(fn, leaf(4), verify=verify).sum().backward()
            counts.append(len(seen))
        assert counts == expected
        assert elbowroom.proof(fn).proved == (0 if verify == "never" else 4)


# 10. Autograd citizenship --------------------------------------------------------------------------------------------


# Broken by: `Handle.__del__` ignoring retained graphs (release at the first ask).
def test_rule_10_autograd_citizenship() -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (x @ w).tanh()
        (force,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        h = h * force.sin()
        return elbowroom.checkpoint(lambda h: (h * 3).sin(), h), (h @ w).exp()

    def use(call: Any) -> list[Any]:
        torch.manual_seed(0)
        seen: list[Any] = []
        for _ in range(4):
            x, w = leaf(4, 4), leaf(4, 4)
            one, other = call(fn, x, w)
            hooked: list[torch.Tensor] = []
            one.register_hook(hooked.append)
            seen += torch.autograd.grad(one.sum(), (x, w), retain_graph=True)
            seen += torch.autograd.grad(other.sum(), w, retain_graph=True)
            (g,) = torch.autograd.grad(one.sum() + other.sum(), x, create_graph=True)
            seen += torch.autograd.grad(g.pow(2).sum(), (x, w), retain_graph=True)
            torch.autograd.backward([one.sum(), other.sum()], inputs=[x])
            seen += [x.grad, w.grad, *hooked]
        return seen

    fn = fresh(body)
    assert_same_bits(use(plain), use(elbowroom.checkpoint))


class _Torchs(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return torch_checkpoint(self.fn, x, use_reentrant=False)


# Broken by: `Packed` unpacked at every read.
@pytest.mark.parametrize("outside", [True, False])
def test_rule_10_autograd_citizenship_with_torchs_checkpoint(outside: bool) -> None:
    linear = nn.Linear(4, 4)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(linear(x)), 0.2)

    def use(call: Any) -> list[Any]:
        torch.manual_seed(0)
        seen: list[Any] = []
        for _ in range(4):
            x = leaf(3, 4)
            if outside:
                out = torch_checkpoint(lambda x: call(inner, call(inner, x)).sin(), x, use_reentrant=False)
            else:
                twice = nn.Sequential(_Torchs(inner), _Torchs(inner))
                out = call(twice, x)
            out.sum().backward()
            seen += [x.grad, linear.weight.grad.clone()]
            linear.zero_grad()
        return seen

    assert_same_bits(use(plain), use(elbowroom.checkpoint))


# Broken by: a tape without a lock.
def test_rule_10_autograd_citizenship_in_threads() -> None:
    fn = fresh(lambda x, w: F.dropout((x @ w).sin(), 0.3) @ w)
    x, w = leaf(8, 8), leaf(8, 8)
    out = elbowroom.checkpoint(fn, x, w).sum()
    expected = torch.autograd.grad(out, (x, w), retain_graph=True)
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(15):
                assert_same_bits(list(expected), list(torch.autograd.grad(out, (x, w), retain_graph=True)))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Broken by: `explained` returning None.
def test_rule_10_autograd_citizenship_names_the_remedy_for_transforms_inside() -> None:
    fn = fresh(lambda x: torch.func.grad(lambda y: (y * y).sum())(x * 2).sin())
    with pytest.raises(UsageError, match=r"calls a gradient transform of torch.func .* Leave this region out, or use"):
        elbowroom.checkpoint(fn, leaf(3))


# 11. Guests ----------------------------------------------------------------------------------------------------------


# Broken by: `value_of` taking an alias of a Parameter for the source (`by_identity` always False).
def test_rule_11_guests_a_parameter_is_a_source_by_identity() -> None:
    weight = nn.Parameter(torch.randn(4))
    full = weight.detach().clone()

    def body(x: torch.Tensor) -> torch.Tensor:
        return (x * weight + 1).sin()

    fn = fresh(body)
    x = leaf(4)
    for _ in range(3):
        expected = torch.autograd.grad(body(x).sum(), x)
        out = elbowroom.checkpoint(fn, x).sum()
        # A sharding engine frees the gathered memory after forward, and gathers it again, elsewhere, before backward.
        gathered = weight.untyped_storage()._weak_ref()
        weight.data = torch.empty(0)
        assert torch.UntypedStorage._expired(gathered), "nobody holds what was gathered"
        torch.UntypedStorage._free_weak_ref(gathered)
        weight.data = torch.cat([torch.zeros(7), full])[7:]
        found = torch.autograd.grad(out, x)
        assert_same_bits(list(expected), list(found))


# Broken by: `pack_through` not called.
def test_rule_11_guests_outer_hooks_get_sources_and_kept_values() -> None:
    packed: list[torch.Size] = []

    def pack(t: torch.Tensor) -> Any:
        packed.append(t.shape)
        return t.clone()

    fn = fresh(lambda x, w: (x @ w + 1).sin())
    x, w = leaf(2, 4), leaf(4, 3)
    for _ in range(3):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = elbowroom.checkpoint(fn, x, w, keep="matmuls")
        assert sorted(packed) == [(2, 3), (2, 4), (4, 3)]
        assert_same_bits(
            list(torch.autograd.grad(fn(x, w).sum(), (x, w))), list(torch.autograd.grad(out.sum(), (x, w)))
        )


# Broken by: returning func(...) instead of NotImplemented for wrapper tensors.
def test_rule_11_guests_wrapper_tensors_are_recorded_inside() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def body(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().exp()

    fn = fresh(body)
    for _ in range(3):
        a, b = torch.randn(4), torch.randn(4)
        found = []
        for contender in (plain, elbowroom.checkpoint):
            x = TwoTensor(a, b).requires_grad_()
            contender(fn, x).sum().backward()
            found.append([x.grad.a, x.grad.b])
        assert_same_bits(found[0], found[1])
    assert elbowroom.proof(fn).replays == 3 * 2 * 3  # three operators on both halves: exp() saved its result
    assert elbowroom.proof(fn).kept == ()


# 12. Errors in replay ------------------------------------------------------------------------------------------------

_weather = {"bad": False}


@torch.library.custom_op("elbowroom_tests::weather", mutates_args=())
def weather(x: torch.Tensor) -> torch.Tensor:
    if _weather["bad"]:
        raise OverflowError("rain")
    return x + 1


weather.register_autograd(lambda ctx, grad: grad)


# Broken by: `_run` without its except clause.
def test_rule_12_errors_in_replay_say_where() -> None:
    fn = fresh(lambda x: (weather(x * 2) * 3).sin())
    out = elbowroom.checkpoint(fn, leaf(2, 3))
    _weather["bad"] = True
    try:
        with pytest.raises(ReplayError) as caught:
            out.sum().backward()
    finally:
        _weather["bad"] = False
    error = caught.value
    assert (error.operator, error.shapes) == ("elbowroom_tests.weather.default", "float32[2, 3]")
    assert error.line.startswith(f"{__file__}:")
    assert isinstance(error.__cause__, OverflowError)
    assert "test_rule_12" in error.region


# 13. Cheap -----------------------------------------------------------------------------------------------------------


# Broken by: `everything` not asked for in Region.run.
def test_rule_13_cheap_keeping_everything_costs_nothing() -> None:
    class Modes(TorchDispatchMode):
        depth = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Modes.depth = max(Modes.depth, torch._C._len_torch_dispatch_stack())
            return func(*args, **(kwargs or {}))

    fn = fresh(lambda x: (x * 2).sin())
    x = leaf(3)
    with Modes():
        elbowroom.checkpoint(fn, x, keep="everything")
    assert Modes.depth == 0, "no other mode was on the stack"
    assert elbowroom.proof(fn).calls == 0


# Broken by: a `_before` that drafts whenever scalars are not the same objects.
def test_rule_13_cheap_steady_state_drafts_nothing_and_makes_no_program() -> None:
    fn = fresh(lambda x, w: F.dropout(F.softmax(F.gelu(x @ w) * 0.5, -1), 0.1).masked_fill(x > 9, float("-inf")))
    for _ in range(2):
        gradients(elbowroom.checkpoint, fn, leaf(4, 4), leaf(4, 4))
    with drafted() as seen:
        gradients(elbowroom.checkpoint, fn, leaf(4, 4), leaf(4, 4))
    assert seen == []
    assert len(programs_of(fn)) == 1


# Broken by: `_encode` leaving scalars out; by leaving sizes out.
def test_rule_13_cheap_is_sound() -> None:
    def body(x: torch.Tensor, y: torch.Tensor, a: float, axis: int) -> torch.Tensor:
        h = (x * a).sin() + y.sum(axis, keepdim=True)
        return h.clamp(-a, a).exp()

    fn = fresh(body)
    x, y, z = leaf(4, 4), leaf(4, 4), leaf(2, 4)
    for args in [
        (x, y, 1.0, 0), (x, y, 1.0, 0), (x, y, 1.0, 0), (x, y, 2.0, 0), (x, y, 2.0, 1), (y, x, 2.0, 1), (x, x, 2.0, 1),
        (z, y, 2.0, 0), (x.detach().t().requires_grad_(), y, 2.0, 0), (x, y, 1, 0), (x, y, True, 0), (x, y, -0.0, 0),
    ]:  # fmt: skip
        assert_equal_to_plain(fn, *args, calls=1)


# Broken by: `leave` forgetting what was held so far.
def test_rule_13_cheap_a_call_that_leaves_loses_nothing() -> None:
    def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, path: int) -> torch.Tensor:
        h = F.dropout(x @ w, 0.3)
        b.add_(1)
        if path == 1:
            h = h * b.clone()
        h = (h * w).sin()
        return h.exp() if path == 2 else h @ w

    fn = fresh(body)
    x, w = leaf(4, 4), leaf(4, 4)
    for path in (0, 0, 0, 1, 0, 2, 1, 2, 0, 0, 2):
        runs = []
        for contender in (plain, elbowroom.checkpoint):
            torch.manual_seed(path)
            b = torch.zeros(4)
            runs.append([gradients(contender, fn, x, w, b, path), b, torch.get_rng_state()])
        assert_same_bits(runs[0], runs[1], f"path {path}: ")
    assert len(programs_of(fn)) == 3
