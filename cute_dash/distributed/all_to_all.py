"""All-to-all context parallelism (Ulysses): each rank trades its part of the sequence for a part of the heads.

Host, with torch. Nothing is summed across ranks, so no order has to be chosen: each head is computed whole by one rank,
by the same call as on one device. With a batch-invariant schedule its gradients have the bits of that device.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_dash.distributed.sequence import Layout, Place, order_by_position, order_by_rank


def check_heads(q: Tensor, k: Tensor, world_size: int) -> None:
    """Raises ValueError unless every rank gets as many query heads and as many KV heads as the others."""
    for name, what, x in (("q", "heads", q), ("k", "KV heads", k)):
        if x.shape[2] % world_size:
            raise ValueError(
                f"{name} has {x.shape[2]} {what}; allowed with method='all_to_all': a multiple of the {world_size} "
                "ranks of the mesh; method='ring' takes any number"
            )


def gather_sequence(q: Tensor, k: Tensor, v: Tensor, place: Place, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Whole sequences of this rank's heads; one message between each two ranks if q, k, v have one length and head dim.

    Args:
        q: (batch, seqlen / n, num_heads, head_dim); head group r = heads r * num_heads / n ... goes to rank r.
        k, v: (batch, seqlen / n, num_heads_kv, head_dim).

    Returns:
        q, k, v (batch, seqlen, num_heads / n, head_dim) in the order of the sequence; views of one tensor.
    """
    if q.shape[1] != k.shape[1] or q.shape[-1] != v.shape[-1]:
        q, k, v = (_HeadsForSequence.apply(x, place, layout) for x in (q, k, v))  # type: ignore[no-untyped-call]
        return q, k, v
    groups = [_split(x, 2, place.world_size) for x in (q, k, v)]
    packed = torch.cat(groups, dim=3).flatten(2, 3)  # group by group: its heads of q, of k, of v
    gathered = _HeadsForSequence.apply(packed, place, layout)  # type: ignore[no-untyped-call]
    q, k, v = gathered.split([group.shape[3] for group in groups], dim=2)
    return q, k, v


def scatter_sequence(x: Tensor, place: Place, layout: Layout) -> Tensor:
    """(batch, seqlen, num_heads / n, head_dim) back to (batch, seqlen / n, num_heads, head_dim)."""
    out: Tensor = _SequenceForHeads.apply(x, place, layout)  # type: ignore[no-untyped-call]
    return out


class _HeadsForSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place, layout: Layout) -> Tensor:
        ctx.place, ctx.layout = place, layout
        return _to_heads(x, place, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _SequenceForHeads.apply(grad, ctx.place, ctx.layout), None, None  # type: ignore[no-untyped-call]


class _SequenceForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Place, layout: Layout) -> Tensor:
        ctx.place, ctx.layout = place, layout
        return _to_sequence(x, place, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _HeadsForSequence.apply(grad, ctx.place, ctx.layout), None, None  # type: ignore[no-untyped-call]


def _to_heads(x: Tensor, place: Place, layout: Layout) -> Tensor:
    by_rank = _split(x, 2, place.world_size).movedim(2, 0)  # (n, batch, seqlen / n, heads / n, head_dim)
    received = _exchange(by_rank, place)
    return order_by_position(received.movedim(0, 1).flatten(1, 2), 1, place.world_size, layout)


def _to_sequence(x: Tensor, place: Place, layout: Layout) -> Tensor:
    by_rank = _split(order_by_rank(x, 1, place.world_size, layout), 1, place.world_size).movedim(1, 0)
    return _exchange(by_rank, place).movedim(0, 2).flatten(2, 3)


def _split(x: Tensor, dim: int, parts: int) -> Tensor:
    """`dim` as two dimensions: `parts`, and what each has."""
    split: Tensor = x.unflatten(dim, (parts, -1))  # type: ignore[no-untyped-call]
    return split


def _exchange(by_rank: Tensor, place: Place) -> Tensor:
    """Sends by_rank[r] to rank r; [r] of the result is what came from rank r."""
    by_rank = by_rank.contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank, group=place.group)
    return received
