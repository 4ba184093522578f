"""Attention of sequences that the ranks of a DeviceMesh share: `context_parallel_attention`. Host, with torch."""

from typing import Literal, get_args

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cute_dash import validation
from cute_dash.distributed.all_to_all import check_heads, gather_sequence, scatter_sequence
from cute_dash.distributed.ring import RingOptions, ring_attention
from cute_dash.distributed.sequence import Layout, Place, check_layout, get_place
from cute_dash.interface import flash_attn_func
from cute_dash.schedule import Schedule

Method = Literal["ring", "all_to_all"]


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh,
    *,
    method: Method = "ring",
    layout: Layout = "zigzag",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softcap: float = 0.0,
    schedule: "str | Schedule" = "auto",
) -> Tensor:
    """Attention over sequences that the ranks of `mesh` share; every gradient has the same bits on every run.

    A collective call: every rank makes it, with tensors of the same shapes and with the same options.
    docs/distributed.md has the order of every sum.

    Args:
        q: (batch, seqlen_q / n, num_heads, head_dim), this rank's part (`shard_sequence`) of a sequence over n ranks;
            otherwise as for `flash_attn_func`.
        k, v: (batch, seqlen_k / n, num_heads_kv, head_dim), likewise; with "ring" v has the head_dim of q and k.
        mesh: the n ranks, one dimension; for example
            init_device_mesh("cuda", (dp, cp), mesh_dim_names=("dp", "cp"))["cp"].
        method: "ring": K and V go around, any number of heads; causal needs seqlen_q = seqlen_k, and no window.
            "all_to_all": heads are traded for sequence, num_heads and num_heads_kv must be multiples of n.
        layout: which part a rank holds: "zigzag" (chunks r and 2 n - 1 - r of 2 n, which shares causal work evenly) or
            "contiguous" (chunk r of n).
        softmax_scale, window_size, softcap, schedule: as for `flash_attn_func`.
        causal: bottom-right aligned causal mask over the whole sequences.

    Returns:
        this rank's part of out: (batch, seqlen_q / n, num_heads, head_dim of v) in the dtype of q.

    Raises:
        TypeError, ValueError: on every rank alike, naming the argument, its value and what is allowed; before anything
            is sent, but for a schedule that cannot order what "all_to_all" has gathered.
    """
    place = get_place(mesh)
    _check(q, k, v, mesh, method, layout)
    validation.check_flag("causal", causal)
    validation.check_scale(softmax_scale)
    validation.check_window_size(window_size)
    validation.check_softcap(softcap)
    if method == "ring":
        _check_no_window(window_size)
        options = RingOptions(place, layout, softmax_scale, causal, softcap, schedule)
        return ring_attention(q, k, v, options)[0]
    _check_all_to_all(q, k, v, place, layout)
    gathered = gather_sequence(q, k, v, place, layout)
    out = flash_attn_func(*gathered, softmax_scale, causal, window_size, softcap, schedule=schedule)
    assert isinstance(out, Tensor)  # LSE was not asked for
    return scatter_sequence(out, place, layout)


def _check(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, method: str, layout: str) -> None:
    if method not in get_args(Method):
        raise ValueError(f"{method=}; allowed: {', '.join(map(repr, get_args(Method)))}")
    check_layout(layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
        if isinstance(x, DTensor):
            raise TypeError(f"{name} is a DTensor; allowed: this rank's part, {name}.to_local()")
    validation.check_qkv(q, k, v)
    validation.check_device(q.device)
    if q.device.type != mesh.device_type:
        raise ValueError(f"q is on {q.device}; allowed: the mesh's kind of device ({mesh.device_type})")


def _check_no_window(window_size: tuple[int | None, int | None] | None) -> None:
    if window_size is not None and any(side not in (None, -1) for side in window_size):
        raise ValueError(
            f"{window_size=}; allowed with method='ring': -1 or None on both sides; method='all_to_all' takes any "
            "window"
        )


def _check_all_to_all(q: Tensor, k: Tensor, v: Tensor, place: Place, layout: Layout) -> None:
    check_heads(q, k, place.world_size)
    for name, x in (("q", q), ("k", k)):
        if layout == "zigzag" and x.shape[1] % 2:
            raise ValueError(f"{name} has {x.shape[1]} tokens on each rank; allowed with {layout=}: an even number")
