"""What debug builds write down for the host: the order of additions and the first wait that was given up (device)."""

import cutlass.cute as cute
from cutlass import Int32

from cute_dash.kernels.bundles import Gmem, QTile
from cute_dash.schedule import WorkTile


@cute.jit
def record_addition(gmem: Gmem, q_tile: QTile, n_block: Int32):
    """Debug: appends n_block to the list of contributors of this dQ tile, before the turn is passed on."""
    entries = gmem.mRecord[None, q_tile.m_block, q_tile.stream]
    place = cute.arch.atomic_add(entries.iterator, Int32(1), sem="relaxed", scope="gpu")
    entries[place + 1] = n_block


@cute.jit
def report_stuck(gmem: Gmem, tile: WorkTile, q_tile: QTile, lock_value: Int32, seen: Int32):
    """Debug: the first wait that was given up, as (1, batch, query head, m_block, n_block, lock value, seen)."""
    first = cute.arch.atomic_add(gmem.mStuck.iterator, Int32(1), sem="relaxed", scope="gpu")
    if first == 0:
        gmem.mStuck[1] = tile.batch_idx
        gmem.mStuck[2] = q_tile.head_idx
        gmem.mStuck[3] = q_tile.m_block
        gmem.mStuck[4] = tile.n_block
        gmem.mStuck[5] = lock_value
        gmem.mStuck[6] = seen
