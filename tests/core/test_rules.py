"""The thirteen engine rules, each with tests named after it.

Every test was seen failing once, with the engine broken in a scratch copy in the way that its comment names.
"""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import elbowroom
from elbowroom.errors import ChangedTensorError, ProofError, ReplayError, UsageError
from tests.conformance.equality import assert_same_bits
from tests.core.counting import (
    assert_equal_to_plain,
    drafted,
    fresh,
    gradients,
    held_bytes,
    needed_operators,
    plain,
    programs_of,
    tape_of,
    tapes_of,
)


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# 1. Once -------------------------------------------------------------------------------------------------------------


# Broken by: Region.run calling fn a second time.
def test_rule_1_once_forward_runs_once_and_backward_runs_no_python() -> None:
    runs: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (x * 2).sin().exp()

    fn = fresh(body)
    for call in range(4):
        elbowroom.checkpoint(fn, leaf(3)).sum().backward()
        assert len(runs) == call + 1


# Broken by: `_plain` returning False.
def test_rule_1_once_plain_where_there_is_nothing_to_save() -> None:
    fn = fresh(lambda x: (x * 2).sin())
    x = leaf(3)
    with torch.no_grad():
        elbowroom.checkpoint(fn, x)
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        assert torch.equal(elbowroom.checkpoint(fn, x), fn(x))
    torch.func.grad(lambda x: elbowroom.checkpoint(fn, x).sum())(x.detach())
    assert elbowroom.proof(fn).calls == 0


# Broken by: `_stop` raising what it is given.
def test_rule_1_once_the_recorder_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = importlib.import_module("elbowroom.core.recorder")

    def defect(*args: Any) -> Any:
        raise AssertionError("a defect of ours")

    monkeypatch.setattr(recorder.Recorder, "_before", defect)
    fn = fresh(lambda x: (x * 2).sin())
    x = leaf(3)
    with pytest.warns(RuntimeWarning, match="recording region .* failed"):
        found = gradients(elbowroom.checkpoint, fn, x)
    assert_same_bits(gradients(plain, fn, x), found)


# 2. Same bits --------------------------------------------------------------------------------------------------------


