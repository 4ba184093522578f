"""Row statistics: how LSE and dPsum of the queries enter the scores (device).

In S^T and dP^T a query is a column, and the eight lanes that share a column need the same statistics. Two ways, chosen
by `BwdConfig.stats_by_gemm`:

`VectorStats`: fp32 vectors in shared memory, of which each thread loads its columns' values. The loads take as much of
the shared-memory bandwidth as staging the dQ partial does, which at head dim 128 is what bounds a step. In S and dP
(`BwdConfig.swap_operands`) a query is a row: a thread has two, and loads little.

`GemmStats`: the statistics are a row of eight bf16 values per query, of whose sums each is exact to fp32,

    [ a0 a1 a2  b0 b1 b2  0 0 ]    2 (a0 + a1 + a2) = -LSE / softmax_scale    2 (b0 + b1 + b2) = -dPsum

and one more k-step of the GEMMs, with ones in three columns of its operand A, adds them to every key's row:

    S^T  = K Q^T  + 1 a^T + 1 a^T    P^T = exp2(scale * log2e * S^T)
    dP^T = V dO^T + 1 b^T + 1 b^T    dS^T = P^T * dP^T

A k-step has 16 columns and memory holds eight, read twice: hence the factor 2. Likewise all rows of A are one row.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from cute_dash.config import STATS_COLUMNS, BwdConfig
from cute_dash.kernels.bundles import Smem
from cute_dash.kernels.wgmma import Gemm, stage_of

LOG2_E = 1.4426950408889634
SPLIT = 3  # bf16 values that together have the 24 bits of an fp32
# makes P exactly 0; finite, because the zeros of the other statistic's columns multiply it
MASKED = -3.0e38


class VectorStats:
    """(tile_m,) LSE * log2(e) and (tile_m,) dPsum in fp32, one after the other."""

    def __init__(self, config: BwdConfig):
        self.config = config

    @cute.jit
    def write_row(self, gStats: cute.Tensor, row: Int32, lse: Float32, dPsum: Float32, softmax_scale: Float32):
        """Writes the statistics of one query into (stats_size,) of its Q tile; lse = -inf: it sees no key, P is 0."""
        gStats[row] = Float32.inf if lse == -Float32.inf else lse * LOG2_E
        gStats[self.config.tile_m + row] = dPsum

    def partition(self, smem: Smem, warpgroup_idx: Int32) -> tuple[cute.Tensor, ...]:
        """What the other methods take as `parts`."""
        if not self.config.split_columns:
            return (smem.sStats,)
        first_query = warpgroup_idx * self.config.score_columns
        if self.config.swap_operands:
            first_query = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * 16  # rows of a warp
        return (cute.domain_offset((first_query, 0), smem.sStats),)

    def products_S(self, parts, stage: Int32) -> tuple:
        """Further products (tiled_mma, tCrA, tCrB) of the GEMM of S^T."""
        return ()

    def products_dP(self, parts, stage: Int32) -> tuple:
        """Further products of the GEMM of dP^T."""
        return ()

    @cute.jit
    def softmax(self, acc_S: cute.Tensor, parts, stage: Int32, softmax_scale_log2: Float32):
        """acc_S = P^T, or P, in place."""
        tLSE = self.load_values(parts[0], stage, 0)
        S = by_columns(acc_S)
        for v in cutlass.range_constexpr(cute.size(S, mode=[2])):
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    S[c, r, v] = cute.math.exp2(S[c, r, v] * softmax_scale_log2 - tLSE[c, r, v], fastmath=True)

    @cute.jit
    def softmax_backward(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, parts, stage: Int32):
        """acc_dP = dS^T, or dS, in place."""
        tdPsum = self.load_values(parts[0], stage, self.config.tile_m)
        P, dP = by_columns(acc_P), by_columns(acc_dP)
        for v in cutlass.range_constexpr(cute.size(P, mode=[2])):
            for c in cutlass.range_constexpr(2):
                for r in cutlass.range_constexpr(2):
                    dP[c, r, v] = P[c, r, v] * (dP[c, r, v] - tdPsum[c, r, v])

    def load_values(self, sStats: cute.Tensor, stage: Int32, first: int) -> cute.Tensor:
        """Loads this thread's values from the vector at `first`, for each score, in the shape of `by_columns`."""
        vector, num_groups = sStats[None, stage].iterator, self.config.score_columns // 8
        if self.config.swap_operands:
            rows = vector + (first + cute.arch.lane_idx() // 4)
            source, stride = cute.make_tensor(rows, cute.make_layout(2, stride=8)), (0, 1, 0)
        else:
            columns = (vector + (first + 2 * (cute.arch.lane_idx() % 4))).align(8)
            source = cute.make_tensor(columns, cute.make_layout((2, num_groups), stride=(1, 8)))
            stride = (1, 0, 2)
        values = cute.make_rmem_tensor(source.shape, Float32)
        cute.autovec_copy(source, values)
        return cute.make_tensor(values.iterator, cute.make_layout((2, 2, num_groups), stride=stride))


class GemmParts(NamedTuple):
    gemm_LSE: Gemm
    gemm_dPsum: Gemm


class GemmStats:
    """(tile_m, STATS_COLUMNS) rows of bf16, as operand B of a k-step."""

    def __init__(self, config: BwdConfig):
        self.config = config

    @cute.jit
    def write_row(self, gStats: cute.Tensor, row: Int32, lse: Float32, dPsum: Float32, softmax_scale: Float32):
        """Writes the statistics of one query into (stats_size,) of its Q tile; lse = -inf: it sees no key, P is 0."""
        half_lse = Float32(MASKED)
        if lse != -Float32.inf:
            half_lse = cutlass.max(lse / softmax_scale * -0.5, MASKED)
        values = cute.make_rmem_tensor(STATS_COLUMNS, BFloat16)
        values.fill(0.0)
        split(half_lse, values, 0)
        split(dPsum * -0.5, values, SPLIT)
        target = cute.recast_ptr(gStats.iterator, dtype=BFloat16) + row * STATS_COLUMNS
        cute.autovec_copy(values, cute.make_tensor(target.align(16), cute.make_layout(STATS_COLUMNS)))

    @cute.jit
    def fill_ones(self, sOnes: cute.Tensor, tidx: Int32):
        """Writes the operands A of LSE and dPsum; called by ones_size threads."""
        column, statistic = tidx % STATS_COLUMNS, tidx // (8 * STATS_COLUMNS)
        selected = column // SPLIT == statistic
        sOnes[tidx] = BFloat16(1.0) if selected else BFloat16(0.0)

    def partition(self, smem: Smem, warpgroup_idx: Int32) -> GemmParts:
        """What the other methods take as `parts`."""
        config = self.config
        tiled_mma = make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(config.num_mma_warpgroups, 1, 1),
            tiler_mn=(64, config.tile_m),
        )
        layout_A = cute.make_layout(((8, config.tile_n // 8), (8, 2)), stride=((STATS_COLUMNS, 0), (1, 0)))
        layout_B = cute.make_layout(
            ((8, config.tile_m // 8), (8, 2), config.num_stages),
            stride=((STATS_COLUMNS, 8 * STATS_COLUMNS), (1, 0), config.tile_m * STATS_COLUMNS),
        )
        operand_B = cute.make_tensor(cute.recast_ptr(smem.sStats.iterator, dtype=BFloat16), layout_B)

        def gemm(statistic: int) -> Gemm:
            ones = cute.make_tensor(smem.sOnes.iterator + statistic * 8 * STATS_COLUMNS, layout_A)
            return Gemm.partition(tiled_mma, warpgroup_idx, ones, operand_B)

        return GemmParts(gemm(0), gemm(1))

    def products_S(self, parts: GemmParts, stage: Int32) -> tuple:
        """Further products (tiled_mma, tCrA, tCrB) of the GEMM of S^T."""
        return (_product(parts.gemm_LSE, stage),)

    def products_dP(self, parts: GemmParts, stage: Int32) -> tuple:
        """Further products of the GEMM of dP^T."""
        return (_product(parts.gemm_dPsum, stage),)

    @cute.jit
    def softmax(self, acc_S: cute.Tensor, parts, stage: Int32, softmax_scale_log2: Float32):
        """acc_S = P^T, in place."""
        for i in cutlass.range_constexpr(cute.size(acc_S)):
            acc_S[i] = cute.math.exp2(acc_S[i] * softmax_scale_log2, fastmath=True)

    @cute.jit
    def softmax_backward(self, acc_P: cute.Tensor, acc_dP: cute.Tensor, parts, stage: Int32):
        """acc_dP = dS^T, in place."""
        for i in cutlass.range_constexpr(cute.size(acc_dP)):
            acc_dP[i] = acc_P[i] * acc_dP[i]


def make_stats(config: BwdConfig) -> VectorStats | GemmStats:
    """The way of a configuration."""
    return GemmStats(config) if config.stats_by_gemm else VectorStats(config)


@cute.jit
def split(value: Float32, values: cute.Tensor, first: cutlass.Constexpr[int]):
    """value = sum of values[first : first + SPLIT], exact."""
    for i in cutlass.range_constexpr(SPLIT):
        part = value.to(BFloat16)
        values[first + i] = part
        value = value - part.to(Float32)


def by_columns(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator as (column pair, row pair, groups of 8 columns)."""
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, cute.size(acc) // 4)))


def _product(gemm: Gemm, stage: Int32) -> tuple:
    return gemm.tiled_mma, gemm.tCrA, stage_of(gemm.tCrB, stage)
