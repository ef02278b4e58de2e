"""What breaks replay if its rules are not kept: findings about values (F1-F3, F5, F8, F12, F13, F15, F16, F18, F23).

Each test fails when the rule that answers its finding is broken. F16 has no test, because there is no sound rule:
bytes that somebody writes through a pointer taken *before* the region, into a source that plain autograd would not
save, cannot be seen from here (a ``.numpy()`` view of a batch buffer that the loader refills between forward and
backward is the usual example; torch's own checkpoint is wrong there too). The documentation says so.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.contenders import Elbowroom
from tests.conformance.equality import assert_equal_to_plain, grads, training


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# F1: a proof by value on one example is not a proof.


def write_through_data_ptr(out: torch.Tensor, values: torch.Tensor) -> None:
    data = values.detach().numpy().tobytes()
    ctypes.memmove(out.data_ptr(), data, len(data))


def write_through_numpy(out: torch.Tensor, values: torch.Tensor) -> None:
    out.detach().numpy()[...] = values.detach().numpy()


def write_through_asarray(out: torch.Tensor, values: torch.Tensor) -> None:
    np.copyto(np.asarray(out.detach()), values.detach().tolist())


def write_through_dlpack(out: torch.Tensor, values: torch.Tensor) -> None:
    np.from_dlpack(out.detach())
    torch.from_dlpack(out.detach().__dlpack__()).copy_(values.detach())


def write_through_storage(out: torch.Tensor, values: torch.Tensor) -> None:
    data = bytes(values.detach().numpy())
    ctypes.memmove(out.untyped_storage().data_ptr(), data, len(data))


RAW_WRITES = [
    write_through_data_ptr,
    write_through_numpy,
    write_through_asarray,
    write_through_dlpack,
    write_through_storage,
]
TARGETS = {
    "zeros": lambda h: torch.zeros_like(h),
    "clone": lambda h: h.detach().clone(),
    "result": lambda h: h.detach() + 0.0,
    "empty": lambda h: torch.empty_like(h).detach().fill_(0.0),
}


@pytest.mark.parametrize("write", RAW_WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("target", TARGETS)
def test_f01_raw_write_without_effect_at_first(equal_to_plain: Any, write: Any, target: str) -> None:
    """A raw kernel that changes no bit in the first call (zero-initialised weights), and does from the second on."""

    def block(t: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = t.sin()
        out = TARGETS[target](h)
        write(out, out.clone() + h.detach() * scale)
        return ((h * out).exp() * out.cos()).tanh()

    def program(call: Any) -> Any:
        x, seen = leaf(3, 4), []
        for scale in (0.0, 1.0, 0.5, 0.0, 2.0):
            y = call(block, x, torch.tensor(scale))
            y.sum().backward()
            seen.append([y.detach(), grads(x)])
        return seen

    equal_to_plain(program)


def test_f01_ctc_lengths_filled_from_cpp(equal_to_plain: Any) -> None:
    """ctc_loss with lengths as Python numbers: C++ fills an aten.empty by pointer, and no operator shows it."""

    def program(call: Any) -> Any:
        x, seen = leaf(12, 2, 5), []
        for length in (12, 9, 12, 7):
            targets = torch.randint(1, 5, (2, 3))
            block = lambda t, n=length, y=targets: F.ctc_loss(t.log_softmax(-1), y, (n, n - 1), (3, 2)).exp().sin()  # noqa: E731
            loss = call(block, x)
            loss.backward()
            seen.append([loss.detach(), grads(x)])
        return seen

    equal_to_plain(program)


def test_f01_write_nobody_can_see_is_caught_later(contender: Any) -> None:
    """A write through an address taken before the region, without effect in call 1, must not go on unnoticed.

    No structural rule can see it. The proof is repeated in calls 2, 4 and 8: by then it must be right, or raise.
    """
    buffer = torch.zeros(4)
    address = buffer.data_ptr()
    scale = 0.0

    def block(t: torch.Tensor) -> torch.Tensor:
        h = t.sin()
        scratch = torch.as_strided(buffer, (4,), (1,))
        scratch.copy_(h.detach())
        data = np.frombuffer((ctypes.c_float * 4).from_address(address), dtype=np.float32)
        data += np.float32(scale)
        return (h * scratch.exp()).tanh().cos()

    raised = False
    for call_number in range(1, 9):
        scale = 0.0 if call_number == 1 else 1.0
        x = torch.linspace(0.1, 1.0, 4).requires_grad_()
        try:
            contender.checkpoint(block, x).sum().backward()
        except Exception as error:
            if not is_proof_error(error):
                raise
            raised = True
            break
        found, x.grad = x.grad, None
        block(x).sum().backward()
        right = torch.equal(found, x.grad)
        if call_number in (1, 2, 4, 8):
            assert right, f"call {call_number}: a silently wrong gradient in a call that is proved"
    assert right or raised


def is_proof_error(error: BaseException) -> bool:
    """By name: the contenders "plain" and "torch" can be run without the library."""
    return "ProofError" in [c.__name__ for c in type(error).__mro__]


@pytest.mark.slow
def test_f01_cpp_extension(contender: Any, tmp_path: Any) -> None:
    """A C++ kernel that writes in place outside any Function: declared nowhere, caught by the repeated proof."""
    from torch.utils import cpp_extension

    source = """
        void add_(torch::Tensor t, double s) {
            float* p = t.data_ptr<float>();
            for (int64_t i = 0; i < t.numel(); ++i) p[i] += s;
        }
    """
    kernels = cpp_extension.load_inline("f01", source, functions=["add_"], build_directory=str(tmp_path))

    def block(t: torch.Tensor, scale: float) -> torch.Tensor:
        h = t.sin()
        out = h.detach() * 1.0
        kernels.add_(out, scale)
        return (h * out.exp()).tanh()

    for call_number in range(1, 9):
        scale = 0.0 if call_number == 1 else 1.0
        x = torch.linspace(0.1, 1.0, 4).requires_grad_()
        try:
            contender.checkpoint(block, x, scale).sum().backward()
        except Exception as error:
            if not is_proof_error(error):
                raise
            break
        found, x.grad = x.grad, None
        block(x, scale).sum().backward()
        assert torch.equal(found, x.grad) or call_number not in (1, 2, 4, 8)


# F2: version counters are blind inside the recorder.


def test_f02_batch_norm_writes_undeclared(equal_to_plain: Any) -> None:
    """native_batch_norm declares no write and moves no counter: statistics shared by two regions, read in between."""

    def program(call: Any) -> Any:
        mean, var, w = torch.zeros(4), torch.ones(4), leaf(4)

        def block(t: torch.Tensor) -> torch.Tensor:
            before = mean.exp()
            t = F.batch_norm(t, mean, var, w, training=True, momentum=0.3)
            return (t * mean.clone() + before).tanh() * var.sqrt()

        x, seen = leaf(8, 4), []
        for _ in range(4):
            call(block, call(block, x)).pow(2).sum().backward()
            seen.append([mean.clone(), var.clone(), grads(x, w)])
        return seen

    equal_to_plain(program)


LYING = torch.library.Library("elbowroom_tests", "DEF")
LYING.define("sneak(Tensor x, float by) -> Tensor")
LYING.impl("sneak", lambda x, by: (x.add_(by), x * 2)[1], "CPU")


def test_f02_undeclared_write_of_a_custom_operator(equal_to_plain: Any) -> None:
    """An operator whose schema hides that it writes to its argument: found by content."""

    def block(t: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        a = state.exp()
        doubled = torch.ops.elbowroom_tests.sneak(state, 0.5)
        return (t * a * doubled).sin() * state.cos()

    def program(call: Any) -> Any:
        x, state, seen = leaf(4), torch.zeros(4), []
        for _ in range(4):
            call(block, x, state).sum().backward()
            seen.append([state.clone(), grads(x)])
        return seen

    equal_to_plain(program)


def test_f02_inference_tensors(equal_to_plain: Any) -> None:
    """Inference tensors have no counter at all."""

    def program(call: Any) -> Any:
        with torch.inference_mode():
            table = torch.randn(4)
        x = leaf(4)
        for _ in range(3):
            call(lambda t: t.sin().exp().add(table.clone()).tanh(), x).sum().backward()
        return grads(x)

    equal_to_plain(program)


# F3: kept or cached values that somebody writes.


class Scratch(torch.autograd.Function):
    """Uses its saved input as scratch space in backward; ``raw`` writes past the version counter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, raw: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.raw = raw
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        result = x.exp() * g
        if ctx.raw:
            x.detach().numpy()[...] = 7.0
        else:
            x.zero_()
        return result, None