# Broken by: `hermetic.__enter__` not forcing the recorded keys; by `_run` not setting the default dtype.
def test_rule_2_same_bits_whatever_surrounds_backward() -> None:
    class Doubling(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.ops.aten.exp.default else out

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (x @ w).exp() * torch.linspace(0.1, 1.3, 4)
        return h.sin()

    for surrounded in ("mode", "autocast", "dtype", "anomaly", "no_grad"):
        fn = fresh(body)
        x, w = leaf(4, 4), leaf(4, 4)
        expected = torch.autograd.grad(body(x, w).sum(), (x, w))
        for _ in range(3):
            out = elbowroom.checkpoint(fn, x, w).sum()
            if surrounded == "mode":
                with Doubling():
                    found = torch.autograd.grad(out, (x, w))
            elif surrounded == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    found = torch.autograd.grad(out, (x, w))
                plain_out = body(x, w).sum()
                with torch.autocast("cpu", torch.bfloat16):
                    expected = torch.autograd.grad(plain_out, (x, w))
            elif surrounded == "dtype":
                torch.set_default_dtype(torch.float64)
                try:
                    found = torch.autograd.grad(out, (x, w))
                finally:
                    torch.set_default_dtype(torch.float32)
            elif surrounded == "anomaly":
                with torch.autograd.set_detect_anomaly(True, check_nan=False):
                    found = torch.autograd.grad(out, (x, w))
            else:
                with torch.no_grad():
                    found = torch.autograd.grad(out, (x, w))
            assert_same_bits(list(expected), list(found), f"{surrounded}: ")


# Broken by: replays without Conjugate and Negative keys; by Geometry without its conj bit.
def test_rule_2_same_bits_of_conjugates_and_the_forward_itself() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        h = (x @ x.conj()).conj() * 2
        return (torch.linalg.pinv(h) @ h.mH).sin()

    x = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    assert_equal_to_plain(fresh(body), x)


# 3. Only what is needed, once -----------------------------------------------------------------------------------------


# Broken by: `_plan_sweep` without the loop that takes crossing handles along (each ask re-runs the prefix).
@pytest.mark.parametrize("n", [10, 60])
def test_rule_3_only_what_is_needed_once_linear(n: int) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for _ in range(n):
            x = x + 1.5  # the running value is saved by nobody
            total = total + (x + 0.5).sin().sum()
        return total

    fn = fresh(body)
    elbowroom.checkpoint(fn, leaf(3)).backward()
    assert elbowroom.proof(fn).replays == 2 * n  # each running value and its branch, once; no sine is needed


# Broken by: the sweep running all operators.
def test_rule_3_only_what_is_needed_once_not_the_block() -> None:
    fn = fresh(lambda x, w: F.gelu(x @ w) @ w)
    elbowroom.checkpoint(fn, leaf(4, 4), leaf(4, 4)).sum().backward()
    (program,) = programs_of(fn)
    needed = [str(program.ops[k].func) for k in sorted(needed_operators(program))]
    assert needed == ["aten.mm.default", "aten.gelu.default"]
    assert elbowroom.proof(fn).replays == 2  # of three


# Broken by: `_schedule` giving no value as `ours`.
def test_rule_3_only_what_is_needed_once_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        h = x + 1
        for _ in range(20):
            h.mul_(1.01)
        return h.sin()

    fn = fresh(body)
    out = elbowroom.checkpoint(fn, leaf(1000)).sum()
    copies: list[int] = []
    clone = torch.UntypedStorage.clone
    monkeypatch.setattr(torch.UntypedStorage, "clone", lambda storage: (copies.append(1), clone(storage))[1])
    out.backward()
    assert elbowroom.proof(fn).replays == 21
    assert copies == [], "the sum is the replay's own, and each version is read for the last time by its next write"


# 4. Lifetimes --------------------------------------------------------------------------------------------------------


# Broken by: a tape that refers to its recorder after `_settle` (`adopt` not set to None).
def test_rule_4_lifetimes_end_without_the_collector() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.gelu(self.linear(x)), 0.1)

    gc.collect()
    gc.disable()
    try:
        block = elbowroom.wrap(Block())
        x = leaf(8, 64)
        for _ in range(2):
            block(x).sum().backward()
        before = held_bytes()
        for keep in (None, "matmuls"):
            elbowroom.wrap(block, keep=keep)
            block(x).sum().backward()
            inner = block(x)
            alive = weakref.ref(inner)
            del inner
            assert alive() is None
        assert held_bytes() == before
        assert tapes_of(block) == []
    finally:
        gc.enable()


# Broken by: `Tape._release` doing nothing.
def test_rule_4_lifetimes_end_value_by_value() -> None:
    fn = fresh(lambda x: [(x + float(i)).exp() for i in range(6)])
    x = leaf(1000)
    outs = elbowroom.checkpoint(fn, x, keep=lambda v: True)
    outs = [out.sum() for out in outs]
    while outs:
        before = held_bytes()
        if len(outs) % 2:
            torch.autograd.grad(outs.pop(), x)
        else:
            outs.pop()
        assert before - held_bytes() == 4000 + 4  # what exp() saved, and the sum


# Broken by: `end_of_task` doing nothing.
def test_rule_4_lifetimes_of_caches_end_with_the_task() -> None:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (x + 1).sin() + 2
        return h.sin(), (h + 3).cos()

    fn = fresh(body)
    one, _other = elbowroom.checkpoint(fn, leaf(100))
    tape = tape_of(programs_of(fn)[0])
    before = held_bytes()
    for _ in range(2):
        one.sum().backward(retain_graph=True)
        assert tape._cache == {}
        assert held_bytes() == before


# 5. Randomness -------------------------------------------------------------------------------------------------------


