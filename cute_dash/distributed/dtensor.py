"""Sharding rules of the ops for DTensors: batch and heads stay sharded, everything else is replicated first.

Host, with torch. Sequences of a batch and heads share nothing, so that each rank runs the op on its own ones and
nothing is summed across ranks; with a batch-invariant schedule the gradients have the bits of one device.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

_Placements = list[Placement | None]
_Rule = Callable[..., list[tuple[_Placements, _Placements]]]


class _Dims(NamedTuple):
    """Which dimensions of a tensor are the batch and the heads."""

    batch: int
    heads: int


_TOKENS = _Dims(batch=0, heads=2)  # (batch, seqlen, heads, head_dim)
_STATS = _Dims(batch=0, heads=1)  # (batch, heads, seqlen)
_INPUTS = {**dict.fromkeys(("dout", "q", "k", "v", "out"), _TOKENS), **dict.fromkeys(("lse", "dlse"), _STATS)}


@cache
def register_sharding_rules() -> None:
    """Lets `flash_attn_func` and `attention_backward` take DTensors. Once in a process is enough; more do nothing.

    Shard(0), the batch, and Shard(2), the heads, are kept, on one mesh dimension or on several, if every rank gets as
    many sequences, query heads and KV heads as the others. Any other placement is redistributed first, to whichever of
    these or of Replicate() costs least. A learnable sink is refused: its gradient is a sum over ranks.
    """
    ops = torch.ops.cute_dash
    register_sharding(ops.attention_forward.default)(_make_rule(ops.attention_forward.default, (_TOKENS, _STATS)))
    register_sharding(ops.attention_backward.default)(_make_rule(ops.attention_backward.default, 3 * (_TOKENS,)))


def _make_rule(op: torch._ops.OpOverload, outputs: tuple[_Dims, ...]) -> _Rule:
    """The rule of one op, as register_sharding takes it: acceptable placements of its outputs and arguments."""
    names = [argument.name for argument in op._schema.arguments]
    tensors = {a.name for a in op._schema.arguments if isinstance(a.type, torch.TensorType)}
    assert tensors == tensors & _INPUTS.keys(), f"{op}: no sharding rule for {tensors - _INPUTS.keys()}"
    inputs = [_INPUTS.get(name) for name in names]
    q_idx, k_idx = names.index("q"), names.index("k")

    def rule(*args: "torch.distributed.tensor._dtensor_spec.DTensorSpec") -> list[tuple[_Placements, _Placements]]:
        q, k = args[q_idx], args[k_idx]
        if any(arg is not None and name == "learnable_sink" for name, arg in zip(names, args, strict=False)):
            raise ValueError("learnable_sink is given with DTensors; allowed: None")
        given = inputs[: len(args)]

        def place(get_placement: Callable[[_Dims], Placement]) -> tuple[_Placements, _Placements]:
            return (
                [get_placement(dims) for dims in outputs],
                [None if dims is None else get_placement(dims) for dims in given],
            )

        allowed = [place(lambda dims: Replicate())]
        if _divides(q.mesh, q.shape[_TOKENS.batch]):
            allowed.append(place(lambda dims: Shard(dims.batch)))
        if _divides(q.mesh, k.shape[_TOKENS.heads]):  # and so the query heads, which are a multiple of them
            allowed.append(place(lambda dims: Shard(dims.heads)))
        return allowed

    return rule


def _divides(mesh: DeviceMesh, extent: int) -> bool:
    """Whether a dimension is cut into equal parts, whichever of the mesh dimensions it is sharded over.

    A rule speaks of one mesh dimension and does not learn over which others the same tensor dimension is sharded. More
    parts than `extent` are never made.
    """
    sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
    subsets = itertools.chain.from_iterable(itertools.combinations(sizes, r) for r in range(1, mesh.ndim + 1))
    return all(extent % parts == 0 for parts in map(math.prod, subsets) if parts <= extent)