F3_KEEPS = [None, [torch.ops.aten.mul], [torch.ops.aten.add], "everything"]


@pytest.mark.parametrize("keep", F3_KEEPS, ids=["nothing", "base", "derived", "everything"])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("scratch_first", [False, True])
def test_f03_backward_writes_on_a_saved_tensor(elbowroom_only: None, keep: Any, raw: bool, scratch_first: bool) -> None:
    """Legal in plain autograd, since nobody else saved it; yet other saved values are replayed from it."""

    def block(t: torch.Tensor) -> torch.Tensor:
        h = t * 2.0
        if scratch_first:
            a = Scratch.apply(h, raw)
            b = (h + 1.0).sin()
        else:
            b = (h + 1.0).sin()
            a = Scratch.apply(h, raw)
        return a * 0.5 + b + (h + 2.0).cos()

    assert_equal_to_plain(Elbowroom(keep=keep), training(lambda: block, lambda: [leaf(5)]))


@pytest.mark.parametrize("keep", F3_KEEPS, ids=["nothing", "mul", "add", "everything"])
def test_f03_user_writes_on_a_kept_output(elbowroom_only: None, keep: Any) -> None:
    """The region returns a value that plain autograd did not save; the policy kept it; the user writes over it."""

    def program(call: Any) -> Any:
        x, seen = leaf(5), []
        for _ in range(3):
            a, b = call(lambda t: ((a := t + 1.0), (a * 2.0).sin().exp()), x)
            a.detach().zero_()
            b.sum().backward()
            seen.append(grads(x))
        return seen

    assert_equal_to_plain(Elbowroom(keep=keep), program)


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
