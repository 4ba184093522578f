"""What travels into the kernel and its roles, bundled: one argument each (trace time)."""

from collections.abc import Callable
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from cute_dash.kernels.pipeline import Ring


class QTile(NamedTuple):
    """The Q tile of one step: what it loads, and the dQ tile that it adds to. A stream is one (batch, query head)."""

    m_block: Int32
    head_idx: Int32
    stream: Int32


class Gmem(NamedTuple):
    """Global tensors. Inputs, dK, dV: TMA tensors (seqlen, head_dim or head_dim_v, num_heads or num_heads_kv, batch).

    num_streams = batch * num_heads; with grouped heads the streams of a KV head's query heads are neighbours. With
    sequences of different lengths num_streams = num_heads and num_m_blocks counts all sequences' tiles; what a role
    gets then are views of one sequence, in which batch is 1 and m_block counts from the sequence's first tile.
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdO: cute.Tensor
    mdK: cute.Tensor
    mdV: cute.Tensor
    mdQ: cute.Tensor | None  # where the main kernel finishes dQ
    mStats: cute.Tensor  # (stats_size, num_m_blocks, num_streams), see `stats`
    mdQaccum: cute.Tensor  # (tile_m * head_dim_padded / num_warpgroups, num_warpgroups, num_m_blocks, num_streams)
    mSemaphore: cute.Tensor  # (num_m_blocks, num_streams)
    mCounter: cute.Tensor  # (1,)
    mRecord: cute.Tensor | None  # debug: (num_n_blocks + 1, num_m_blocks, num_streams), [0] counts
    mStuck: cute.Tensor | None  # debug: (8,), see `report_stuck`


def map_rows(
    gmem: Gmem, map_q: Callable[[cute.Tensor], cute.Tensor], map_k: Callable[[cute.Tensor], cute.Tensor]
) -> Gmem:
    """`gmem` with the tensors of query tokens and those of key tokens mapped."""
    mdQ = None if gmem.mdQ is None else map_q(gmem.mdQ)
    return gmem._replace(
        mQ=map_q(gmem.mQ),
        mdO=map_q(gmem.mdO),
        mdQ=mdQ,
        mK=map_k(gmem.mK),
        mV=map_k(gmem.mV),
        mdK=map_k(gmem.mdK),
        mdV=map_k(gmem.mdV),
    )


class TmaAtoms(NamedTuple):
    Q: cute.CopyAtom
    K: cute.CopyAtom
    V: cute.CopyAtom
    dO: cute.CopyAtom
    dK: cute.CopyAtom
    dV: cute.CopyAtom
    dQ: cute.CopyAtom | None


class Smem(NamedTuple):
    sQ: cute.Tensor  # (tile_m, head_dim_padded, num_stages)
    sK: cute.Tensor  # (tile_n, head_dim_padded)
    sV: cute.Tensor  # (tile_n, head_dim_v_padded)
    sdK: cute.Tensor  # (tile_n, head_dim_padded), what dK leaves through: over sK, or over sdS
    sdV: cute.Tensor  # (tile_n, head_dim_v_padded), likewise
    sdO: cute.Tensor  # (tile_m, head_dim_v_padded, num_stages)
    sdS: cute.Tensor  # (tile_m, tile_n, num_stages)
    sP: cute.Tensor | None  # (tile_m, tile_n, num_stages), where the warpgroups share dV out by columns
    sStats: cute.Tensor  # (stats_size, num_stages), see `stats`
    sOnes: cute.Tensor | None  # (ones_size,), see `stats`
    sdQaccum: cute.Tensor  # (tile_m * head_dim_padded / num_warpgroups, num_warpgroups), fp32 in register order
    sdQ: cute.Tensor  # (piece rows, piece columns, num_warpgroups), over sdQaccum: finished dQ
    sWork: cute.Tensor  # (n_block, head_idx, batch_idx; NUM_WORK_STAGES) claimed work tiles
    sDuty: cute.Tensor  # (1,) what the MMA warpgroups do with the dQ partial of the step


class Rings(NamedTuple):
    Q: Ring
    dO: Ring
    KV: Ring
    work: Ring
    sums: cute.Pointer  # an mbarrier for each store warp
