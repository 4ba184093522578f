"""A kernel that holds SMs for a while and does nothing (device), so that others have fewer of them.

Each CTA takes so much shared memory that no CTA of the backward kernel fits beside it, spins until its time is over and
ends by itself: whoever waits for its SM waits for a bounded time. (`torch.cuda._sleep` cannot do that: its one thread
leaves room for a CTA of the backward kernel on the same SM.)
"""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_dash.compile import ARCH

HELD_SMEM_BYTES = 160 * 1024  # of 228 KB: with any configuration of the backward kernel more than an SM has
WARP_THREADS = 32


class HoldSms:
    """Holds one SM per CTA."""

    @cute.jit
    def __call__(self, mSm: cute.Tensor, hold_ns: Int64, num_ctas: Int32, stream):
        """Launches `num_ctas` CTAs of one warp.

        Args:
            mSm: (num_ctas,), int32, zeros; a CTA that runs writes the number of its SM, plus 1.
            hold_ns: how long each CTA spins.
        """
        self.kernel(mSm, hold_ns).launch(grid=(num_ctas, 1, 1), block=(WARP_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mSm: cute.Tensor, hold_ns: Int64):
        SmemAllocator().allocate(HELD_SMEM_BYTES, 16)
        start = cute.arch.globaltimer()
        if cute.arch.thread_idx()[0] == 0:
            mSm[cute.arch.block_idx()[0]] = cute.arch.smid() + 1
        held = Int64(0)
        while held < hold_ns:
            held = cute.arch.globaltimer() - start


def compile_hold_sms(options: str = ""):
    """Compiles the kernel for Hopper, with or without a GPU here."""
    return cute.compile(
        HoldSms(),
        make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4),
        Int64(0),
        Int32(1),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}".strip(),
    )
