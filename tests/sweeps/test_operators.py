"""A fixed sample of torch's operator and module databases in the default run; all of both as slow tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sweeps.operators import Tally, module_names, operator_names, sweep_module, sweep_operator

# Views, in-place forms, reductions, several outputs, indices, random draws, linear algebra, losses, layers.
SAMPLE = """
    __getitem__ __rmatmul__ addmm addbmm amax atan2 baddbmm bernoulli bmm broadcast_tensors cat cdist chunk clamp
    clone complex conj copysign cross cummax cumprod cumsum diag_embed diagonal_copy dist einsum exp expand
    fft.fft fft.irfft2 flip gather gradient index_add index_copy index_fill index_put index_select inner kron lerp
    linalg.cholesky linalg.det linalg.eigh linalg.householder_product linalg.inv linalg.norm
    linalg.pinv linalg.qr linalg.solve linalg.svd logcumsumexp logsumexp lu lu_solve masked_fill masked_scatter
    masked_select matmul matrix_exp max_reduction_with_dim median meshgrid_list_of_tensors mm multinomial mv
    nan_to_num narrow native_dropout_backward native_layer_norm norm normal permute pinverse polar pow prod put
    reciprocal reshape roll rsqrt scatter_add scatter_reduce_amax select_scatter sigmoid slice_scatter sort
    split_with_sizes squeeze stack std_mean sum svd_lowrank take take_along_dim tensor_split topk trapz
    triangular_solve unbind unfold unfold_copy var_mean view view_as_complex view_as_real where
    nn.functional.adaptive_avg_pool2d nn.functional.alpha_dropout nn.functional.avg_pool2d
    nn.functional.batch_norm nn.functional.bilinear nn.functional.binary_cross_entropy nn.functional.celu
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.cosine_similarity
    nn.functional.cross_entropy nn.functional.ctc_loss nn.functional.dropout nn.functional.embedding
    nn.functional.embedding_bag nn.functional.fractional_max_pool2d nn.functional.gelu nn.functional.glu
    nn.functional.grid_sample nn.functional.group_norm nn.functional.hardswish nn.functional.huber_loss
    nn.functional.instance_norm nn.functional.interpolate_bilinear nn.functional.kl_div nn.functional.layer_norm
    nn.functional.linear nn.functional.max_pool2d nn.functional.multi_head_attention_forward
    nn.functional.nll_loss nn.functional.normalize nn.functional.pad_reflect nn.functional.pixel_shuffle
    nn.functional.prelu nn.functional.rms_norm nn.functional.rrelu nn.functional.scaled_dot_product_attention
    nn.functional.silu nn.functional.softmin nn.functional.unfold
""".split()  # noqa: SIM905 one name per word reads better
MODULES = """
    nn.AdaptiveAvgPool2d nn.BatchNorm1d nn.BatchNorm2d nn.Bilinear nn.Conv1d nn.Conv2d nn.ConvTranspose2d
    nn.CrossEntropyLoss nn.CTCLoss nn.Embedding nn.GELU nn.GRU nn.GRUCell nn.GroupNorm nn.InstanceNorm2d nn.LSTM
    nn.LSTMCell nn.LayerNorm nn.LazyConv1d nn.Linear nn.MaxPool2d nn.MultiheadAttention nn.PReLU nn.RMSNorm nn.RNN
    nn.Softmax nn.TransformerDecoderLayer nn.TransformerEncoder nn.TransformerEncoderLayer
""".split()  # noqa: SIM905 one name per word reads better
SHARDS = 16


def variants(names: list[str], wanted: list[str]) -> list[str]:
    """The database's names for the wanted ones (it writes dots as underscores); an unknown name is a KeyError."""
    known = {name.replace("_", "."): name for name in names}
    return [known[name.replace("_", ".")] for name in wanted]


def report(tally: Tally) -> None:
    assert not tally.failures, str(tally)
    assert tally.compared, f"nothing was compared: {tally}"


@pytest.mark.parametrize("name", variants(operator_names(), SAMPLE))
def test_operator(contender: Any, name: str) -> None:
    report(sweep_operator(contender, name, most_samples=2))


@pytest.mark.parametrize("name", variants(module_names(), MODULES))
def test_module(contender: Any, name: str) -> None:
    report(sweep_module(contender, name, most_samples=2))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_all_operators(contender: Any, shard: int) -> None:
    total = Tally()
    for name in operator_names()[shard::SHARDS]:
        total.add(sweep_operator(contender, name))
    print(total)
    report(total)


@pytest.mark.slow
def test_all_modules(contender: Any) -> None:
    total = Tally()
    for name in module_names():
        total.add(sweep_module(contender, name))
    print(total)
    report(total)