# Broken by: `remember` returning (); by `drawing_from` not putting the state back.
def test_rule_5_randomness_comes_again_and_streams_go_on() -> None:
    own = torch.Generator()

    def body(x: torch.Tensor) -> torch.Tensor:
        h = (F.dropout(x, 0.5) + torch.randn_like(x)).sin()
        return F.rrelu(h, training=True) * torch.rand(x.shape, generator=own)

    fn = fresh(body)
    x = leaf(40)
    runs = []
    for contender in (plain, elbowroom.checkpoint):
        torch.manual_seed(1)
        own.manual_seed(2)
        runs.append([[gradients(contender, fn, x) for _ in range(4)], torch.get_rng_state(), own.get_state()])
    assert_same_bits(runs[0], runs[1])


# 6. Mutation ---------------------------------------------------------------------------------------------------------


# Broken by: `_scratch_for` returning the storages themselves (replays write to what others hold).
def test_rule_6_mutation_never_writes_to_what_others_hold() -> None:
    norm = nn.BatchNorm1d(4)
    state = torch.zeros(4)

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = norm(x * 2)
        state.add_(h.detach().mean(0))
        g = h * state.clone()
        g.mul_(2).clamp_(-1, 1)
        torch._foreach_add_([g, state], [h, h[0].detach()])
        return g.sin(), g

    fn = fresh(body)
    runs = []
    torch.manual_seed(0)
    xs = [leaf(8, 4) for _ in range(5)]
    for contender in (plain, elbowroom.checkpoint):
        state.zero_()
        norm.reset_running_stats()
        run: list[Any] = []
        for x in xs:
            out, g = contender(fn, x)
            seen = g.detach().clone()
            for _ in range(2):  # a replay that wrote to what is held would read it changed the second time
                out.sum().backward(retain_graph=True)
            assert torch.equal(g, seen), "backward left the returned value alone"
            run += [out.detach(), x.grad, state.clone(), norm.running_mean.clone(), norm.running_var.clone()]  # type: ignore[union-attr]
            x.grad = None
        runs.append(run)
    assert_same_bits(runs[0], runs[1])


# Broken by: `_bindings` taking `slot.value` for all slots.
def test_rule_6_mutation_after_saving_binds_late() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).exp()
        y.data.mul_(3)  # plain autograd multiplies by the new content, and so do we
        return y

    fn = fresh(body)
    x = leaf(4)
    assert_equal_to_plain(fn, x)
    refused = fresh(lambda x: (x * 2).exp().mul_(3))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            elbowroom.checkpoint(refused, x).sum().backward()


# 7. Changed under us -------------------------------------------------------------------------------------------------


# Broken by: `_at_hand` returning what is held without looking at versions.
def test_rule_7_changed_under_us_never_a_wrong_gradient() -> None:
    fn = fresh(lambda x, mask: (x * mask + 1).sin())
    x, mask = leaf(4), torch.ones(4)
    for _ in range(3):
        out = elbowroom.checkpoint(fn, x, mask)
        mask.zero_()
        with pytest.raises(ChangedTensorError, match=r"argument 1 \(float32\[4\]\).*changed between forward"):
            out.sum().backward()
        mask.fill_(1)


# Broken by: `_lazily_cloned` returning the tensor itself.
def test_rule_7_changed_under_us_activations_may_change() -> None:
    fn = fresh(lambda h: (h + 1).sin())
    for _ in range(3):
        x = leaf(4)
        h = x * 2
        out = h + 0
        h2 = elbowroom.checkpoint(fn, h)
        with torch.no_grad():
            h.add_(5)  # a residual stream written in place: plain autograd did not save it
        (found,) = torch.autograd.grad(h2.sum() + out.sum(), x)
        assert torch.equal(found, ((x.detach() * 2 + 1).cos() + 1) * 2)


# Broken by: `view` without its comparison of extents (that is a segmentation fault: run it alone).
def test_rule_7_changed_under_us_storage_freed() -> None:
    fn = fresh(lambda x, w: (x * w + 1).sin())
    x, w = leaf(4), torch.ones(4)
    for _ in range(3):
        out = elbowroom.checkpoint(fn, x, w)
        w.untyped_storage().resize_(0)
        with pytest.raises(ChangedTensorError, match="storage was freed or shrunk: the view needs 16 bytes, 0 are"):
            out.sum().backward()
        w.untyped_storage().resize_(16)
        w.fill_(1)


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
