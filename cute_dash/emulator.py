"""CPU emulator: the tile algorithm of the backward kernel in torch, under any schedule and any interleaving of CTAs.

Runs on the host with torch, no GPU. It is the op's CPU implementation and the bench on which a schedule is tried before
it meets a GPU: the same work tiles, loop order and accumulation order as the kernel, the same roundings (P and dS to
the input dtype, everything else fp32), and dQ adds that happen only when their lock value has come. A schedule whose
waits can never be served raises here, where the kernel would hang.

Per step, with D = dPsum = rowsum(dO * O) (FlashAttention-2, arXiv 2307.08691, algorithm 2):

    S = Q K^T           P = exp2(S * scale * log2(e) - LSE * log2(e)), 0 where masked
    dP = dO V^T         dS = P * (dP - D)     where the LSE has a gradient of its own: D - dLSE
    dV += P^T dO        dK += dS^T Q        dQ tile += dS K

dQ and dK are multiplied by the softmax scale once, at the end. Lengths are in tokens, LSE is a natural logarithm.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_dash.check import DQTile, ScheduleError
from cute_dash.config import BwdConfig, get_config
from cute_dash.problem import ProblemShape, Window, normalize_mask
from cute_dash.registry import resolve
from cute_dash.schedule import Schedule, WorkTile

_LOG2_E = math.log2(math.e)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """Attention forward in fp32, one (batch, head) at a time so that its bits do not depend on the batch around it.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), bf16, fp16 or fp32.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), dtype of q; num_heads_kv divides num_heads. v may have a head
            dim of its own.
        softmax_scale: factor on Q K^T.
        causal: bottom-right aligned causal mask.
        window_size: sliding window (left, right), -1 for no limit.

    Returns:
        out (batch, seqlen_q, num_heads, head dim of v), dtype of q, and LSE (batch, num_heads, seqlen_q) in fp32,
        natural logarithm. A query that sees no key has out 0 and LSE -inf.
    """
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_k, group_size = k.shape[1], num_heads // k.shape[2]
    window = _as_window(*normalize_mask(causal, window_size, seqlen_q, seqlen_k), seqlen_k)
    visible = window and _visible(range(seqlen_q), range(seqlen_k), seqlen_k - seqlen_q, window, q.device)
    out = q.new_empty((batch, seqlen_q, num_heads, v.shape[-1]))
    lse = torch.empty(batch, num_heads, seqlen_q, dtype=torch.float32, device=q.device)
    q, k, v = _to_streams(q), _to_streams(k), _to_streams(v)
    for b in range(batch):
        for h in range(num_heads):
            scores = q[b, h] @ k[b, h // group_size].T * softmax_scale  # (seqlen_q, seqlen_k)
            if visible is not None:
                scores = scores.masked_fill(~visible, -math.inf)
            lse[b, h] = torch.logsumexp(scores, dim=-1)
            # exp(-inf - -inf) of a row without keys is NaN: give such a row any finite LSE, its exp is then 0
            finite_lse = lse[b, h].masked_fill(lse[b, h] == -math.inf, 0.0)
            out[b, :, h] = torch.exp(scores - finite_lse[:, None]) @ v[b, h // group_size]
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: "str | Schedule",
    *,
    window_size: tuple[int, int] = (-1, -1),
    config: BwdConfig | None = None,
    interleaving: int | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention backward, tile by tile in the order of `schedule`.

    Args:
        dout, q, out: (batch, seqlen_q, num_heads, head_dim), bf16, fp16 or fp32, one dtype. dout and out have the head
            dim of v.
        k, v: (batch, seqlen_k, num_heads_kv, head_dim), same dtype; num_heads_kv divides num_heads. v may have a head
            dim of its own.
        lse: (batch, num_heads, seqlen_q), fp32, natural logarithm.
        softmax_scale: factor on Q K^T.
        causal: bottom-right aligned causal mask.
        schedule: a name, "module:ATTR" or a schedule object.
        window_size: sliding window (left, right), -1 for no limit.
        config: tile shapes; default those of the kernel for this head dim and mask.
        interleaving: None runs as few CTAs as the schedule allows, each claiming in tile order, the earliest claimed
            tile first. An int is the seed of a random interleaving: a random number of CTAs claim in tile order and
            progress at random, as far as the lock values let them.
        dlse: gradient of the LSE, like it; not read where the LSE is -inf.

    Returns:
        dq, dk, dv in the shapes of q, k, v and the input dtype.

    Raises:
        ScheduleError: no CTA can go on (naming a stuck tile), or a dQ tile did not get all its contributions.
        ValueError: unknown schedule, or one that cannot implement the shape; unsupported head dim.
    """
    causal, window = normalize_mask(causal, window_size, q.shape[1], k.shape[1])
    config = config or get_config(q.shape[-1], causal, window is not None, v.shape[-1])
    shape = config.make_shape_of(q.shape, k.shape, window)
    tensors = dout, q, k, v, out, lse, dlse
    return _backward(tensors, softmax_scale, shape, resolve(schedule, shape), interleaving)


