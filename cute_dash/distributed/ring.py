"""Ring attention: every rank keeps its queries, K and V go around, and sums are made in the order of the ring.

Host, with torch. On n ranks there are n steps; in step t rank r has K and V of rank (r - t) mod n, and computes what
its queries see of them, while the next K and V are on their way. The order of every sum follows from that and from
nothing else; in particular not from which message arrives when:

    sum         of                     starts with   then adds
    out, LSE    rank r's queries       r             r-1, r-2, ... r-n+1 (mod n): the rank that K and V are from
    dQ          rank r's queries       r             the same
    dK, dV      rank s's keys          s             s+1, s+2, ... s+n-1 (mod n): the rank that has the queries

The accumulators are fp32, that of dK and dV travels one step behind its K and V, and each is rounded to the input dtype
once, at the end. What is added are the results of single calls, which have the input dtype: the forward's out and the
gradients of `attention_backward` with the whole sequence's out and LSE. The mask leaves out parts of the sums (below),
and changes nothing about the order of the others.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from cute_dash import validation
from cute_dash.distributed.sequence import Layout, Place
from cute_dash.interface import attention_backward, flash_attn_func
from cute_dash.schedule import Schedule


class Block(NamedTuple):
    """What one rank's queries see of one rank's keys: slices of the two local sequences, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


_ALL = slice(None)


