"""What breaks replay if its rules are not kept: findings about values (F5, F8, F12, F13, F15, F16, F18, F23).

Each test fails when the rule that answers its finding is broken. F16 has no test, because there is no sound rule:
bytes that somebody writes through a pointer taken *before* the region, into a source that plain autograd would not
save, cannot be seen from here (a ``.numpy()`` view of a batch buffer that the loader refills between forward and
backward is the usual example; torch's own checkpoint is wrong there too). The documentation says so.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.contenders import Elbowroom
from tests.conformance.equality import assert_equal_to_plain, grads, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# F5: replay is hermetic (more in test_kinds_autocast.py).


def test_f05_lstm_under_recorded_grad_mode(equal_to_plain: Any) -> None:
    """mkldnn_rnn_layer gives no workspace under no_grad, which backward runs in."""
    for make in (lambda: nn.LSTM(4, 5), lambda: nn.GRU(4, 5, bidirectional=True), lambda: nn.RNN(4, 5)):
        equal_to_plain(training(make, lambda: [leaf(6, 2, 4)]))


def test_f05_denormals_flushed_between(equal_to_plain: Any) -> None:
    """A processor flag that kernels read, changed between forward and backward."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush denormal numbers")

    def program(call: Any) -> Any:
        x, seen = torch.linspace(0.5, 1.0, 32).requires_grad_(), []
        for _ in range(2):
            y = call(lambda t: ((t * 1e-30) * 1e-10 * 1e30 * 1e10).sin().exp(), x)
            torch.set_flush_denormal(True)
            try:
                y.sum().backward()
            finally:
                torch.set_flush_denormal(False)
            seen.append(grads(x))
        return seen

    equal_to_plain(program)


def test_f05_modes_around_backward(contender: Any) -> None:
    """Backward under modes that plain autograd accepts: no_grad, set_grad_enabled, autocast, a device context."""
    x = leaf(4)
    for mode in (
        torch.no_grad(),
        torch.enable_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ):
        y = contender.checkpoint(lambda t: (t.outer(t) @ t).sin().exp(), x)
        total = y.sum()
        with mode:
            total.backward()
        found, x.grad = x.grad, None
        total = (x.outer(x) @ x).sin().exp().sum()
        with mode:
            total.backward()
        assert torch.equal(found, x.grad)
        x.grad = None


# F8: the recorder itself must not change the forward.


