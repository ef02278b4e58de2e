"""Findings about several processes: F6 (sharded parameters) and F7 (collectives), with two gloo processes.

Each test body runs in a process of its own, which forks a second rank. Collectives are counted where they are issued,
by the process group's own sequence number: a replayed collective would show there, whatever mode it ran under.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.conformance.equality import assert_same_bits, grads, plain
from tests.conformance.resident import MIB, growth_bytes, prepare


def two_ranks(work: Callable[[Any, int], None], ck: Any) -> None:
    """Run ``work(ck, rank)`` in two processes of one gloo group: this one and a fork of it."""
    folder = tempfile.mkdtemp()
    failure = os.path.join(folder, "failure")
    pid = os.fork()
    rank = 1 if pid == 0 else 0
    try:
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        work(ck, rank)
        dist.barrier()
    except BaseException as error:
        if rank == 0:
            raise
        with open(failure, "w") as f:
            f.write(f"rank 1: {error}\n{traceback.format_exc(limit=-3)}")
    finally:
        if rank == 1:
            os._exit(0)
    os.waitpid(pid, 0)
    if os.path.exists(failure):
        with open(failure) as f:
            raise AssertionError(f.read())


def collectives() -> int:
    """How many collectives this process has issued so far."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    return int(backend._get_sequence_number_for_group())


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def sharded(width: int, how: str, call: Any, wrap: Any) -> nn.Module:
    """Three blocks under fully_shard; the region is a block's forward (hooks outside) or its call (hooks inside)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*[Block(width) for _ in range(3)])
    for block in model:
        if how == "hooks outside":
            wrap(block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if how == "hooks inside":
        for block in model:
            inner = block.__call__
            model.get_submodule("0")  # the root keeps its own forward; blocks are called through regions
            block.through = lambda t, inner=inner: call(inner, t)
        model.forward = lambda x: _through(model, x)  # type: ignore[method-assign]
    return model


def _through(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for block in model.children():
        x = block.through(x)
    return x


def _train_sharded(how: str, call: Any, wrap: Any, rank: int) -> tuple[Any, int]:
    model = sharded(16, how, call, wrap)
    seen, before = [], collectives()
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        y = model(x)
        y.pow(2).sum().backward()
        seen.append([y.detach(), x.grad, *[p.grad.to_local().clone() for p in model.parameters()]])
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
    return seen, collectives() - before


def _fsdp(ck: Any, rank: int) -> None:
    for how in ("hooks outside", "hooks inside"):
        expected, issued = _train_sharded(how, plain, lambda m: m, rank)
        found, issued_here = _train_sharded(how, ck.checkpoint, ck.wrap, rank)
        assert_same_bits(expected, found, how)
        # torch's own checkpoint gathers again for hooks inside a region; replay has no reason to
        assert issued_here <= issued, f"{how}: {issued_here} collectives, {issued} without checkpointing"


def _fsdp_both(ck: Any) -> None:
    two_ranks(_fsdp, ck)


def test_f06_fully_shard(isolated: Any) -> None:
    """FSDP2 with hooks outside and inside the region: the same gradients, no more collectives."""
    isolated(_fsdp_both, timeout_s=120)


def _fsdp_held(ck: Any, rank: int) -> None:
    """Gathered parameters are not kept by a tape: they are sources by identity, which fully_shard frees and refills."""
    prepare(ck)
    for how in ("hooks outside", "hooks inside"):
        model = sharded(1024, how, ck.checkpoint, ck.wrap)  # 3 blocks of 8 MiB of parameters
        x = torch.randn(8, 1024, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        held, y = growth_bytes(lambda model=model, x=x: model(x))
        y.sum().backward()
        # fully_shard itself keeps the last block gathered; plain autograd holds 8 MiB here
        assert held <= 14 * MIB, f"{how}: {held / MIB:.1f} MiB held after the forward, of 24 MiB of gathered parameters"


def _fsdp_held_both(ck: Any) -> None:
    two_ranks(_fsdp_held, ck)


def test_f06_gathered_parameters_are_not_held(isolated: Any) -> None:
    isolated(_fsdp_held_both, timeout_s=120)


def _gather_by_data(ck: Any, rank: int) -> None:
    """ZeRO-3 style: hooks gather ``p.data`` before use, at another offset of a flat buffer each time."""

    def train(call: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)])
        gathers = [0]
        for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
            shard = layer.weight.detach().flatten().chunk(2)[rank].clone()

            def bring(m: nn.Module, *_: Any, shard: torch.Tensor = shard) -> None:
                gathers[0] += 1
                parts = [torch.empty_like(shard) for _ in range(2)]
                dist.all_gather(parts, shard)
                flat = torch.cat([torch.zeros(gathers[0] % 5), *parts])
                m.weight.data = flat[gathers[0] % 5 :].view(8, 8)

            def drop(m: nn.Module, *_: Any) -> None:
                m.weight.data = torch.empty(0)

            layer.register_forward_pre_hook(bring)
            layer.register_forward_hook(drop)
            layer.register_full_backward_pre_hook(bring)
            layer.register_full_backward_hook(drop)
        seen, before = [], collectives()
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            y = x
            for block in model:
                y = call(block, y)
            y.pow(2).sum().backward()
            seen.append([y.detach(), x.grad])
        return seen, collectives() - before

    assert_same_bits(train(plain), train(ck.checkpoint))


def _gather_by_data_both(ck: Any) -> None:
    two_ranks(_gather_by_data, ck)


def test_f06_parameters_gathered_by_hooks(isolated: Any) -> None:
    isolated(_gather_by_data_both)


class Reduced(torch.autograd.Function):
    """The sum over ranks of a tensor-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def _collectives(ck: Any, rank: int) -> None:
    """Synchronous, asynchronous and functional collectives in a region: issued once, results as they arrived."""
    import torch.distributed._functional_collectives as functional
    import torch.distributed.nn.functional as differentiable

    def block(t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        h = (t @ w).sin()
        h = Reduced.apply(h).exp()
        statistics = h.detach().mean(0)
        work = dist.all_reduce(statistics, async_op=True)
        parts = [torch.empty_like(h) for _ in range(2)]
        dist.all_gather(parts, h.detach().contiguous())
        work.wait()
        h = (h * statistics.cos()).tanh() + torch.stack(parts).sum(0).sigmoid() * h
        scale = functional.all_reduce(h.detach().abs().max(), "max", dist.group.WORLD)
        out = torch.empty(2, *h.shape[1:])
        dist.all_to_all_single(out, h.detach()[:2].contiguous())
        return differentiable.all_reduce(h / scale).sin() * out.sum()

    def train(call: Any) -> Any:
        torch.manual_seed(0)
        w, seen, before = torch.randn(6, 6, requires_grad=True), [], collectives()
        for step in range(4):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
            y = call(block, call(block, x, w), w)
            y.pow(2).sum().backward()
            seen.append([y.detach(), grads(x, w)])
        return seen, collectives() - before

    assert_same_bits(train(plain), train(ck.checkpoint))


def _collectives_both(ck: Any) -> None:
    two_ranks(_collectives, ck)


def test_f07_collectives_in_a_region(isolated: Any) -> None:
    isolated(_collectives_both)


def _tensor_parallel(ck: Any, rank: int) -> None:
    """DTensor and tensor parallel: inner operators recorded, saved tensors flattened, collectives issued once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def train(call: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])
        for block in model:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        seen, before = [], collectives()
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
            y = x
            for block in model:
                y = call(block, y)
            y.pow(2).sum().backward()
            seen.append([y.detach(), x.grad, *[p.grad.to_local().clone() for p in model.parameters()]])
            model.zero_grad()
        return seen, collectives() - before

    assert_same_bits(train(plain), train(ck.checkpoint))


def _tensor_parallel_both(ck: Any) -> None:
    two_ranks(_tensor_parallel, ck)


def test_f07_tensor_parallel(isolated: Any) -> None:
    isolated(_tensor_parallel_both, timeout_s=120)


def _ddp(ck: Any, rank: int) -> None:
    """Data parallel over two ranks, gradients and buffers reduced: bitwise as without checkpointing."""

    def train(call: Any) -> Any:
        torch.manual_seed(0)

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(
                    nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(2)
                )

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in [*self.blocks, self.blocks[0]]:
                    x = call(block, x).tanh()
                return x

        net = Net()
        model = nn.parallel.DistributedDataParallel(net)
        for step in range(3):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).pow(2).sum().backward()
        return grads(net), list(net.buffers())

    assert_same_bits(train(plain), train(ck.checkpoint))


def _ddp_both(ck: Any) -> None:
    two_ranks(_ddp, ck)


def test_f07_data_parallel(isolated: Any) -> None:
    isolated(_ddp_both)
