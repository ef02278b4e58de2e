"""The proof: fingerprints, bit equality, who takes addresses, undeclared writes, and writes that show up late."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import dlpack

import elbowroom
from elbowroom.core.proof import AddressWatch, fingerprint, same_bits
from elbowroom.errors import ProofError
from tests.core.counting import assert_equal_to_plain, fresh, gradients, plain

# Fingerprints --------------------------------------------------------------------------------------------------------

# Sizes in bytes around all seams: words of 8, rows of 1024 words, folds of 1024 rows.
SIZES = st.sampled_from([1, 7, 8, 9, 63, 64, 8184, 8192, 8193, 16384, 24577, 100_003])


@settings(max_examples=150, deadline=None)
@given(SIZES, st.data())
def test_a_fingerprint_sees_any_single_bit(nbytes: int, data: Any) -> None:
    place, bit = data.draw(st.integers(0, nbytes - 1)), data.draw(st.integers(0, 7))
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    before = fingerprint(memory)
    assert fingerprint(memory.clone()) == before
    memory[place] ^= 1 << bit
    assert fingerprint(memory) != before


def test_a_fingerprint_sees_every_single_sign() -> None:
    x = torch.randn(2048)
    before = fingerprint(x)
    missed = []
    for i in range(x.numel()):
        x[i].neg_()
        if fingerprint(x) == before:
            missed.append(i)
        x[i].neg_()
    assert missed == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
def test_a_fingerprint_sees_a_change_of_all_signs(dtype: torch.dtype) -> None:
    x = torch.randn(5000).to(dtype)
    assert fingerprint(x) != fingerprint(-x)


def test_a_fingerprint_sees_two_opposite_signs_change_in_one_row() -> None:
    """Both are top bits of 64-bit words, and their row's sum stays: only their columns tell."""
    x = torch.ones(32 * 1024)
    x[3], x[5] = 1.0, -1.0
    before = fingerprint(x)
    x[3], x[5] = -1.0, 1.0
    assert fingerprint(x) != before


@pytest.mark.parametrize("numel", [5, 3000, 100_003])
def test_a_fingerprint_leaves_the_storage_as_it_is(numel: int) -> None:
    x = torch.randn(numel, dtype=torch.float64)
    fingerprint(x)
    assert x.untyped_storage().resizable()
    assert x._version == 0


def test_a_fingerprint_sees_above_eight_mebibytes() -> None:
    x = torch.zeros(3 * 1024 * 1024, dtype=torch.int64)  # 3072 rows: the row sums are folded
    before = fingerprint(x)
    for place in (0, 1024 * 1024 + 17, 2 * 1024 * 1024 + 5, 3 * 1024 * 1024 - 1):
        for value in (1, -(2**63), 2**62):
            x[place] = value
            assert fingerprint(x) != before, (place, value)
            x[place] = 0


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4000), st.data())
def test_a_fingerprint_sees_two_exchanged_words(n: int, data: Any) -> None:
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    x = torch.arange(n, dtype=torch.int64) * 7919
    before = fingerprint(x)
    x[[i, j]] = x[[j, i]]
    assert (fingerprint(x) == before) is (i == j)


def test_a_fingerprint_is_of_the_whole_storage() -> None:
    x = torch.zeros(10)
    before = fingerprint(x[:2])
    x[9] = 1
    assert fingerprint(x[:2]) != before


# Bits ----------------------------------------------------------------------------------------------------------------

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ([1.0, NAN], [1.0, NAN], True),
        ([1.0, NAN], [NAN, 1.0], False),
        ([0.0], [-0.0], False),
        ([NAN, 0.0], [NAN, -0.0], False),
        ([NAN, 2.0], [NAN, 3.0], False),
        ([float("inf")], [float("inf")], True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_same_bits(one: list[float], other: list[float], equal: bool, dtype: torch.dtype) -> None:
    assert same_bits(torch.tensor(one).to(dtype), torch.tensor(other).to(dtype)) is equal


def test_nans_of_different_bits_are_the_same() -> None:
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(quiet, other)


def test_same_bits_compares_shape_dtype_and_strides() -> None:
    x = torch.ones(2, 2)
    assert not same_bits(x, x.double())
    assert not same_bits(x, x.view(4))
    assert not same_bits(x, x.t())
    assert same_bits(torch.tensor([True]), torch.tensor([True]))
    z = torch.randn(3, dtype=torch.complex64)
    assert same_bits(z.conj(), z.conj().resolve_conj())


# Addresses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "take",
    [
        lambda t: t.data_ptr(),
        lambda t: t.numpy(),
        lambda t: np.asarray(t),
        lambda t: t.__dlpack__(),
        lambda t: torch.from_dlpack(t),
        lambda t: t.untyped_storage(),
        lambda t: getattr(t, "data_ptr")(),  # noqa: B009, as launchers written in C do it
    ],
)
def test_whoever_takes_an_address_is_seen(take: Any) -> None:
    seen: list[torch.Tensor] = []
    x = torch.zeros(3)
    with AddressWatch(lambda tensor, why: seen.append(tensor)):
        take(x)
    assert any(t is x for t in seen)


