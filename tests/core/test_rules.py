"""The engine rules 1 to 7, each with tests named after it; 8 to 13 are in test_rules_8_to_13.py.

Every test was seen failing once, with the engine broken in a scratch copy in the way that its comment names.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom
from elbowroom.errors import ChangedTensorError
from tests.conformance.equality import assert_same_bits
from tests.core.counting import (
    assert_equal_to_plain,
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
