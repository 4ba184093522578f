"""Kernels in which it is known what compute-sanitizer should report (device).

`Faulty` has one fault: the tool must see it, if it looks at this package's kernels. `Chain` has two accesses in an
order of the main kernel's, or in a form of it: what the tool reports of those that are right is a limit of the tool.

Their names have the part by which `tests.sanitize` picks kernels.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_dash.compile import ARCH
from cute_dash.kernels.copy import copy_vector
from cute_dash.kernels.pipeline import Ring, make_ring
from cute_dash.kernels.roles import WARP_THREADS, WARPGROUP_THREADS

NUM_THREADS = 64
NUM_ELEMENTS = 128  # 512 bytes, in which torch allocates


class Faulty:
    """`past_the_end`: each thread stores an element behind mX. Otherwise: a race between two warps in shared memory."""

    def __init__(self, past_the_end: bool):
        self.past_the_end = past_the_end

    @cute.jit
    def __call__(self, mX: cute.Tensor, stream):
        """mX: (NUM_ELEMENTS,), fp32."""
        self.flash_bwd_control(mX).launch(grid=(1, 1, 1), block=(NUM_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def flash_bwd_control(self, mX: cute.Tensor):
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.past_the_end):
            mX[tidx + NUM_ELEMENTS] = Float32(1.0)
        else:
            sX = cute.make_tensor(
                SmemAllocator().allocate_array(cutlass.Float32, NUM_THREADS), cute.make_layout(NUM_THREADS)
            )
            sX[tidx] = Float32(Int32(tidx))
            mX[tidx] = sX[(tidx + NUM_THREADS // 2) % NUM_THREADS]  # written by the other warp; no barrier


# warps of a chain; those from USERS on are a warpgroup
FILLER, MIDDLE, USERS = 0, 1, 2
NUM_ROUNDS = 4
DELAY_NS = 1_000_000
PLENTY_NS = 20 * DELAY_NS  # by which everybody has done everything, under the tool, too
# named barriers
EMPTY, FULL, FREE, USED = 1, 2, 3, 4


class Chain:
    """Two accesses to a buffer, ordered as in the main kernel, round by round, and nothing else.

    `buffer` says whose order it is:

        sDuty   users read  -> FULL -> MIDDLE -> FREE -> FILLER writes           named barriers, partly arrived at
        sdQ     half of the users read, the others write -> FULL -> MIDDLE -> FREE -> FILLER copies in bulk
        sStats  users read  -> USED, all of them -> one lane per warp arrives -> FILLER copies in bulk    an mbarrier

    and `form` what of it there is:

        whole      all of it, which is right
        direct     without the barrier in between: FILLER waits for FULL, or every lane arrives; also right
        broken     a race: FILLER waits by the clock, or one lane arrives for the others without having waited for them
        sync_warp  sStats alone: a sync_warp in place of the barrier of all users; right

    What the tool sees may depend on who comes first. In CTAs 0 and 2 whoever waits for the users is there before they
    arrive, in 1 and 3 behind them; in 0 and 1 FILLER waits for FREE before MIDDLE arrives, in 2 and 3 behind it.
    """

    def __init__(self, buffer: str, form: str):
        self.form = form
        self.by_mbarrier = buffer == "sStats"
        self.half_write = buffer == "sdQ"
        self.fills_in_bulk = buffer != "sDuty"

    @cute.jit
    def __call__(self, mX: cute.Tensor, stream):
        """mX: (NUM_ELEMENTS,), fp32, of which none is negative."""
        num_threads = USERS * WARP_THREADS + WARPGROUP_THREADS
        self.flash_bwd_control(mX).launch(grid=(4, 1, 1), block=(num_threads, 1, 1), stream=stream)

    @cute.kernel
    def flash_bwd_control(self, mX: cute.Tensor):
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        sX = cute.make_tensor(
            allocator.allocate_array(cutlass.Float32, NUM_ELEMENTS, byte_alignment=128), cute.make_layout(NUM_ELEMENTS)
        )
        ring = make_ring(allocator.allocate_array(Int64, 2), 1)
        if warp_idx == FILLER:
            with cute.arch.elect_one():
                ring.init(1, WARPGROUP_THREADS if self.form == "direct" else WARPGROUP_THREADS // WARP_THREADS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        bidx = cute.arch.block_idx()[0]
        behind_users, behind_middle = bidx % 2 == 1, bidx // 2 == 1
        for it in cutlass.range(NUM_ROUNDS, unroll=1):
            if warp_idx == FILLER:
                self.fill(mX, sX, ring, it, behind_users, behind_middle)
            elif warp_idx == MIDDLE:
                self.pass_on(behind_users)
            else:
                self.use(mX, sX, ring, it, behind_users)

    @cute.jit
    def fill(
        self,
        mX: cute.Tensor,
        sX: cute.Tensor,
        ring: Ring,
        it: Int32,
        behind_users: Boolean,
        behind_middle: Boolean,
    ):
        """What FILLER does in a round: the second access, to what the users have had the round before."""
        if const_expr(self.by_mbarrier):
            wait_by_clock(behind_users, DELAY_NS)
            ring.wait_empty(it)
        if const_expr(self.fills_in_bulk):
            copy_vector(mX, sX, ring.expect_bytes(it, NUM_ELEMENTS * 4))
        else:
            for i in cutlass.range_constexpr(NUM_ELEMENTS // WARP_THREADS):
                sX[cute.arch.lane_idx() + i * WARP_THREADS] = Float32(it)
        if const_expr(not self.by_mbarrier):
            if const_expr(self.fills_in_bulk):
                ring.wait_full(it)
            cute.arch.barrier_arrive(barrier_id=EMPTY, number_of_threads=WARPGROUP_THREADS + WARP_THREADS)
            if const_expr(self.form == "whole"):
                wait_by_clock(behind_middle, PLENTY_NS)
                cute.arch.barrier(barrier_id=FREE, number_of_threads=2 * WARP_THREADS)
            elif const_expr(self.form == "direct"):
                self.wait_for_users(behind_users)
            else:
                wait_by_clock(Boolean(True), PLENTY_NS)

    @cute.jit
    def pass_on(self, behind_users: Boolean):
        """What MIDDLE does in a round; in `broken` it keeps to itself what it has learnt."""
        if const_expr(not self.by_mbarrier and self.form != "direct"):
            self.wait_for_users(behind_users)
            if const_expr(self.form == "whole"):
                cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=2 * WARP_THREADS)

    @cute.jit
    def use(self, mX: cute.Tensor, sX: cute.Tensor, ring: Ring, it: Int32, behind_users: Boolean):
        """What a user does in a round: the first access, each to an element of its own."""
        element = cute.arch.thread_idx()[0] - USERS * WARP_THREADS
        if const_expr(self.by_mbarrier):
            ring.wait_full(it)
        else:
            cute.arch.barrier(barrier_id=EMPTY, number_of_threads=WARPGROUP_THREADS + WARP_THREADS)
        if const_expr(self.half_write):
            if element % 2 == 1:
                sX[element] = Float32(it)
            else:
                self.read(mX, sX, element)
        else:
            self.read(mX, sX, element)
        if const_expr(self.fills_in_bulk):
            cute.arch.fence_view_async_shared()
        wait_by_clock(not behind_users, DELAY_NS)
        if const_expr(not self.by_mbarrier):
            cute.arch.barrier_arrive(barrier_id=FULL, number_of_threads=WARPGROUP_THREADS + WARP_THREADS)
        elif const_expr(self.form == "direct"):
            cute.arch.mbarrier_arrive(ring.empty)
        else:
            if const_expr(self.form == "whole"):
                cute.arch.barrier(barrier_id=USED, number_of_threads=WARPGROUP_THREADS)
            if const_expr(self.form == "sync_warp"):
                cute.arch.sync_warp()
            ring.arrive_empty(it)

    @cute.jit
    def read(self, mX: cute.Tensor, sX: cute.Tensor, element: Int32):
        value = sX[element]
        if value < 0.0:
            mX[element] = value  # never, which the compiler does not know: it would not load

    def wait_for_users(self, behind_users: Boolean):
        wait_by_clock(behind_users, DELAY_NS)
        cute.arch.barrier(barrier_id=FULL, number_of_threads=WARPGROUP_THREADS + WARP_THREADS)


@cute.jit
def wait_by_clock(waits: Boolean, duration_ns: cutlass.Constexpr[int]):
    """Lets the others go first."""
    if waits:
        start = cute.arch.globaltimer()
        waited = Int64(0)
        while waited < duration_ns:
            waited = cute.arch.globaltimer() - start


def compile_control(kernel: Faulty | Chain, options: str = ""):
    """Compiles it for Hopper, with or without a GPU here. Takes a CUDA tensor (NUM_ELEMENTS,), fp32."""
    return cute.compile(
        kernel,
        make_fake_tensor(Float32, (NUM_ELEMENTS,), (1,), assumed_align=16),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}".strip(),
    )
