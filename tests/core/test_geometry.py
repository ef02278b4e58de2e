"""Views are geometry over a storage: taking one apart and building it again gives the same view."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.core.geometry import geometry_of, has_strided_storage, over, view, whole_storage
from elbowroom.errors import ChangedTensorError
from tests.conformance.equality import equal_bits

VIEWS = {
    "t": lambda t: t.t() if t.dim() == 2 else t,
    "rows": lambda t: t[1:] if t.shape[0] > 1 else t,
    "step": lambda t: t[::2],
    "column": lambda t: t.select(-1, t.shape[-1] - 1) if t.dim() > 1 and t.shape[-1] else t,
    "expand": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "diagonal": lambda t: t.diagonal() if t.dim() == 2 else t,
    "ints": lambda t: t.view(torch.int32) if t.dtype == torch.float32 and not t.is_neg() else t,
    "conj": lambda t: t.conj(),
    "neg": lambda t: t.conj().imag if t.is_complex() else t,
    "real": lambda t: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t,
    "none": lambda t: t[:0],
}


def assert_same_view(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert equal_bits(found, wanted)
    assert (found.stride(), found.storage_offset(), found.is_conj(), found.is_neg()) == (
        wanted.stride(), wanted.storage_offset(), wanted.is_conj(), wanted.is_neg(),
    )  # fmt: skip
    assert found.untyped_storage()._cdata == wanted.untyped_storage()._cdata


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.complex64, torch.int64, torch.bfloat16]),
    first=st.lists(st.sampled_from(sorted(VIEWS)), max_size=1),
    second=st.lists(st.sampled_from(sorted(VIEWS)), max_size=3),
)
def test_any_view_is_built_again_over_any_other(dtype: torch.dtype, first: list[str], second: list[str]) -> None:
    whole = torch.arange(12).to(dtype).view(3, 4)
    base, wanted = whole, whole
    for name in first:
        base = VIEWS[name](base)
    for name in second:
        wanted = VIEWS[name](wanted)
    if base.is_neg() or wanted.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        return
    assert_same_view(view(base, geometry_of(base), geometry_of(wanted)), wanted)
    assert_same_view(over(whole.untyped_storage(), geometry_of(wanted), whole.device), wanted)


def test_geometry_of_says_equal_by_identity() -> None:
    x = torch.zeros(3, 4)
    known = geometry_of(x)
    assert geometry_of(torch.ones(3, 4), known) is known
    for other in (x.t(), x[1:], x.double(), x.view(4, 3), torch.zeros(3, 4, dtype=torch.complex64).conj()):
        assert geometry_of(other, known) is not known
        assert not known.fits(other)


def test_extent_is_the_last_byte_that_a_view_reaches() -> None:
    x = torch.zeros(3, 4)  # 48 bytes
    assert geometry_of(x).extent_bytes == 48
    assert geometry_of(x[1]).extent_bytes == 32
    assert geometry_of(x[:, 1]).extent_bytes == (1 + 2 * 4 + 1) * 4
    assert geometry_of(x[:0]).extent_bytes == 0
    assert geometry_of(x[0, 0].expand(5, 5)).extent_bytes == 4


def test_a_base_that_was_moved_takes_its_views_along() -> None:
    # A sharded parameter is gathered again at another place of another buffer.
    flat = torch.arange(20.0)
    first, again = flat[0:6].view(2, 3), flat[10:16].view(2, 3)
    wanted = geometry_of(first.t())
    assert torch.equal(view(again, geometry_of(first), wanted), again.t())


def test_a_freed_storage_is_an_error_with_both_numbers() -> None:
    x = torch.zeros(8)
    recorded = geometry_of(x)
    x.untyped_storage().resize_(8)
    with pytest.raises(ChangedTensorError, match=r"the view needs 32 bytes, 8 are there"):
        view(x, recorded, recorded)


def test_whole_storage_is_every_byte() -> None:
    x = torch.arange(6, dtype=torch.int16)[2:4]
    assert whole_storage(x.untyped_storage(), x).tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: torch.zeros(2), True),
        (lambda: torch.zeros(2, 3).t()[1:], True),
        (lambda: torch.zeros(2, device="meta"), True),
        (lambda: torch.eye(2).to_sparse(), False),
        (lambda: torch.eye(2).to_sparse_csr(), False),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8), False),
        (lambda: torch._efficientzerotensor(2), False),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), False),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch says of sparse CSR and nested tensors that they are beta
def test_what_has_strided_storage(made: Any, expected: bool) -> None:
    assert has_strided_storage(made()) is expected


def test_geometry_reads_as_dtype_and_shape() -> None:
    assert str(geometry_of(torch.zeros(2, 3, dtype=torch.bfloat16))) == "bfloat16[2, 3]"
