"""Which part of a sequence each rank of a mesh holds: layouts, and functions that shard and unshard tensors.

Host, with torch. A sequence is cut into chunks of equal length; a layout says which of them a rank holds, and in which
order. Under a causal mask the last tokens attend to everything and the first to nothing, so that `zigzag` gives each
rank one chunk of either kind:

    layout      chunks  of rank r        4 ranks
    contiguous  n       r                0 | 1 | 2 | 3
    zigzag      2 n     r, 2 n - 1 - r   0 7 | 1 6 | 2 5 | 3 4
"""

import numbers
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cute_dash.naming import name_type

Layout = Literal["zigzag", "contiguous"]
_LAYOUTS = get_args(Layout)


class Place(NamedTuple):
    """This process's place among those that share a sequence."""

    group: dist.ProcessGroup
    rank: int  # in the group
    world_size: int


def get_place(mesh: DeviceMesh) -> Place:
    """The place in a mesh of one dimension.

    Raises:
        TypeError, ValueError: `mesh` is no DeviceMesh, has several dimensions, or does not hold this process.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; allowed: a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim != 1:
        names = f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else ""
        raise ValueError(f"mesh has {mesh.ndim} dimensions{names}; allowed: 1, such as mesh['cp'] of a larger mesh")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh {mesh} does not hold this process, rank {dist.get_rank()}")
    return Place(mesh.get_group(), mesh.get_local_rank(), mesh.size())


def check_layout(layout: str) -> None:
    if layout not in _LAYOUTS:
        raise ValueError(f"{layout=}; allowed: {', '.join(map(repr, _LAYOUTS))}")


def get_chunks(rank: int, world_size: int, layout: Layout) -> tuple[int, ...]:
    """The chunks that a rank holds, in its order."""
    return (rank,) if layout == "contiguous" else (rank, 2 * world_size - 1 - rank)


def get_chunk_order(world_size: int, layout: Layout) -> list[int]:
    """The chunks of the whole sequence in the order of the ranks."""
    return [chunk for rank in range(world_size) for chunk in get_chunks(rank, world_size, layout)]


def order_by_rank(x: Tensor, dim: int, world_size: int, layout: Layout) -> Tensor:
    """A sequence in its own order, brought into the order in which the ranks hold it."""
    if layout == "contiguous":
        return x
    order = get_chunk_order(world_size, layout)
    chunks = x.chunk(len(order), dim)
    return torch.cat([chunks[chunk] for chunk in order], dim)


def order_by_position(x: Tensor, dim: int, world_size: int, layout: Layout) -> Tensor:
    """The inverse of `order_by_rank`."""
    if layout == "contiguous":
        return x
    order = get_chunk_order(world_size, layout)
    chunks = x.chunk(len(order), dim)
    return torch.cat([chunks[order.index(place)] for place in range(len(order))], dim)


def sequence_positions(seqlen: int, mesh: DeviceMesh, *, layout: Layout = "zigzag") -> Tensor:
    """Positions in the whole sequence of the tokens that this rank holds, as rotary embeddings need them.

    Args:
        seqlen: tokens of the whole sequence, a multiple of the chunks that `layout` makes.
        mesh: the ranks that share the sequence, one dimension.
        layout: see the module.

    Returns:
        (seqlen / mesh.size(),) int64, on the mesh's kind of device.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """
    place = get_place(mesh)
    check_layout(layout)
    if isinstance(seqlen, bool) or not isinstance(seqlen, numbers.Integral):
        raise TypeError(f"{seqlen=} is a {name_type(seqlen)}; allowed: an int")
    _check_num_tokens(f"{seqlen=}", int(seqlen), place, layout)
    return _shard(torch.arange(seqlen, device=mesh.device_type), 0, place, layout)


def shard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1, *, layout: Layout = "zigzag") -> Tensor:
    """This rank's part of a tensor that every rank has whole. No communication; differentiable.

    Args:
        x: any shape; tokens, positions and labels of a batch have the sequence in dimension 1.
        mesh: the ranks that share the sequence, one dimension.
        dim: dimension of the sequence, its extent a multiple of the chunks that `layout` makes.
        layout: see the module.

    Returns:
        `x` with `dim` divided by mesh.size(), contiguous.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """
    place = get_place(mesh)
    check_layout(layout)
    _check_dim(x, dim)
    _check_num_tokens(f"x has {x.shape[dim]} tokens in dimension {dim}", x.shape[dim], place, layout)
    return _shard(x, dim, place, layout)


def _check_num_tokens(what: str, num_tokens: int, place: Place, layout: Layout) -> None:
    """Of a whole sequence; `what`: what its error begins with."""
    num_chunks = len(get_chunk_order(place.world_size, layout))
    if num_tokens < 1 or num_tokens % num_chunks:
        raise ValueError(
            f"{what}; allowed: a multiple above 0 of {num_chunks}, the chunks that {layout=} makes for "
            f"{place.world_size} ranks"
        )


def _check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {name_type(x)}; allowed: a torch.Tensor")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{dim=} is a {name_type(dim)}; allowed: an int")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{dim=}; allowed: a dimension of x, which has shape {tuple(x.shape)}")


def _shard(x: Tensor, dim: int, place: Place, layout: Layout) -> Tensor:
    """This rank's chunks."""
    chunks = x.chunk(len(get_chunk_order(place.world_size, layout)), dim)
    return torch.cat([chunks[chunk] for chunk in get_chunks(place.rank, place.world_size, layout)], dim)


def unshard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1, *, layout: Layout = "zigzag") -> Tensor:
    """The whole tensor, from the parts of all ranks, on all ranks: the inverse of `shard_sequence`. Not differentiable.

    Args:
        x: this rank's part, the same shape and dtype on every rank; detached.
        mesh, dim, layout: as for `shard_sequence`.

    Returns:
        `x` with `dim` multiplied by mesh.size(), contiguous.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is allowed.
    """
    place = get_place(mesh)
    check_layout(layout)
    _check_dim(x, dim)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError("x requires grad, but unsharding has no derivative; allowed: x.detach()")
    if layout == "zigzag" and x.shape[dim] % 2:
        raise ValueError(f"x has {x.shape[dim]} tokens in dimension {dim}; allowed with {layout=}: an even number")
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(place.world_size)]
    dist.all_gather(parts, x, group=place.group)
    return order_by_position(torch.cat(parts, dim), dim, place.world_size, layout)