def get_block(rank: int, source: int, seqlen: int, causal: bool, layout: Layout) -> Block | None:
    """What the queries of `rank` see of the keys of `source`; None if nothing.

    Causal, zigzag: the chunks of a rank are in the order of the sequence, so its own are a causal problem. Of an
    earlier rank, all queries see the first chunk and none the second; all keys of a later rank are seen by the second
    chunk of queries and none by the first. So every step but the first is half a full problem, on every rank.

    Args:
        rank, source: ranks of the queries and of the keys.
        seqlen: tokens that each rank holds; only read for a causal zigzag.
        causal: causal mask over the whole sequence.
        layout: `cute_dash.distributed.sequence`.
    """
    if not causal or rank == source:
        return Block(_ALL, _ALL, causal)
    if layout == "contiguous":
        return Block(_ALL, _ALL, False) if source < rank else None
    if source < rank:
        return Block(_ALL, slice(0, seqlen // 2), False)
    return Block(slice(seqlen // 2, seqlen), _ALL, False)


@dataclass(frozen=True)
class RingOptions:
    """What the calls of one attention have in common."""

    place: Place
    layout: Layout
    softmax_scale: float | None
    causal: bool
    softcap: float
    schedule: "str | Schedule"

    def get_block(self, step: int, seqlen: int) -> Block | None:
        """What this rank's queries see in a step; `seqlen` as for `get_block`."""
        source = (self.place.rank - step) % self.place.world_size
        return get_block(self.place.rank, source, seqlen, self.causal, self.layout)

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of each call, besides tensors and mask."""
        return dict(softmax_scale=self.softmax_scale, softcap=self.softcap, schedule=self.schedule)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over all ranks' keys; differentiable.

    Args:
        q: (batch, seqlen_q / n, num_heads, head_dim), this rank's part.
        k, v: (batch, seqlen_k / n, num_heads_kv, head_dim), likewise; seqlen_k = seqlen_q if causal.
        options: the same on every rank.

    Returns:
        out in the shape and dtype of q, and LSE (batch, num_heads, seqlen_q / n), fp32, not differentiable.

    Raises:
        TypeError, ValueError: before anything is sent.
    """
    _check(q, k, v, options)
    out, lse = _RingAttention.apply(q, k, v, options)  # type: ignore[no-untyped-call]
    return out, lse


def _check(q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> None:
    """Refuses what some rank could not do in some step, so that no rank is left waiting for another."""
    if options.causal and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} tokens on each rank and q has {q.shape[1]}; allowed with method='ring' and "
            "causal=True: as many"
        )
    if options.layout == "zigzag" and options.causal and q.shape[1] % 2:
        raise ValueError(
            f"q has {q.shape[1]} tokens on each rank; allowed with layout='zigzag': an even number, two chunks"
        )
    if v.shape != k.shape:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; allowed with method='ring': that of k, {tuple(k.shape)}; "
            "method='all_to_all' takes another head dim of v"
        )
    first, middle, last = 0, 1, 2  # every kind of block occurs on the middle one of three ranks
    sources = (middle,) if options.place.world_size == 1 else (middle, first, last)
    for source in sources:
        if (block := get_block(middle, source, q.shape[1], options.causal, options.layout)) is not None:
            validation.resolve_schedule(options.schedule, q[:, block.queries], k[:, block.keys], block.causal)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(_Rows(dout, q, out, lse), k, v, ctx.options), None


def _forward(q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> tuple[Tensor, Tensor]:
    for step, kv in _go_around(torch.stack((k, v)), options.place):
        if (block := options.get_block(step, q.shape[1])) is None:
            continue
        block_k, block_v = kv[:, :, block.keys]
        part, part_lse = flash_attn_func(
            q[:, block.queries], block_k, block_v, causal=block.causal, return_lse=True, **options.call
        )
        if step == 0:
            out, lse = part.float(), part_lse
        else:
            _merge(out[:, block.queries], lse[:, :, block.queries], part, part_lse)
    return out.to(q.dtype), lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds attention over more keys, in place.

    Args:
        out: (batch, seqlen, num_heads, head_dim) fp32, with LSE (batch, num_heads, seqlen): attention over some keys.
        part, part_lse: over others, in any dtype and fp32.
    """
    merged = torch.logaddexp(lse, part_lse)
    no_key = merged == -math.inf  # neither here nor in the part: -inf - -inf
    old, new = (torch.exp(x - merged).masked_fill(no_key, 0.0) for x in (lse, part_lse))
    old, new = (share.transpose(1, 2).unsqueeze(-1) for share in (old, new))
    out.mul_(old).add_(part * new)
    lse.copy_(merged)


class _Rows(NamedTuple):
    """Of the queries, for the backward pass: (batch, seqlen, num_heads, head_dim), LSE (batch, num_heads, seqlen)."""

    dout: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor

    def select(self, queries: slice) -> "_Rows":
        return _Rows(self.dout[:, queries], self.q[:, queries], self.out[:, queries], self.lse[:, :, queries])


def _backward(rows: _Rows, k: Tensor, v: Tensor, options: RingOptions) -> tuple[Tensor, Tensor, Tensor]:
    place = options.place
    for step, kv in _go_around(torch.stack((k, v)), place):
        block = options.get_block(step, rows.q.shape[1])
        if step == 0:  # own block: every query and every key is in it, so that nothing needs a zero-fill
            assert block is not None
            dq, dkv = (x.float() for x in _block_backward(rows, kv, block, options))
            continue
        transfer = _Transfer(dkv, place, _DKV)  # the accumulators follow the keys that they belong to
        gradients = None if block is None else _block_backward(rows, kv, block, options)
        dkv = transfer.wait()
        if block is not None and gradients is not None:
            dq[:, block.queries] += gradients[0]
            dkv[:, :, block.keys] += gradients[1]
    if place.world_size > 1:
        dkv = _Transfer(dkv, place, _DKV).wait()  # those that are here belong to the next rank
    dk, dv = dkv.to(k.dtype)
    return dq.to(k.dtype), dk, dv


def _block_backward(rows: _Rows, kv: Tensor, block: Block, options: RingOptions) -> tuple[Tensor, Tensor]:
    """dQ of the block's queries; dK and dV of its keys, stacked."""
    dout, q, out, lse = rows.select(block.queries)
    k, v = kv[:, :, block.keys]
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, causal=block.causal, **options.call)
    return dq, torch.stack((dk, dv))


_KV, _DKV = 0, 1  # tags: both are on their way at once


def _go_around(kv: Tensor, place: Place) -> Iterator[tuple[int, Tensor]]:
    """Each step and its K and V (2, batch, seqlen, num_heads_kv, head_dim), while the next ones are coming."""
    for step in range(place.world_size):
        transfer = _Transfer(kv, place, _KV) if step + 1 < place.world_size else None
        yield step, kv
        if transfer is not None:
            kv = transfer.wait()


class _Transfer:
    """`x` on its way to the next rank, and another's from the previous one, of the same shape and dtype."""

    def __init__(self, x: Tensor, place: Place, tag: int) -> None:
        self._sent = x  # kept until it has left
        self._received = torch.empty_like(x)
        next_rank, previous_rank = (
            dist.get_global_rank(place.group, (place.rank + step) % place.world_size) for step in (1, -1)
        )
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, next_rank, place.group, tag),
                dist.P2POp(dist.irecv, self._received, previous_rank, place.group, tag),
            ]
        )

    def wait(self) -> Tensor:
        """What the previous rank sent; on a GPU, for use on the current stream."""
        for work in self._works:
            work.wait()
        return self._received