def test_reading_numbers_is_no_taking_of_addresses() -> None:
    seen: list[str] = []
    x = torch.zeros(3)
    with AddressWatch(lambda tensor, why: seen.append(why)):
        x.sum().item(), x.tolist(), x.shape, x + 1, repr(x)
    assert seen == []


def write_raw(x: torch.Tensor, amount: float) -> None:
    """What an unwatched kernel does: it adds to memory, and no counter moves."""
    with torch._C.DisableTorchFunction():
        address = x.data_ptr()
    memory = (ctypes.c_float * x.numel()).from_address(address)
    for i in range(x.numel()):
        memory[i] += amount


def test_a_raw_write_through_a_watched_address_needs_no_proof() -> None:
    def body(x: torch.Tensor, amount: float) -> torch.Tensor:
        h = x * 2
        h.detach().numpy()[:] += amount
        return (h + 1).sin()

    fn = fresh(body)
    x = torch.randn(3, requires_grad=True)
    for amount in (0.0, 1.0, 2.0):
        assert_equal_to_plain(fn, x, amount, calls=1, verify="first")
    (row,) = elbowroom.proof(fn).kept
    assert (row.nbytes, row.operator, "its address was taken by" in row.why) == (12, "aten.mul.Tensor", True)


def test_a_raw_write_nobody_saw_is_found_by_its_content() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        write_raw(h, 1.0)
        return (h + 1).sin()

    fn = fresh(body)
    assert_equal_to_plain(fn, torch.randn(3, requires_grad=True))
    (row,) = elbowroom.proof(fn).kept
    assert row.why == "it was written without PyTorch seeing it"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("starts_at", [2, 3, 4])
def test_a_write_without_effect_at_first_is_caught(starts_at: int, last: bool) -> None:
    """Zero-initialised adapters: the write changes nothing at call 1; calls 2, 4, 8 prove again."""

    def body(x: torch.Tensor, amount: float) -> torch.Tensor:
        h = (x * 2).sin()
        if not last:
            write_raw(h, amount)
            return (h + 1).sin()
        h = h.exp()  # exp() saves its result
        write_raw(h, amount)
        return h

    fn = fresh(body)
    x = torch.randn(3, requires_grad=True)
    outcomes: list[Any] = []
    for call in range(1, 9):
        amount = 1.0 if call >= starts_at else 0.0
        expected = gradients(plain, fn, x, amount)
        try:
            found = gradients(elbowroom.checkpoint, fn, x, amount)
            outcomes.append(all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)))  # type: ignore[arg-type]
        except ProofError as error:
            outcomes.append(error.calls_in_doubt)
    if starts_at == 3:  # call 3 went by unproved and was wrong: call 4 says so; from then on all is right
        assert outcomes == [True, True, False, 1, True, True, True, True]
    elif starts_at == 2:
        assert outcomes == [True] * 8
    else:  # call 4 finds it before any call went wrong, but call 3 was not proved: it may have been
        assert outcomes == [True, True, True, 1, True, True, True, True]


