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
    "columns": dict(head_dim=256),
    "swapped": dict(head_dim=192),
    "swapped_128": dict(head_dim=192, head_dim_v=128),
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


# what the GEMMs multiply: operands A and B, each with what its rows and what its columns in memory are; as the kernel
# names them, the first two of S, dP, dV and dK exchanged where operands are swapped
TILES = dict(sQ="query d", sK="key d", sV="key dv", sdO="query dv", sdS="query key", sP="query key")
OPERANDS = dict(dQ=("sdS", "sK"), S=("sK", "sQ"), dP=("sV", "sdO"), dV=("sP", "sdO"), dK=("sdS", "sQ"))
SUMMED = dict(dQ="key", S="d", dP="dv", dV="query", dK="query")
DISTANCE = 1 << 20  # elements from one made-up tile to the next


def record_gemms(kernel, base, tidx):
    """What the kernel partitions for each GEMM, of tiles that lie DISTANCE apart: {gemm: (tiled_mma, sA, sB)}."""
    config, layouts, gemms = kernel.config, wgmma.make_operand_layouts(DTYPE, kernel.config, staged=True), {}
    outer = dict(sQ=layouts.Q, sK=layouts.K, sV=layouts.V, sdO=layouts.dO, sdS=layouts.dS, sP=layouts.dS)
    smem = {name: cute.make_tensor(base + i * DISTANCE, outer[name].outer) for i, name in enumerate(TILES)}
    smem["sStats"] = cute.make_tensor(base, cute.make_layout((config.stats_size, config.num_stages)))
    smem["sdQaccum"] = cute.make_tensor(base, cute.make_layout((kernel.dQ_values, 2)))

    def record(tiled_mma, _, sA, sB):
        gemms[list(OPERANDS)[len(gemms)]] = tiled_mma, sA, sB
        return SimpleNamespace(_replace=lambda **_: None)

    with ExitStack() as patches:
        for owner, name, value in (
            (cute.arch, "thread_idx", lambda: (tidx + NUM_PRODUCER_WARPS * 32, 0, 0)),
            (cute.arch, "warp_idx", lambda: NUM_PRODUCER_WARPS + tidx // 32),
            (cute.arch, "make_warp_uniform", lambda x: x),
            (wgmma.Gemm, "partition", record),
        ):
            patches.enter_context(patch.object(owner, name, value))
        kernel.make_mma_context(SimpleNamespace(**smem), Float32(1.0))
    return gemms, smem


def list_offsets(layout, mode):
    """Of the elements of one mode of a layout, all others at 0."""
    coordinate = [0] * cute.rank(layout)
    offsets = []
    for i in range(cute.size(layout, mode=[mode])):
        coordinate[mode] = i
        offsets.append(cute.crd2idx(tuple(coordinate), layout))
    return np.array(offsets)


def list_operand(part):
    """Offsets of an operand's rows and of its places in the sum, from where the thread's part begins."""
    atom = cute.select(part.layout, mode=[0])
    rows, depth = (list_offsets(cute.get(part.layout, mode=[0]), mode) for mode in (0, 1))
    assert cute.rank(atom) == 1
    more_rows, more_depth = (list_offsets(part.layout, mode) for mode in (1, 2))
    return (more_rows[:, None] + rows).ravel(), (more_depth[:, None] + depth).ravel()


@cute.jit
def find_operands(found: cute.Tensor, static: cutlass.Constexpr):
    """Where the operands of a warpgroup begin, and in `lists` offsets from there, and offsets in the tiles."""
    kernel, warpgroup_idx, lists = static
    base = cute.recast_ptr(found.iterator, dtype=DTYPE).align(1024)
    gemms, smem = record_gemms(kernel, base, 128 * warpgroup_idx)
    describe_gemms(found, base, gemms, smem, warpgroup_idx, lists)


def describe_gemms(found, base, gemms, smem, warpgroup_idx, lists):
    for i, (name, (tiled_mma, sA, sB)) in enumerate(gemms.items()):
        mma = tiled_mma.get_slice(128 * warpgroup_idx)
        parts = [part(sX) for part, sX in ((mma.partition_A, sA), (mma.partition_B, sB)) if sX is not None]
        for j, part in enumerate(parts):
            found[2 * i + j] = (Int64(part.iterator.toint()) - Int64(base.toint())) // 2
        lists[name] = [list_operand(part) for part in parts]
    for name in TILES:
        lists[name] = [list_offsets(smem[name].layout, mode) for mode in (0, 1)]


@pytest.mark.parametrize("way", ["columns", "swapped", "swapped_128"])
def test_operands_are_the_tiles_that_a_product_wants(way):
    """Where all come from shared memory: rows and columns of each product once, summed over the same in A and in B.

    A wgmma begins where the pattern of the swizzle does or, where the sum runs along memory, in its first row.
    """
    kernel = make_kernel(way)
    covered = {name: [] for name in OPERANDS}
    for warpgroup_idx in range(2):
        lists, found = {}, np.zeros(2 * len(OPERANDS), "int64")
        static = kernel, warpgroup_idx, lists
        cute.compile(find_operands, from_dlpack(found), static, options=f"--gpu-arch {ARCH}")(from_dlpack(found))
        for i, (name, tiles) in enumerate(OPERANDS.items()):
            tiles = tiles if name == "dQ" else kernel.config.in_order(*tiles)
            sides = []
            for j, tile in enumerate(tiles):
                assert found[2 * i + j] // DISTANCE == list(TILES).index(tile)
                rows, columns = lists[tile]
                places = {offset: divmod(k, len(columns)) for k, offset in enumerate((rows[:, None] + columns).ravel())}
                operand_rows, depth = lists[name][j]
                start = found[2 * i + j] % DISTANCE
                found_places = np.array([[places[start + r + d] for d in depth] for r in operand_rows])
                starts = start + (operand_rows[::64, None] if j == 0 else operand_rows[:1, None]) + depth[::16]
                axes = TILES[tile].split()
                width = np.count_nonzero(columns == np.arange(len(columns)))  # of the swizzle
                assert (starts % (8 * width) < (width if axes[1] == SUMMED[name] else 1)).all()
                summed = found_places[:, :, axes.index(SUMMED[name])]
                kept = found_places[:, :, 1 - axes.index(SUMMED[name])]
                assert (summed == np.arange(len(depth))).all() and (kept == kept[:, :1]).all()
                sides.append(kept[:, 0])
            covered[name] += [(row, column) for row in sides[0] for column in sides[1]]
    config = kernel.config
    extents = dict(query=config.tile_m, key=config.tile_n, d=config.head_dim_padded, dv=config.head_dim_v_padded)
    for name, tiles in OPERANDS.items():
        num_places = np.prod([extents[axis] for tile in tiles for axis in TILES[tile].split() if axis != SUMMED[name]])
        assert len(covered[name]) == len(set(covered[name])) == num_places
