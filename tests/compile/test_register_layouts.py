"""Which row and column a register of the main kernel holds: its own code, traced and run on the CPU for each thread.

What the mask, the row statistics and the stores to shared memory take for granted is compared with what the tiled MMAs
say of their accumulators, for each way to share a step out. Nothing is multiplied, and stmatrix is carried out here.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import from_dlpack

from cute_dash import registry
from cute_dash.compile import ARCH
from cute_dash.config import get_config
from cute_dash.kernels import mask, wgmma
from cute_dash.kernels.flash_bwd_sm90 import FlashAttentionBackwardSm90
from cute_dash.kernels.roles import NUM_PRODUCER_WARPS
from cute_dash.problem import Window

DTYPE = cutlass.BFloat16
NUM_THREADS = 256  # of the MMA warpgroups
LENGTHS = (200, 333)
WAYS = {
    "keys": dict(head_dim=64),
    "columns": dict(head_dim=192),
    "columns_128": dict(head_dim=192, head_dim_v=128),
    "keys96": dict(head_dim=192, tile_n=96),
    "keys96_128": dict(head_dim=192, head_dim_v=128, tile_n=96),
}
every_way = pytest.mark.parametrize("way", WAYS)


@cache
def make_kernel(way, mask_name="full"):
    fields = dict(WAYS[way])
    config = replace(get_config(fields.pop("head_dim"), mask_name == "causal", mask_name == "local"), **fields)
    return FlashAttentionBackwardSm90(config, DTYPE, registry.load("shortest_first"))


def compile_for_threads(function, found, *static):
    """A function of two numbers: what `function` writes into an array like `found`, for each thread."""
    arguments = from_dlpack(found), Int32(0), Int32(0), Int32(0)
    compiled = cute.compile(function, *arguments, static, options=f"--gpu-arch {ARCH}")

    def call(m_block=0, n_block=0):
        results = []
        for tidx in range(NUM_THREADS):
            compiled(from_dlpack(found), Int32(tidx), Int32(m_block), Int32(n_block))
            results.append(found.copy())
        return np.stack(results)

    return call


def as_queries_and_keys(kernel, rows, columns):
    """Of score tiles."""
    return (rows, columns) if kernel.config.swap_operands else (columns, rows)


@cute.jit
def find_scores(found: cute.Tensor, tidx: Int32, m_block: Int32, n_block: Int32, static: cutlass.Constexpr):
    """Row and column of each score in its tile, and 1 if the mask hides it."""
    kernel, shape = static
    mma_S = wgmma.make_tiled_mma_SdP(DTYPE, kernel.config)
    places = mma_S.get_slice(tidx).partition_C(cute.make_identity_tensor(kernel.shape_S))
    acc_S = wgmma.make_accumulator(mma_S, kernel.shape_S)
    acc_S.fill(0.0)
    place = kernel.get_score_place(SimpleNamespace(tidx=tidx, warpgroup_idx=tidx // 128))
    mask.apply_mask(acc_S, shape, m_block, n_block, *place, transposed=not kernel.config.swap_operands)
    for i in cutlass.range_constexpr(cute.size(acc_S)):
        row, column = places[i]
        found[i, 0], found[i, 1] = Int32(row), Int32(column)
        found[i, 2] = Int32(acc_S[i] < 0.0)


@pytest.mark.parametrize("mask_name", ["full", "causal", "local"])
@every_way
def test_the_mask_hides_what_it_must(way, mask_name):
    kernel = make_kernel(way, mask_name)
    config, num_hidden = kernel.config, 0
    window = Window(left=90, right=20) if mask_name == "local" else None
    shape = config.make_shape(1, 1, *LENGTHS, window)
    find = compile_for_threads(
        find_scores, np.zeros((config.tile_m * config.tile_n // NUM_THREADS, 3), "int32"), kernel, shape
    )
    for n_block in range(shape.num_n_blocks):
        for m_block in range(shape.get_m_block_min(n_block), shape.get_m_block_max(n_block)):
            rows, columns, is_hidden = np.moveaxis(find(m_block, n_block), 2, 0)
            hidden = np.full((config.tile_m, config.tile_n), -1)
            hidden[as_queries_and_keys(kernel, rows, columns)] = is_hidden
            i = m_block * config.tile_m + np.arange(config.tile_m)[:, None] + shape.diagonal
            j = n_block * config.tile_n + np.arange(config.tile_n)[None]
            wanted = (j >= shape.seqlen_k) | (i < 0)
            if mask_name == "causal":
                wanted |= j > i
            if mask_name == "local":
                wanted |= (j > i + window.right) | (j < i - window.left)
            are_queries = slice(0, shape.seqlen_q - m_block * config.tile_m)  # of others the statistics make P 0
            np.testing.assert_array_equal(hidden[are_queries], wanted[are_queries])
            num_hidden += wanted.sum()
    assert num_hidden > 0


def load_statistics(kernel, tidx, sStats, stage):
    """LSE and dPsum as the kernel loads them, with the numbers of lane and warp that `tidx` has."""
    with ExitStack() as patches:
        for name, value in (
            ("lane_idx", lambda: tidx % 32),
            ("warp_idx", lambda: NUM_PRODUCER_WARPS + tidx // 32),
            ("make_warp_uniform", lambda x: x),
        ):
            patches.enter_context(patch.object(cute.arch, name, value))
        parts = kernel.stats.partition(SimpleNamespace(sStats=sStats), tidx // 128)
        return [kernel.stats.load_values(parts[0], stage, first) for first in (0, kernel.config.tile_m)]


@cute.jit
def find_statistics(found: cute.Tensor, tidx: Int32, stage: Int32, _: Int32, static: cutlass.Constexpr):
    """Row and column of each score, and which LSE and dPsum go with it. `found` holds the statistics to begin with."""
    (kernel,) = static
    mma_S = wgmma.make_tiled_mma_SdP(DTYPE, kernel.config)
    places = mma_S.get_slice(tidx).partition_C(cute.make_identity_tensor(kernel.shape_S))
    num_stats = kernel.config.stats_size * kernel.config.num_stages
    layout = cute.make_layout((kernel.config.stats_size, kernel.config.num_stages))
    lse, dPsum = load_statistics(kernel, tidx, cute.make_tensor(found.iterator, layout), stage)
    for i in cutlass.range_constexpr(cute.size(places)):
        row, column = places[i]
        values = Float32(row), Float32(column), lse[i], dPsum[i]
        for j in cutlass.range_constexpr(4):
            found[num_stats + 4 * i + j] = values[j]


@every_way
def test_each_score_gets_the_statistics_of_its_query(way):
    kernel = make_kernel(way)
    config = kernel.config
    num_stats, num_scores = config.stats_size * config.num_stages, config.tile_m * config.tile_n // NUM_THREADS
    found = np.zeros(num_stats + 4 * num_scores, "float32")
    found[:num_stats] = np.arange(num_stats)
    find = compile_for_threads(find_statistics, found, kernel)
    for stage in range(config.num_stages):
        rows, columns, lse, dPsum = np.moveaxis(find(stage)[:, num_stats:].reshape(NUM_THREADS, num_scores, 4), 2, 0)
        queries, _ = as_queries_and_keys(kernel, rows, columns)
        np.testing.assert_array_equal(lse, stage * config.stats_size + queries)
        np.testing.assert_array_equal(dPsum, stage * config.stats_size + config.tile_m + queries)


def record_store(store):
    """Source and destination of the copy that `store` ends in. Nothing is rounded, copied or fenced."""
    copies = []
    with ExitStack() as patches:
        patches.enter_context(patch.object(wgmma, "_round_pair", lambda *_: Int32(0)))
        patches.enter_context(patch.object(cute, "copy", lambda _, source, target: copies.append((source, target))))
        patches.enter_context(patch.object(cute.arch, "fence_view_async_shared", lambda: None))
        store()
    ((source, target),) = copies
    return source, target


def store_product(kernel, name, base, tidx):
    """Tiled MMA and shape of a product, and what copies its accumulator to the row-major tile at `base`."""
    config, tiles = kernel.config, wgmma.get_tiles(kernel.config)
    if name == "dS":
        tiled_mma, shape = wgmma.make_tiled_mma_SdP(DTYPE, config), kernel.shape_S
        layout = cute.make_layout((config.tile_m, config.tile_n, 1), stride=(config.tile_n, 1, 0))
        tiled_copy, tRS = kernel.partition_scores(tiled_mma, cute.make_tensor(base, layout), tidx)
        acc, tRS = wgmma.make_accumulator(tiled_mma, shape), tRS[None, None, None, 0]
        return tiled_mma, shape, lambda: wgmma.store_C(tiled_copy, wgmma.to_operand_A(acc, DTYPE), tRS)
    rows, columns = tiles.K if name == "dK" else tiles.V
    tiled_mma, shape = wgmma.make_tiled_mma_dKV(DTYPE, config, columns), config.in_order(rows, columns)
    sX = cute.make_tensor(base, cute.make_layout((rows, columns), stride=(columns, 1)))
    acc = wgmma.make_accumulator(tiled_mma, shape)
    return tiled_mma, shape, lambda: kernel.write_gradient(SimpleNamespace(tiled_mma=tiled_mma), acc, sX, tidx)


@cute.jit
def find_stores(found: cute.Tensor, tidx: Int32, _: Int32, __: Int32, static: cutlass.Constexpr):
    """For each register: its row and column in the product, and where the thread's addresses of stmatrix point.

    `registers` gets the number of the register for each value of each stmatrix.
    """
    kernel, name, registers = static
    base = cute.recast_ptr(found.iterator, dtype=DTYPE)
    tiled_mma, shape, store = store_product(kernel, name, base.align(16), tidx)
    source, target = record_store(store)
    places = tiled_mma.get_slice(tidx).partition_C(cute.make_identity_tensor(shape))
    start = (Int64(target.iterator.toint()) - Int64(base.toint())) // 2
    for i in cutlass.range_constexpr(cute.size(places)):
        row, column = places[i]
        found[i, 0], found[i, 1] = Int32(row), Int32(column)
        found[i, 2] = Int32(start) + cute.crd2idx(i, target.layout)
        registers.append(cute.crd2idx(i, source.layout))


@pytest.mark.parametrize("name", ["dS", "dK", "dV"])
@every_way
def test_products_are_stored_where_they_belong(way, name):
    """Each element of dS (and so P), dK and dV once, by stmatrix of four 8 x 8 matrices, transposed where they are."""
    kernel = make_kernel(way)
    config, registers = kernel.config, []
    columns = dict(dS=config.tile_n, dK=config.head_dim_padded, dV=config.head_dim_v_padded)[name]
    rows = config.tile_m if name == "dS" else config.tile_n
    found = np.zeros((rows * columns // NUM_THREADS, 3), "int32")
    found = compile_for_threads(find_stores, found, kernel, name, registers)()
    transposed = config.swap_operands == (name != "dS")
    product_rows, product_columns, offsets = np.moveaxis(found, 2, 0)
    if transposed:
        product_rows, product_columns = product_columns, product_rows
    own_places = product_rows * columns + product_columns  # of the registers, in the tile
    stored = np.full(rows * columns, -1)
    for tidx in range(NUM_THREADS):
        warp, lane = tidx // 32 * 32, tidx % 32
        for i, register in enumerate(registers):
            store, matrix, half = i // 8 * 8, i % 8 // 2, i % 2
            row, column = lane // 4, lane % 4 * 2 + half
            if transposed:
                row, column = column, row
            address = offsets[warp + 8 * matrix + row, store]
            assert address % 8 == 0  # 16 bytes
            assert stored[address + column] == -1
            stored[address + column] = own_places[tidx, register]
    np.testing.assert_array_equal(stored, np.arange(rows * columns))