def test_a_raw_write_to_a_source_is_caught_later_too() -> None:
    buffer = torch.zeros(3)
    memory = np.asarray(torch.from_dlpack(dlpack.to_dlpack(buffer)))

    def body(x: torch.Tensor, amount: float) -> torch.Tensor:
        y = (x + buffer).sin()
        memory[:] += amount
        return y * 2

    fn = fresh(body)
    x = torch.randn(3, requires_grad=True)
    for call in range(1, 9):
        amount = float(call > 1)
        buffer.zero_()
        expected = gradients(plain, fn, x, amount)
        buffer.zero_()
        found = gradients(elbowroom.checkpoint, fn, x, amount)
        assert torch.equal(expected[1], found[1]), f"call {call}"  # type: ignore[arg-type]


def test_the_error_says_what_where_and_how_long() -> None:
    def body(x: torch.Tensor, amount: float) -> torch.Tensor:
        h = x.exp()
        write_raw(h, amount)
        return h

    fn = fresh(body)
    x = torch.randn(3, requires_grad=True)
    for _ in range(7):
        gradients(elbowroom.checkpoint, fn, x, 0.0)
    with pytest.raises(ProofError) as caught:
        elbowroom.checkpoint(fn, x, 1.0)
    error = caught.value
    assert (error.operator, error.calls_in_doubt) == ("aten.exp.default", 3)  # calls 5, 6 and 7
    assert __file__ in error.line
    assert "Up to 3 calls since the last proof may have had wrong gradients" in str(error)


# Operators -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("elbowroom_tests::liar", mutates_args=())
def liar(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(1)  # says nothing of it in its schema
    return x * state


liar.register_autograd(lambda ctx, grad: (grad, None))


def test_an_undeclared_write_is_found_and_its_result_kept() -> None:
    fn = fresh(lambda x, state: (liar(x * 2, state) * 3).sin())
    x = torch.randn(3, requires_grad=True)
    one, other = torch.zeros(3), torch.zeros(3)
    for call in range(4):
        expected, found = gradients(plain, fn, x, one), gradients(elbowroom.checkpoint, fn, x, other)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), f"call {call + 1}"  # type: ignore[arg-type]
    rows = [row for row in elbowroom.proof(fn).kept if "does not declare" in row.why]
    assert rows
    assert {row.operator for row in rows} == {"elbowroom_tests.liar.default"}


_calls = {"n": 0}


@torch.library.custom_op("elbowroom_tests::fickle", mutates_args=())
def fickle(x: torch.Tensor) -> torch.Tensor:
    _calls["n"] += 1
    return x + _calls["n"]


fickle.register_autograd(lambda ctx, grad: grad)


def test_an_operator_that_does_not_repeat_is_kept() -> None:
    fn = fresh(lambda x: (fickle(x * 2) * 3).sin())
    x = torch.randn(3, requires_grad=True)
    out = elbowroom.checkpoint(fn, x)
    n = _calls["n"]
    (found,) = torch.autograd.grad(out.sum(), x)
    assert _calls["n"] == n, "not run again in backward"
    (row,) = elbowroom.proof(fn).kept
    assert (row.operator, row.why) == ("elbowroom_tests.fickle.default", "a second run gave other bits")
    # The input of sin() by the first run's counter; the proof ran it once more.
    torch.testing.assert_close(found, ((x.detach() * 2 + n - 1) * 3).cos() * 3 * 2)  # by hand, so rounded otherwise


@torch.library.custom_op("elbowroom_tests::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


noise.register_autograd(lambda ctx, grad: grad)


def test_the_proof_leaves_the_random_stream_alone() -> None:
    # It draws without saying so: the second run must not move the generator.
    assert_equal_to_plain(fresh(lambda x: (noise(x) * 2).sin()), torch.randn(3, requires_grad=True))


def test_no_memory_for_the_proof_means_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from elbowroom.core import proof

    def short_of_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(proof, "drawing_from", short_of_memory)
    fn = fresh(lambda x: (x * 2).sin())
    assert_equal_to_plain(fn, torch.randn(3, requires_grad=True), calls=1)
    assert {row.why for row in elbowroom.proof(fn).kept} == {"no memory to prove it"}
    assert elbowroom.proof(fn).proved == 0


def test_scratch_outputs_are_exempt() -> None:
    lstm = torch.nn.LSTM(4, 4)
    fn = fresh(lambda x: lstm(x)[0].sin())
    assert_equal_to_plain(fn, torch.randn(3, 2, 4, requires_grad=True))
    assert [row for row in elbowroom.proof(fn).kept if "rnn" in row.operator] == []
