"""What breaks replay if writes go unseen: findings F1 (raw writes), F2 (blind counters) and F3 (kept values written).

Each test fails when the rule that answers its finding is broken.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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