def _backward(
    tensors: tuple[Any, ...], softmax_scale: float, shape: ProblemShape, schedule: Schedule, interleaving: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out, lse, dlse = tensors
    dpsum = (_to_streams(dout) * _to_streams(out)).sum(dim=-1)
    if dlse is not None:
        dpsum = dpsum - dlse.masked_fill(lse == -math.inf, 0.0)
    operands = _Operands(
        q=_to_streams(q),
        k=_to_streams(k),
        v=_to_streams(v),
        dout=_to_streams(dout),
        lse_log2=lse.float() * _LOG2_E,
        dpsum=dpsum,
        scale_log2=softmax_scale * _LOG2_E,
        dtype=q.dtype,
    )
    run = _BackwardRun(operands, shape, schedule)
    run.execute(interleaving)
    dq, dk, dv = run.dq * softmax_scale, run.dk * softmax_scale, run.dv
    return _from_streams(dq, q.dtype), _from_streams(dk, q.dtype), _from_streams(dv, q.dtype)


def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> tuple[Tensor, Tensor]:
    """`forward`, sequence by sequence.

    Args:
        q: (total_q, num_heads, head_dim); k, v: (total_k, num_heads_kv, head_dim).
        cu_seqlens_q, cu_seqlens_k: (number of sequences + 1,): starts of the sequences and the end of the last.

    Returns:
        out (total_q, num_heads, head dim of v) and LSE (num_heads, total_q); 0 and -inf of queries that see no key or
        belong to no sequence.
    """
    total_q, num_heads, _ = q.shape
    out = q.new_zeros((total_q, num_heads, v.shape[-1]))
    lse = torch.full((num_heads, total_q), -math.inf, dtype=torch.float32, device=q.device)
    options = softmax_scale, causal, window_size
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        out_of_one, lse_of_one = forward(q[None, rows], k[None, keys], v[None, keys], *options)
        out[rows], lse[:, rows] = out_of_one[0], lse_of_one[0]
    return out, lse


def backward_varlen(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    schedule: Schedule,
    *,
    window: Window | None = None,
    interleaving: int | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`backward`, sequence by sequence, each as a batch of one under the same concrete schedule.

    Args:
        dout, q, out: (total_q, num_heads, head_dim); k, v: (total_k, num_heads_kv, head_dim).
        lse, dlse: (num_heads, total_q).
        cu_seqlens_q, cu_seqlens_k: as for `forward_varlen`.
        causal, window: `normalize_mask` of the greatest lengths: one kind of mask for all sequences.

    Returns:
        dq, dk, dv in the shapes of q, k, v; 0 where no pair of a query and a key is.
    """
    config = get_config(q.shape[-1], causal, window is not None, v.shape[-1])
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        dout_b, q_b, out_b = (x[None, rows] for x in (dout, q, out))
        lse_b, dlse_b = (None if x is None else x[None, :, rows] for x in (lse, dlse))
        tensors = dout_b, q_b, k[None, keys], v[None, keys], out_b, lse_b, dlse_b
        shape = config.make_shape_of(q_b.shape, k[None, keys].shape, window)
        grads = _backward(tensors, softmax_scale, shape, schedule, interleaving)
        dq[rows], dk[keys], dv[keys] = (grad[0] for grad in grads)
    return dq, dk, dv


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Queries and keys of each sequence that has both."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        if q0 < q1 and k0 < k1:
            yield slice(q0, q1), slice(k0, k1)


@dataclass(frozen=True)
class _Operands:
    """Inputs of the main loop: (batch, num_heads or num_heads_kv, seqlen, head_dim or that of v) fp32.

    The row statistics are (batch, num_heads, seqlen_q).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse_log2: Tensor
    dpsum: Tensor
    scale_log2: float
    dtype: torch.dtype  # P and dS are rounded to it before they enter a GEMM


@dataclass(frozen=True)
class _Wait:
    """What a CTA needs before its next dQ add: the dQ tile's counter at `lock_value`."""

    tile: WorkTile
    dq_tile: DQTile
    lock_value: int


class _BackwardRun:
    """One backward pass: fp32 gradients, the dQ semaphores, and the CTAs that work on them."""

    def __init__(self, operands: _Operands, shape: ProblemShape, schedule: Schedule) -> None:
        self.operands = operands
        self.shape = shape
        self.schedule = schedule
        # NaN: lock value 0 has to store, nothing may lean on a zero-fill that the kernel does not do
        self.dq = torch.full_like(operands.q, math.nan if schedule.ordered else 0.0)
        self.dk = torch.zeros_like(operands.k)
        self.dv = torch.zeros_like(operands.v)
        num_dq_tiles = (shape.batch, shape.num_query_heads, shape.num_m_blocks)
        self.num_added = torch.zeros(num_dq_tiles, dtype=torch.int32).tolist()

    def execute(self, interleaving: int | None) -> None:
        """Runs all work tiles; afterwards dq, dk, dv are complete but for the softmax scale."""
        min_ctas = min(self.schedule.min_resident_ctas(self.shape), self.shape.num_work_tiles)
        if interleaving is None:
            self._run_ctas(min_ctas, pick=lambda ready: 0)
        else:
            rng = random.Random(interleaving)
            self._run_ctas(rng.randint(min_ctas, self.shape.num_work_tiles), pick=lambda ready: rng.randrange(ready))
        self._finish_dq()

    def _run_ctas(self, num_ctas: int, pick: Callable[[int], int]) -> None:
        """Lets `num_ctas` CTAs claim work tiles in tile order; `pick(count)` says which of the ready ones goes on."""
        unclaimed = iter(range(self.shape.num_work_tiles))
        running: list[tuple[Iterator[_Wait], _Wait]] = []  # in claim order
        while True:
            while len(running) < num_ctas and (work_idx := next(unclaimed, None)) is not None:
                cta = self._work_tile(self.schedule.get_work_tile(work_idx, self.shape))
                if (wait := next(cta, None)) is not None:
                    running.append((cta, wait))
            if not running:
                return
            ready = [i for i, (_, wait) in enumerate(running) if self._is_ready(wait)]
            if not ready:
                raise ScheduleError(self._describe_deadlock(num_ctas, running[0][1]))
            picked = ready[pick(len(ready))]
            cta = running[picked][0]
            if (next_wait := next(cta, None)) is None:
                del running[picked]
            else:
                running[picked] = cta, next_wait

    def _work_tile(self, tile: WorkTile) -> Iterator[_Wait]:
        """One work tile: yields before each dQ add and is resumed when that add's turn has come.

        Head after head of the group takes the tile's steps; dk and dv add up over all of them.
        """
        n_block, h, b = tile
        keys = _tile_slice(n_block, self.shape.tile_n, self.shape.seqlen_k)
        dk, dv = torch.zeros_like(self.dk[b, h, keys]), torch.zeros_like(self.dv[b, h, keys])
        for member in range(self.shape.group_size):
            for step in range(self.schedule.get_num_steps(tile, self.shape)):
                m_block = self.schedule.get_m_block(step, tile, self.shape)
                dq_tile = DQTile(b, h * self.shape.group_size + member, m_block)
                dq_partial = self._step(dq_tile, tile, dk, dv)
                yield _Wait(tile, dq_tile, self.schedule.get_lock_value(m_block, tile, self.shape))
                self._add_dq(dq_tile, dq_partial)
        self.dk[b, h, keys], self.dv[b, h, keys] = dk, dv

    def _step(self, dq_tile: DQTile, tile: WorkTile, dk: Tensor, dv: Tensor) -> Tensor:
        """The five GEMMs of one tile: adds to dk and dv (tile_n, ...), returns this tile's dQ (tile_m, head_dim)."""
        x, shape, (n_block, h_kv, _), (b, h, m_block) = self.operands, self.shape, tile, dq_tile
        rows = _tile_slice(m_block, shape.tile_m, shape.seqlen_q)
        keys = _tile_slice(n_block, shape.tile_n, shape.seqlen_k)
        q, dout, k, v = x.q[b, h, rows], x.dout[b, h, rows], x.k[b, h_kv, keys], x.v[b, h_kv, keys]
        p = torch.exp2(q @ k.T * x.scale_log2 - x.lse_log2[b, h, rows, None])  # (tile_m, tile_n)
        window = _as_window(shape.causal, shape.window, shape.seqlen_k)
        if window and shape.needs_mask(m_block, n_block):
            visible = _visible(_indices(rows), _indices(keys), shape.diagonal, window, p.device)
            p = p.masked_fill(~visible, 0.0)
        ds = p * (dout @ v.T - x.dpsum[b, h, rows, None])  # (tile_m, tile_n)
        p, ds = p.to(x.dtype).float(), ds.to(x.dtype).float()
        dv += p.T @ dout
        dk += ds.T @ q
        return ds @ k

    def _add_dq(self, dq_tile: DQTile, dq_partial: Tensor) -> None:
        b, h, m_block = dq_tile
        target = self.dq[b, h, _tile_slice(m_block, self.shape.tile_m, self.shape.seqlen_q)]
        if self.schedule.ordered and self.num_added[b][h][m_block] == 0:
            target.copy_(dq_partial)
        else:
            target.add_(dq_partial)
        self.num_added[b][h][m_block] += 1

    def _is_ready(self, wait: _Wait) -> bool:
        return not self.schedule.ordered or self._num_added(wait) == wait.lock_value

    def _num_added(self, wait: _Wait) -> int:
        b, h, m_block = wait.dq_tile
        count: int = self.num_added[b][h][m_block]
        return count

    def _describe_deadlock(self, num_ctas: int, wait: _Wait) -> str:
        return (
            f"schedule {self.schedule.name!r} deadlocks with {num_ctas} resident CTAs: {wait.tile} waits for "
            f"lock value {wait.lock_value} of dQ tile m_block={wait.dq_tile.m_block}, which stays at "
            f"{self._num_added(wait)}; every other resident work tile waits too ("
            f"min_resident_ctas says {self.schedule.min_resident_ctas(self.shape)})"
        )

    def _finish_dq(self) -> None:
        """Zeroes the dQ tiles that no KV tile reaches and makes sure that all others are complete."""
        shape = self.shape
        for b in range(shape.batch):
            for h in range(shape.num_query_heads):
                for m_block in range(shape.num_m_blocks):
                    expected = shape.get_n_block_max(m_block) - shape.get_n_block_min(m_block)
                    if (added := self.num_added[b][h][m_block]) != expected:
                        raise ScheduleError(
                            f"schedule {self.schedule.name!r}: dQ tile m_block={m_block} of head_idx={h}, "
                            f"batch_idx={b} got {added} contributions, {expected} KV tiles reach it"
                        )
                    if expected == 0:
                        self.dq[b, h, _tile_slice(m_block, shape.tile_m, shape.seqlen_q)] = 0.0


def _to_streams(x: Tensor) -> Tensor:
    """(batch, seqlen, num_heads, head_dim) of any dtype to contiguous (batch, num_heads, seqlen, head_dim) fp32.

    Always a copy: bits of a CPU's matmul may depend on how its operands are aligned.
    """
    return x.transpose(1, 2).to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _from_streams(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, num_heads, seqlen, head_dim) fp32 to contiguous (batch, seqlen, num_heads, head_dim) of `dtype`."""
    return x.to(dtype).transpose(1, 2).contiguous()


def _tile_slice(block: int, tile: int, seqlen: int) -> slice:
    return slice(block * tile, min((block + 1) * tile, seqlen))


def _indices(tokens: slice) -> range:
    return range(tokens.start, tokens.stop)


def _as_window(causal: bool, window: Window | None, seqlen_k: int) -> Window | None:
    """The causal mask as the window that it is; None for the full mask."""
    return Window(left=seqlen_k - 1, right=0) if causal else window


def _visible(queries: range, keys: range, diagonal: int, window: Window, device: torch.device) -> Tensor:
    """Bool (queries, keys): query i sees keys i + diagonal - left .. i + diagonal + right.

    diagonal is seqlen_k - seqlen_q.
    """
    rows = torch.arange(queries.start, queries.stop, device=device)[:, None] + diagonal
    columns = torch.arange(keys.start, keys.stop, device=device)[None, :]
    return (columns >= rows - window.left) & (columns <= rows + window.right)
