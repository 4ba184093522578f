"""A kernel with the order of the backward and none of its arithmetic: CTAs fold their n_block into each dQ tile.

Device code, compiled through `compile_fold`. Work tiles are claimed, waited for and passed on as in the main kernel:
same schedule, same loop order, same `semaphore`. The update is not commutative and forgets nothing (the factor is
odd, hence invertible modulo 2^32), so the result tells the complete order of a tile's contributors, and a read of a
stale value or a lost update changes it. Loads and stores are plain ones: only the turnstile orders them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_dash.compile import ARCH
from cute_dash.config import BwdConfig
from cute_dash.kernels import semaphore
from cute_dash.kernels.extents import Extents
from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule

FACTOR = 3
WARP_THREADS = 32


class TurnstileFold:
    """The kernel for one schedule, and the mask and tiles of a configuration."""

    def __init__(self, schedule: Schedule, config: BwdConfig):
        self.schedule = schedule
        self.config = config

    @cute.jit
    def __call__(
        self,
        mFold: cute.Tensor,
        mSemaphore: cute.Tensor,
        mCounter: cute.Tensor,
        batch: Int32,
        num_heads: Int32,
        seqlen_q: Int32,
        seqlen_k: Int32,
        window_left: Int32,
        window_right: Int32,
        num_ctas: Int32,
        stream,
    ):
        """Launches `num_ctas` CTAs of one warp, all resident.

        Args:
            mFold: (num_streams, num_m_blocks), int32, zeros; the folds.
            mSemaphore: (num_streams, num_m_blocks), int32, zeros.
            mCounter: (1,), int32, zero.
            window_left, window_right: of a local configuration.
        """
        extents = Extents(batch, num_heads, seqlen_q, seqlen_k)
        if const_expr(self.config.local):
            extents = extents._replace(window_left=window_left, window_right=window_right)
        self.kernel(mFold, mSemaphore, mCounter, extents).launch(
            grid=(num_ctas, 1, 1), block=(WARP_THREADS, 1, 1), stream=stream, cooperative=True
        )

    @cute.kernel
    def kernel(
        self,
        mFold: cute.Tensor,
        mSemaphore: cute.Tensor,
        mCounter: cute.Tensor,
        extents: Extents,
    ):
        shape = extents.make_shape(self.config)
        work_idx = semaphore.claim_next(mCounter.iterator)
        while work_idx < shape.num_work_tiles:
            tile = self.schedule.get_work_tile(work_idx, shape)
            for step in cutlass.range(self.schedule.get_num_steps(tile, shape), unroll=1):
                m_block = self.schedule.get_m_block(step, tile, shape)
                lock_value = self.schedule.get_lock_value(m_block, tile, shape)
                place = (tile.batch_idx * shape.num_heads + tile.head_idx) * shape.num_m_blocks + m_block
                if cute.arch.lane_idx() == 0:
                    self.fold(mFold.iterator + place, mSemaphore.iterator + place, lock_value, tile.n_block)
                cute.arch.sync_warp()
            work_idx = semaphore.claim_next(mCounter.iterator)

    @cute.jit
    def fold(self, target: cute.Pointer, counter: cute.Pointer, lock_value: Int32, n_block: Int32):
        """target = FACTOR * target + n_block + 1, in turn; without a turn if the schedule has no order."""
        value = cute.make_tensor(target, cute.make_layout(1))
        if const_expr(self.schedule.ordered):
            semaphore.wait_turn(counter, lock_value)
        value[0] = FACTOR * value[0] + n_block + 1
        if const_expr(self.schedule.ordered):
            semaphore.release_turn(counter)


def compile_fold(fold: TurnstileFold, options: str = ""):
    """Compiles the kernel for Hopper, with or without a GPU here. Takes CUDA tensors and ints, see `__call__`."""
    extents = [Int32(1)] * 7

    def fake_tensor(shape, stride):
        return make_fake_tensor(Int32, shape, stride, assumed_align=4)

    tiles = (cute.sym_int(), cute.sym_int())
    return cute.compile(
        fold,
        fake_tensor(tiles, (cute.sym_int(), 1)),
        fake_tensor(tiles, (cute.sym_int(), 1)),
        fake_tensor((1,), (1,)),
        *extents,
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}".strip(),
    )


def fold_on_host(schedule: Schedule, shape: ProblemShape) -> list[list[int]]:
    """What the folds must be: n_blocks by ascending lock value, [stream][m_block], as int32."""
    contributors: list[list[dict[int, int]]] = [
        [{} for _ in range(shape.num_m_blocks)] for _ in range(shape.num_streams)
    ]
    for work_idx in range(shape.num_work_tiles):
        tile = schedule.get_work_tile(work_idx, shape)
        tiles = contributors[tile.batch_idx * shape.num_heads + tile.head_idx]
        for m_block in range(shape.get_m_block_min(tile.n_block), shape.get_m_block_max(tile.n_block)):
            tiles[m_block][schedule.get_lock_value(m_block, tile, shape)] = tile.n_block
    return [[_fold(n_blocks) for n_blocks in tiles] for tiles in contributors]


def _fold(n_blocks: dict[int, int]) -> int:
    value = 0
    for lock_value in sorted(n_blocks):
        value = (FACTOR * value + n_blocks[lock_value] + 1) % 2**32
    return value - 2**32 if value >= 2**31 else value