COMPLEX = {
    "pinv": lambda t: torch.linalg.pinv(t),
    "pinv_hermitian": lambda t: torch.linalg.pinv(t @ t.mH, hermitian=True),
    "conjugate_product": lambda t: t.conj() @ t.mT.conj().resolve_conj(),
    "imaginary_of_conjugate": lambda t: t.conj().imag.exp() + t.real,
    "negative_view": lambda t: torch._neg_view(t).sin(),
    "view_as_real": lambda t: torch.view_as_complex(torch.view_as_real(t.conj().resolve_conj()) * 2).exp(),
    "fft": lambda t: torch.fft.ifft(torch.fft.fft(t).conj()).abs(),
    "solve": lambda t: torch.linalg.solve(t[:3, :3], t[:3].conj()),
    "svd": lambda t: torch.linalg.svdvals(t.conj()),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_f08_complex_forward_is_plain(equal_to_plain: Any, name: str) -> None:
    """Lazy conjugation and negation inside composite operators."""
    make = lambda: [torch.randn(3, 5, dtype=torch.complex64, requires_grad=True)]  # noqa: E731
    equal_to_plain(training(lambda: lambda t: COMPLEX[name](t * 1.5), make))


# F12: what autograd saved is bound at the region's end.


def write_data_after_save(t: torch.Tensor) -> torch.Tensor:
    h = t * 2
    y = h.sin()
    h.data.mul_(3)  # moves no counter: plain backward reads the new content
    return y.exp() + h.detach().cos()


def write_detached_numpy_after_save(t: torch.Tensor) -> torch.Tensor:
    h = t * 2
    y = h.sin()
    h.detach().numpy()[...] *= 2
    return y.exp()


def write_unsafe_after_save(t: torch.Tensor) -> torch.Tensor:
    h = t * 2
    y = h.sin() * h.cos()
    with torch.autograd._unsafe_preserve_version_counter(h), torch.no_grad():
        h.add_(1)
    return y.tanh()


@pytest.mark.parametrize("block", [write_data_after_save, write_detached_numpy_after_save, write_unsafe_after_save])
def test_f12_save_then_write(equal_to_plain: Any, block: Any) -> None:
    equal_to_plain(training(lambda: block, lambda: [leaf(6)]))


def test_f12_write_after_save_that_plain_refuses(contender: Any) -> None:
    """``exp`` saved its result, then it was written: plain's backward raises, so does ours, in every call."""
    for _ in range(4):
        y = contender.checkpoint(lambda t: t.exp().add_(1).sin(), leaf(4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# F13: freed storage.


def _freed_storage(ck: Any) -> None:
    from elbowroom.errors import ChangedTensorError

    for what in ("input", "parameter", "buffer"):
        for _ in range(2):
            module = nn.Linear(64, 64)
            buffer, x = torch.randn(64), torch.randn(64, 64, requires_grad=True)
            h = x * 1.0
            y = ck.checkpoint(lambda t, m=module, b=buffer: (m(t + b).sin() * b).exp(), h)
            expected = torch.autograd.grad((module(x + buffer).sin() * buffer).exp().sum(), x)
            tensor = {"input": h, "parameter": module.weight, "buffer": buffer}[what]
            tensor.untyped_storage().resize_(0)
            try:
                y.sum().backward()
            except ChangedTensorError as error:
                if "storage" not in str(error):
                    raise
                continue
            # an activation that plain autograd would not have saved may be held as a lazy clone
            assert what == "input", f"{what}: backward read a freed storage and said nothing"
            assert torch.equal(x.grad, *expected)


def test_f13_freed_storage_is_an_error_not_a_crash(isolated: Any, elbowroom_only: None) -> None:
    isolated(_freed_storage)


def _freed_and_refilled(ck: Any) -> None:
    def program(call: Any) -> Any:
        module, x, seen = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True), []
        for _ in range(3):
            full = module.weight.detach().clone()
            y = call(lambda t: module(t.sin()).sin().exp(), x)
            storage = module.weight.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(module.weight):
                module.weight.copy_(full)
            y.sum().backward()
            seen.append(grads(x, module))
        return seen

    assert_equal_to_plain(ck, program)


def test_f13_freed_and_refilled(isolated: Any) -> None:
    """As sharded training does between forward and backward: the same storage, freed and filled again."""
    isolated(_freed_and_refilled)


# F15: the steady state compares more than operators.


def test_f15_scalars_change(equal_to_plain: Any) -> None:
    """A schedule: the same operators with other Python numbers, dropout rates, dims and dtypes in every call."""

    def block(t: torch.Tensor, a: float, p: float, dim: int, dtype: torch.dtype) -> torch.Tensor:
        h = torch.add(t.sin(), t, alpha=a).to(dtype)
        return F.dropout((h * a).softmax(dim).exp(), p).float().tanh()

    def program(call: Any) -> Any:
        x, seen = leaf(4, 4), []
        for n in range(8):
            y = call(block, x, 1.0 + n // 2, 0.1 * (n % 3), n % 2, (torch.float64, torch.bfloat16)[n % 4 == 3])
            y.sum().backward()
            seen.append([y.detach(), grads(x)])
        return seen

    equal_to_plain(program)


def test_f15_wiring_and_geometry_change(equal_to_plain: Any) -> None:
    """The same operators over other values, other slices, other strides."""

    def block(t: torch.Tensor, n: int) -> torch.Tensor:
        parts = [t.sin(), t.cos(), t.exp()]
        a, b = parts[n % 3], parts[(n + 1) % 3]
        window = a[n % 2 : n % 2 + 3]
        other = torch.as_strided(b.contiguous(), (3, 3), (1, 4) if n % 2 else (4, 1))
        return (window[:, :3] * other).tanh() * (parts[(n * n) % 3][:3, :3] * window[:, :3]).sigmoid()

    def program(call: Any) -> Any:
        x, w, seen = leaf(4, 4), leaf(4, 4), []
        for n in range(9):
            y = call(block, (x, w)[n // 2 % 2], n)
            y.sum().backward()
            seen.append([y.detach(), grads(x, w)])
        return seen

    equal_to_plain(program)


def test_f15_more_and_fewer_operators(equal_to_plain: Any) -> None:
    """Calls that leave the known program at the start, in the middle and at the end, and come back."""

    def block(t: torch.Tensor, steps: int, skip: bool) -> torch.Tensor:
        t = t if skip else t.exp().tanh()
        for n in range(steps):
            t = t.sin() if n % 2 else t.cos() * t
        return t

    def program(call: Any) -> Any:
        seen = []
        for steps, skip in [
            (4, False),
            (4, False),
            (2, False),
            (6, False),
            (4, True),
            (0, True),
            (4, False),
            (4, False),
        ]:
            x = leaf(5)
            y = call(block, x, steps, skip) * 1.0
            y.sum().backward()
            seen.append([y.detach(), grads(x)])
        return seen

    equal_to_plain(program)


def test_f15_saves_change_though_operators_do_not(equal_to_plain: Any) -> None:
    """requires_grad of an argument decides what is saved, not which operators run."""

    def program(call: Any) -> Any:
        seen = []
        for x_grad, w_grad in [(True, True), (True, False), (False, True), (True, True), (False, True)]:
            x, w = torch.randn(4), torch.randn(4)
            x.requires_grad_(x_grad)
            w.requires_grad_(w_grad)
            y = call(lambda a, b: ((a.sin() * b.exp()) * b).tanh(), x, w)
            y.sum().backward()
            seen.append([y.detach(), grads(x, w)])
        return seen

    equal_to_plain(program)


# F18: other threads draw from the default generator meanwhile.


def test_f18_other_threads_streams_do_not_repeat(contender: Any) -> None:
    """A thread (a data loader) draws while backward replays dropout: no number of its stream comes twice.

    It does not draw during the forward: two threads that draw from one generator at once decide by chance which gets
    which numbers, with or without checkpointing.
    """
    drawn: list[tuple[float, ...]] = []
    stop, backward = threading.Event(), threading.Event()

    def draw() -> None:
        while not stop.is_set():
            if backward.wait(0.01):
                drawn.append(tuple(torch.rand(4).tolist()))

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        x = leaf(64)
        for _ in range(60):
            y = x
            for _ in range(4):
                y = contender.checkpoint(lambda t: F.dropout(t.sin(), 0.3).exp().tanh(), y)
            backward.set()
            y.sum().backward()
            backward.clear()
            time.sleep(0.002)  # what the thread has begun is done before the next forward
    finally:
        stop.set()
        thread.join()
    assert len(drawn) > 10
    assert len(set(drawn)) == len(drawn), (
        f"{len(drawn) - len(set(drawn))} of {len(drawn)} draws of the other thread repeat"
    )


# F23: bits depend on the address.


@pytest.mark.parametrize("keep", [None, "matmuls", [torch.ops.aten.mul]], ids=["nothing", "matmuls", "base"])
def test_f23_kept_views_keep_their_offset(elbowroom_only: None, keep: Any) -> None:
    """mv and dot of misaligned views: a kept or replayed view sits at its own offset modulo 64 bytes."""

    def block(t: torch.Tensor, v: torch.Tensor, offset: int) -> torch.Tensor:
        flat = (t * 1.01).flatten()
        m = flat[offset : offset + 37 * 37].view(37, 37)
        u = flat[offset + 1 : offset + 38]
        return (m @ v).sin() * (m.t() @ u).dot(u * v).tanh() + (u @ m.t()).exp()

    def program(call: Any) -> Any:
        x, v, seen = leaf(38, 40), leaf(37), []
        for offset in range(0, 17):
            call(block, x, v, offset).sum().backward()
            seen.append(grads(x, v))
        return seen

    assert_equal_to_plain(Elbowroom(keep=keep), program)
