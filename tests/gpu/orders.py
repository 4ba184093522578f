"""The order of additions that a schedule promises, in the form in which debug builds record the real one."""

import torch

from cute_dash.schedule import WorkTile


def promised_order(schedule, shape):
    """n_blocks by lock value for each dQ tile of a query head, -1 beyond: (num_heads, num_m_blocks, num_n_blocks)."""
    order = torch.full((shape.num_query_heads, shape.num_m_blocks, shape.num_n_blocks), -1, dtype=torch.int32)
    for head_idx in range(shape.num_query_heads):
        for n_block in range(shape.num_n_blocks):
            tile = WorkTile(n_block, head_idx // shape.group_size, 0)
            for m_block in range(shape.get_m_block_min(n_block), shape.get_m_block_max(n_block)):
                order[head_idx, m_block, schedule.get_lock_value(m_block, tile, shape)] = n_block
    return order
