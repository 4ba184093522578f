"""Random problems of the op, replayable: `python -m tests.fuzz --cases 2000 --seed 0`, one of them with `--only 17`.

A case draws lengths (ragged ones and tile edges), mask, head dim, heads, dtype, scale, schedule and the strides of every
tensor from its seed and number, and nothing else. Checked of each:

- gradients against fp64, within the project's error budget (`cute_dash.testing`), and finite;
- on the GPU: equal bits when outputs and workspace start as NaN and as large numbers, and with contiguous inputs; on
  small problems the emulator's gradients, within the same budget;
- on the CPU: equal bits of the emulator in random interleavings of the CTAs, and with contiguous inputs;
- batch-invariant schedules: equal bits of a sequence alone;
- where the op takes sequences of different lengths: each of them against fp64, equal bits alone, zeros elsewhere.

On a Hopper GPU it takes kernels from a fixed list, KEYS, and compiles them first, in several processes at once; elsewhere
it runs the emulator on small problems. Exit status: 0 all passed, 1 some failed, each named with what replays it.
"""

import argparse
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from cute_dash import attention_backward, emulator, flash_attn_func, interface, validation
from cute_dash.config import TILE_HEAD_DIMS, UNEQUAL_HEAD_DIMS, describe_head_dims
from cute_dash.registry import UnsupportedShapeError
from cute_dash.testing import (
    assert_accurate,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    relative_error,
    why_no_hopper,
)
from cute_dash.verify import GRADIENTS, find_difference
from cute_dash.verify_gpu import Watchdog, fill_free_memory, list_allocations

ROOT = Path(__file__).parents[1]
BUDGET = 2.0  # times the error of fp64 with the unavoidable roundings
FILLS = (0xFF, 0x7F)  # NaN; 3.4e38
EDGES = (1, 2, 3, 63, 64, 65, 79, 80, 81, 127, 128, 129, 159, 160, 161, 255, 256, 257, 383, 384, 385, 640, 1024)
STUCK_S = 180.0


class Key(NamedTuple):
    """What a case is compiled for."""

    schedule: str
    head_dim: int
    mask: str
    dtype: torch.dtype = torch.bfloat16
    grouped: bool = False
    varlen: bool = False
    unequal: bool = False  # head dims of Q, K and of V

    @property
    def head_dim_v(self) -> int:
        return UNEQUAL_HEAD_DIMS[1] if self.unequal else self.head_dim


def list_keys() -> list[Key]:
    """The kernels that cases draw from. A window that hides nothing runs as one of those without a window."""
    of_mask = {
        "full": ("baseline", "descending", "shift", "shortest_first", "longest_first", "hybrid"),
        "causal": ("baseline", "descending", "symmetric_shift", "shortest_first", "longest_first", "hybrid"),
        "local": ("baseline", "shortest_first", "longest_first"),
    }
    keys = []
    for head_dim in (64, 128):
        keys += [Key(name, head_dim, mask) for mask, names in of_mask.items() for name in names]
        keys += [Key("shortest_first", head_dim, mask, torch.float16) for mask in of_mask]
        if takes_grouped_queries():
            keys += [Key("shortest_first", head_dim, mask, grouped=True) for mask in of_mask]
            keys += [
                Key("shift", head_dim, "full", grouped=True),
                Key("symmetric_shift", head_dim, "causal", grouped=True),
            ]
        varlen = [mask for mask in of_mask if takes_varlen(mask == "local")]
        keys += [Key("shortest_first", head_dim, mask, varlen=True) for mask in varlen]
        keys += [Key("longest_first", head_dim, mask, grouped=takes_grouped_queries(), varlen=True) for mask in varlen]
    others = [(head_dim, False) for head_dim in TILE_HEAD_DIMS if head_dim not in (64, 128)]
    for head_dim, unequal in (*others, (UNEQUAL_HEAD_DIMS[0], True)):
        keys += [
            Key("shift", head_dim, "full", unequal=unequal),
            Key("hybrid", head_dim, "causal", unequal=unequal),
            Key("shortest_first", head_dim, "local", torch.float16, unequal=unequal),
            Key("longest_first", head_dim, "causal", grouped=True, varlen=True, unequal=unequal),
        ]
    return keys


@lru_cache
def takes_grouped_queries() -> bool:
    """Whether the op takes fewer KV heads than query heads."""
    q, k = (torch.zeros(1, 2, num_heads, 64) for num_heads in (2, 1))
    try:
        validation.check_qkv(q, k, k)
    except ValueError:
        return False
    return True


@lru_cache
def takes_varlen(window: bool) -> bool:
    """Whether there is an op for sequences of different lengths, and with a sliding window."""
    if not hasattr(interface, "flash_attn_varlen_func"):
        return False
    x, cu_seqlens = torch.zeros(3, 1, 64), torch.tensor([0, 1, 3], dtype=torch.int32)
    window_size = (0, 0) if window else (-1, -1)
    try:
        interface.flash_attn_varlen_func(x, x, x, cu_seqlens, cu_seqlens, 2, 2, window_size=window_size)
    except ValueError:
        return False
    return True


class Limits(NamedTuple):
    """How large a case may be: of the scores, elements in all; of lengths, tokens."""

    max_scores: int
    max_seqlen: int
    max_emulated: int  # scores, up to which the emulator is compared with


GPU_LIMITS = Limits(6_000_000, 3072, 300_000)
CPU_LIMITS = Limits(150_000, 400, 0)


@dataclass(frozen=True)
class Case:
    """One problem, all of it drawn from (seed, number)."""

    seed: int
    number: int
    key: Key
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    window_size: tuple[int, int]
    softmax_scale: float | None
    layouts: dict[str, str] = field(compare=False)
    own_forward: bool  # out and LSE of the op's forward, not of the reference
    lengths: tuple[tuple[int, int], ...] = ()  # queries and keys of each sequence, where they differ

    @property
    def causal(self) -> bool:
        return self.key.mask == "causal"

    @property
    def scale(self) -> float:
        return self.softmax_scale or self.key.head_dim**-0.5

    def describe(self) -> str:
        key, layouts = self.key, ", ".join(f"{name} {layout}" for name, layout in self.layouts.items())
        window = f" {self.window_size}" if key.mask == "local" else ""
        lengths = ", ".join(f"{q} x {k}" for q, k in self.lengths or [(self.seqlen_q, self.seqlen_k)])
        return (
            f"{key.schedule}, head dim {describe_head_dims(key.head_dim, key.head_dim_v)}, {key.mask}{window}, {key.dtype}, batch {self.batch}, "
            f"{self.num_heads} heads, {self.num_heads_kv} KV heads, {lengths} tokens, "
            f"scale {self.softmax_scale}, {'own forward, ' if self.own_forward else ''}{layouts}"
        )

    def replay(self) -> str:
        return f"python -m tests.fuzz --seed {self.seed} --only {self.number}"


# Drawing


def draw_case(seed: int, number: int, keys: list[Key], limits: Limits) -> Case:
    """Case `number` of `seed`; the same whenever it is drawn with these keys and limits."""
    rng = random.Random(f"{seed}/{number}")
    key = rng.choice(keys)
    if key.varlen:
        return draw_varlen_case(rng, Case(seed, number, key, 1, 1, 1, 1, 1, (-1, -1), None, {}, False), limits)
    seqlen_q = draw_length(rng, limits)
    seqlen_k = seqlen_q if rng.random() < 0.4 else draw_length(rng, limits)
    while seqlen_q * seqlen_k > limits.max_scores:
        seqlen_q, seqlen_k = -(-seqlen_q // 2), -(-seqlen_k // 2)
    streams = max(limits.max_scores // (seqlen_q * seqlen_k), 1)
    group_size = rng.randint(2, min(max(streams, 2), 4)) if key.grouped else 1
    num_heads_kv = rng.randint(1, min(max(streams // group_size, 1), 5))
    num_heads = num_heads_kv * group_size
    batch = rng.randint(1, min(max(streams // num_heads, 1), 4))
    window_size = (draw_side(rng, seqlen_k), draw_side(rng, seqlen_q)) if key.mask == "local" else (-1, -1)
    case = Case(
        seed,
        number,
        key,
        batch,
        num_heads,
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        window_size,
        rng.choice([None, None, 0.02, 0.2, 0.5]),
        {name: rng.choice(LAYOUTS[name]) for name in LAYOUTS},
        rng.random() < 0.1,
    )
    return case if can_implement(case) else draw_case(seed, number, [k for k in keys if k != key], limits)


def draw_varlen_case(rng: random.Random, case: Case, limits: Limits) -> Case:
    """Sequences of different lengths, some of them without queries, without keys or empty."""
    lengths: list[tuple[int, int]] = []
    num_heads_kv = rng.randint(1, 3)
    num_heads = num_heads_kv * (rng.randint(2, 4) if case.key.grouped else 1)
    budget = limits.max_scores // num_heads
    for _ in range(rng.randint(1, 6)):
        seqlen_q, seqlen_k = (0 if rng.random() < 0.1 else draw_length(rng, limits) for _ in range(2))
        seqlen_k = seqlen_q if rng.random() < 0.4 else seqlen_k
        if seqlen_q * seqlen_k <= budget:
            lengths.append((seqlen_q, seqlen_k))
            budget -= seqlen_q * seqlen_k
    lengths = lengths or [(5, 7)]
    seqlen_q, seqlen_k = (max(side) for side in zip(*lengths, strict=True))
    local = case.key.mask == "local"
    return replace(
        case,
        batch=len(lengths),
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        window_size=(draw_side(rng, seqlen_k), draw_side(rng, seqlen_q)) if local else (-1, -1),
        softmax_scale=rng.choice([None, 0.2]),
        lengths=tuple(lengths),
    )


def draw_length(rng: random.Random, limits: Limits) -> int:
    """A tile edge or its neighbour, or anything, short lengths as often as long ones."""
    if rng.random() < 0.5:
        return rng.choice([edge for edge in EDGES if edge <= limits.max_seqlen])
    return round(math.exp(rng.uniform(0, math.log(limits.max_seqlen))))


def draw_side(rng: random.Random, seqlen: int) -> int:
    """A side of a window: none, no limit, some keys, a tile edge, wider than the sequence."""
    return rng.choice([0, -1, rng.randint(1, 40), rng.choice(EDGES), rng.randint(0, seqlen), seqlen + 5])


def can_implement(case: Case) -> bool:
    q, k = (
        torch.empty(case.batch, seqlen, num_heads, case.key.head_dim, dtype=case.key.dtype, device="meta")
        for seqlen, num_heads in ((case.seqlen_q, case.num_heads), (case.seqlen_k, case.num_heads_kv))
    )
    try:
        validation.resolve_schedule(case.key.schedule, q, k, case.causal, case.window_size)
    except UnsupportedShapeError:
        return False
    return True


# Strides

# "one head", "one sequence" and "one value" change values too: the reference reads what the op reads
_OF_KV = [
    "contiguous",
    "fused",
    "heads first",
    "padded",
    "padded, unaligned",
    "every other token",
    "offset 8",
    "offset 1",
]
LAYOUTS = {
    "q": [*_OF_KV, "last dim strided"],
    "k": [*_OF_KV, "one head", "one sequence"],
    "v": [*_OF_KV, "one head", "one sequence"],
    "dout": ["contiguous", "heads first", "padded", "offset 1", "one value", "one head", "last dim strided"],
    "out": ["contiguous", "heads first", "padded", "offset 1"],
    "lse": ["contiguous", "heads last", "padded"],
}


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` (batch, seqlen, num_heads, head_dim) with the strides of a layout; NaN wherever nobody may look."""
    batch, seqlen, num_heads, head_dim = x.shape

    def within(shape: tuple[int, ...], place: tuple[slice | int, ...]) -> torch.Tensor:
        view = x.new_full(shape, math.nan)[place]
        view.copy_(x)
        return view

    everything = slice(None)
    if layout == "fused":
        return within((batch, seqlen, 3, num_heads, head_dim), (everything, everything, 1))
    if layout == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout.startswith("padded"):
        extra = 4 if "unaligned" in layout else 8
        return within((batch, seqlen, num_heads, head_dim + extra), (..., slice(head_dim)))  # type: ignore[arg-type]
    if layout == "every other token":
        return within((batch, 2 * seqlen, num_heads, head_dim), (everything, slice(None, None, 2)))
    if layout.startswith("offset"):
        offset = int(layout.split()[1])
        flat = x.new_full((x.numel() + offset,), math.nan)
        flat[offset:] = x.flatten()
        return flat[offset:].view(x.shape)
    if layout == "last dim strided":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    if layout == "one head":
        return x[:, :, :1].expand(x.shape)
    if layout == "one sequence":
        return x[:1].expand(x.shape)
    if layout == "one value":  # what sum() hands back
        return x[0, 0, 0, 0].expand(x.shape)
    assert layout == "contiguous", layout
    return x


def lay_out_lse(lse: torch.Tensor, layout: str) -> torch.Tensor:
    """The same for LSE (batch, num_heads, seqlen_q)."""
    if layout == "heads last":
        return lse.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        padded = lse.new_full((*lse.shape[:2], lse.shape[2] + 3), math.nan)[..., : lse.shape[2]]
        return padded.copy_(lse)
    return lse


# Running


class Inputs(NamedTuple):
    """What the backward takes."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(case.seed * 1_000_003 + case.number)
    key = case.key

    def draw(name: str, seqlen: int, num_heads: int) -> torch.Tensor:
        head_dim = key.head_dim if name in ("q", "k") else key.head_dim_v
        x = torch.randn(case.batch, seqlen, num_heads, head_dim, generator=generator, device=device)
        return lay_out(x.to(key.dtype), case.layouts[name])

    q, dout = (draw(name, case.seqlen_q, case.num_heads) for name in ("q", "dout"))
    k, v = (draw(name, case.seqlen_k, case.num_heads_kv) for name in ("k", "v"))
    options = (case.softmax_scale, case.causal, case.window_size)
    if case.own_forward:
        out, lse = flash_attn_func(q, k, v, *options, schedule=key.schedule, return_lse=True)
    else:
        expanded = (expand_heads(x, case) for x in (k, v))
        out, lse = attention_forward_ref(q, *expanded, case.scale, *options[1:])
    out, lse = out.to(key.dtype).contiguous(), lse.float().contiguous()
    return Inputs(dout, q, k, v, lay_out(out, case.layouts["out"]), lay_out_lse(lse, case.layouts["lse"]))


def expand_heads(x: torch.Tensor, case: Case) -> torch.Tensor:
    """(batch, seqlen, num_heads_kv, head_dim) with each KV head as often as it has query heads."""
    group_size = case.num_heads // case.num_heads_kv
    return x.repeat_interleave(group_size, dim=2) if group_size > 1 else x


def sum_heads(x: torch.Tensor, case: Case) -> torch.Tensor:
    """The way back, for gradients: the sum over the query heads of each KV head, in fp64."""
    return x.double().unflatten(2, (case.num_heads_kv, -1)).sum(dim=3)


@dataclass
class Tally:
    """What all cases came to."""

    passed: int = 0
    comparisons: int = 0  # of bits
    worst_ratio: float = 0.0
    worst_case: str = ""
    failures: list[str] = field(default_factory=list)

    def note_ratio(self, ratio: float, case: Case, name: str) -> None:
        if ratio > self.worst_ratio:
            self.worst_ratio, self.worst_case = ratio, f"case {case.number}, {name}"


def run_case(case: Case, device: str, limits: Limits, tally: Tally) -> None:
    """Every check of one case.

    Raises:
        AssertionError: the first that fails.
    """
    if case.lengths:
        run_varlen_case(case, device, tally)
        return
    inputs = make_inputs(case, device)
    options = {"window_size": case.window_size, "schedule": case.key.schedule}

    def backward(tensors: Inputs = inputs) -> tuple[torch.Tensor, ...]:
        return attention_backward(*tensors, case.softmax_scale, case.causal, **options)

    def assert_same_bits(found: tuple[torch.Tensor, ...], what: str) -> None:
        tally.comparisons += 1
        difference = find_difference(found, grads)
        assert difference is None, f"{what}: {difference}"

    sizes = list_allocations(backward) if device == "cuda" else []
    fill_if_cuda(sizes, FILLS[0])
    grads = backward()
    check_accuracy(case, inputs, grads, limits, tally)
    if device == "cuda":
        fill_if_cuda(sizes, FILLS[1])
        assert_same_bits(backward(), f"memory full of 0x{FILLS[1]:02X}")
    else:
        concrete = validation.resolve_schedule(case.key.schedule, inputs.q, inputs.k, case.causal, case.window_size)
        for interleaving in (case.number, case.number + 1):
            found = emulator.backward(
                *inputs, case.scale, case.causal, concrete, window_size=case.window_size, interleaving=interleaving
            )
            assert_same_bits(found, f"interleaving {interleaving}")
    contiguous = Inputs(*(x.clone(memory_format=torch.contiguous_format) for x in inputs))
    assert_same_bits(backward(contiguous), "contiguous inputs")
    check_sequence_alone(case, inputs, grads, backward, tally)


def fill_if_cuda(sizes: list[int], byte: int) -> None:
    if sizes:
        fill_free_memory(sizes, byte)


def check_sequence_alone(case: Case, inputs: Inputs, grads: tuple[torch.Tensor, ...], backward, tally: Tally) -> None:
    """Batch-invariant schedules: one of the sequences without the others has the bits that it had among them."""
    schedule = validation.resolve_schedule(case.key.schedule, inputs.q, inputs.k, case.causal, case.window_size)
    if not schedule.batch_invariant or case.batch == 1:
        return
    sequence = case.number % case.batch
    found = backward(Inputs(*(x[sequence : sequence + 1] for x in inputs)))
    tally.comparisons += 1
    difference = find_difference(found, tuple(grad[sequence : sequence + 1] for grad in grads))
    assert difference is None, f"sequence {sequence} alone: {difference}"


def check_accuracy(case: Case, inputs: Inputs, grads: tuple[torch.Tensor, ...], limits: Limits, tally: Tally) -> None:
    """Shapes, finite values, errors against fp64 and, where the problem is small, against the emulator."""
    dout, q, k, v, _, _ = inputs
    wide = dout, q, expand_heads(k, case), expand_heads(v, case)
    options = (case.scale, case.causal, case.window_size)
    refs = sum_kv_heads(attention_backward_ref(*wide, *options), case)
    rounded = sum_kv_heads(attention_backward_rounded(*wide, *options), case)
    comparators = [x.to(case.key.dtype) for x in rounded]  # also the sums over the query heads of a group
    for name, grad, x, ref, comparator in zip(GRADIENTS, grads, (q, k, v), refs, comparators, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype, f"{name} is {tuple(grad.shape)} {grad.dtype}"
        assert grad.is_contiguous(), f"{name} has strides {grad.stride()}"
        tally.note_ratio(assert_accurate(grad, ref, comparator, name, BUDGET), case, name)
    if case.batch * case.num_heads * case.seqlen_q * case.seqlen_k > limits.max_emulated:
        return
    emulated = emulator.backward(*inputs, *options[:2], case.key.schedule, window_size=case.window_size)
    for name, grad, other, ref, comparator in zip(GRADIENTS, grads, emulated, refs, comparators, strict=True):
        # both have the kernel's roundings, so they are closer to each other than to fp64; relative to that
        budget = max(BUDGET * relative_error(comparator, ref), torch.finfo(grad.dtype).eps / 2)
        distance = float((grad.double() - other.double()).norm()) / (float(ref.norm()) or 1.0)
        assert distance <= budget, f"{name} is {distance:.3e} from the emulator's, allowed {budget:.3e}"


def sum_kv_heads(grads: tuple[torch.Tensor, ...], case: Case) -> list[torch.Tensor]:
    dq, dk, dv = grads
    return [dq.double(), sum_heads(dk, case), sum_heads(dv, case)]


# Sequences of different lengths

NUM_TAIL_TOKENS = 3  # behind the last sequence: nobody's


def run_varlen_case(case: Case, device: str, tally: Tally) -> None:
    """Every sequence against fp64, and with the bits that it has alone; zeros where there is nothing to see."""
    inputs, ranges = make_varlen_inputs(case, device)
    sizes = list_allocations(lambda: varlen_backward(case, inputs, case.lengths)) if device == "cuda" else []
    fill_if_cuda(sizes, FILLS[0])
    grads = varlen_backward(case, inputs, case.lengths)
    fill_if_cuda(sizes, FILLS[1])
    again = varlen_backward(case, inputs, case.lengths)
    assert_same_packed_bits(again, grads, "the same again", tally)
    for sequence, (queries, keys) in enumerate(ranges):
        mine = select_sequence(inputs, queries, keys)
        parts = grads[0][queries], grads[1][keys], grads[2][keys]
        alone = varlen_backward(case, mine, [case.lengths[sequence]])
        assert_same_packed_bits(alone, parts, f"sequence {sequence} alone", tally)
        if 0 in case.lengths[sequence]:
            assert all((part == 0).all() for part in parts), f"sequence {sequence} has no pairs, but gradients"
            continue
        one = Inputs(*(x[None] for x in mine))
        check_accuracy(case, one, tuple(part[None].contiguous() for part in parts), Limits(0, 0, 0), tally)
    tails = grads[0][ranges[-1][0].stop :], *(grad[ranges[-1][1].stop :] for grad in grads[1:])
    assert all(len(tail) == NUM_TAIL_TOKENS and (tail == 0).all() for tail in tails), (
        "gradients behind the last sequence"
    )


def make_varlen_inputs(case: Case, device: str) -> tuple[Inputs, list[tuple[slice, slice]]]:
    """Packed inputs: (tokens, num_heads, head_dim), LSE (num_heads, tokens); and where the sequences are."""
    generator = torch.Generator(device).manual_seed(case.seed * 1_000_003 + case.number)
    starts_q, starts_k = ([0, *itertools.accumulate(lengths)] for lengths in zip(*case.lengths, strict=True))
    ranges = [
        (slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])) for i in range(len(case.lengths))
    ]

    def draw(num_tokens: int, num_heads: int, head_dim: int) -> torch.Tensor:
        shape = num_tokens + NUM_TAIL_TOKENS, num_heads, head_dim
        return torch.randn(shape, generator=generator, device=device).to(case.key.dtype)

    head_dims = case.key.head_dim, case.key.head_dim_v
    q, dout = (draw(starts_q[-1], case.num_heads, head_dim) for head_dim in head_dims)
    k, v = (draw(starts_k[-1], case.num_heads_kv, head_dim) for head_dim in head_dims)
    out, lse = torch.zeros_like(dout), q.new_full((case.num_heads, len(q)), -math.inf, dtype=torch.float32)
    for queries, keys in ranges:
        if queries.start < queries.stop and keys.start < keys.stop:
            wide = (expand_heads(x[None, keys], case) for x in (k, v))
            options = (case.scale, case.causal, case.window_size)
            mine, lse_of_mine = attention_forward_ref(q[None, queries], *wide, *options)
            out[queries], lse[:, queries] = mine[0].to(out.dtype), lse_of_mine[0].float()
    return Inputs(dout, q, k, v, out, lse), ranges


def select_sequence(inputs: Inputs, queries: slice, keys: slice) -> Inputs:
    dout, q, k, v, out, lse = inputs
    return Inputs(dout[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries])


def varlen_backward(case: Case, inputs: Inputs, lengths: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    cu_seqlens = [
        torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32, device=inputs.q.device)
        for side in zip(*lengths, strict=True)
    ]
    longest = [max(side) for side in zip(*lengths, strict=True)]
    options = {"window_size": case.window_size, "schedule": case.key.schedule}
    grads: tuple[torch.Tensor, ...] = interface.attention_varlen_backward(
        *inputs, *cu_seqlens, *longest, case.softmax_scale, case.causal, **options
    )
    return grads


def assert_same_packed_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str, tally: Tally):
    tally.comparisons += 1
    difference = find_difference(tuple(x[None] for x in found), tuple(x[None] for x in expected))
    assert difference is None, f"{what}: {difference}"


# Kernels


def warm(num_processes: int) -> None:
    """Compiles the kernels of all keys into the cache on disk, in several processes at once."""
    parts = [
        subprocess.Popen([sys.executable, "-m", "tests.fuzz", "--warm", f"{part}/{num_processes}"], cwd=ROOT)
        for part in range(num_processes)
    ]
    if any(part.wait() for part in parts):
        raise RuntimeError("a process that compiles kernels failed")


def warm_part(keys: list[Key]) -> None:
    """Runs each key once with one KV tile and once with several, which some schedules launch in another way."""
    for key in keys:
        if key.varlen:
            num_heads = 2 if key.grouped else 1
            window_size = (50, 0) if key.mask == "local" else (-1, -1)
            lengths = ((100, 100), (300, 300))
            case = Case(0, 0, key, 2, num_heads, 1, 300, 300, window_size, None, {}, False, lengths)
            varlen_backward(case, make_varlen_inputs(case, "cuda")[0], lengths)
            continue
        for seqlen in (100, 600):
            layouts = dict.fromkeys(LAYOUTS, "contiguous")
            num_heads = 2 if key.grouped else 1
            window_size = (seqlen // 4, 0) if key.mask == "local" else (-1, -1)
            case = Case(0, 0, key, 1, num_heads, 1, seqlen, seqlen, window_size, None, layouts, False)
            if can_implement(case):
                inputs = make_inputs(case, "cuda")
                attention_backward(*inputs, None, case.causal, case.window_size, schedule=key.schedule)


# The command


def fuzz(seed: int, numbers: Iterable[int], device: str, say=lambda text: None) -> Tally:
    """Runs the cases; failures are in the tally."""
    tally, keys = Tally(), list_keys()
    limits = GPU_LIMITS if device == "cuda" else CPU_LIMITS
    with Watchdog(STUCK_S) as watchdog:
        for number in numbers:
            case = draw_case(seed, number, keys, limits)
            watchdog.alive(f"{case.replay()} ({case.describe()})")
            if number % 200 == 199:
                say(f"{number + 1} cases, {len(tally.failures)} failed")
            try:
                run_case(case, device, limits, tally)
                tally.passed += 1
            except Exception as error:
                tally.failures.append(f"{case.replay()}: {describe_error(error)}; {case.describe()}")
                say(f"FAILED {tally.failures[-1]}")
                if "CUDA error" in str(error):  # which every later call would report again
                    break
    return tally


def describe_error(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def summarize(seed: int, tally: Tally, device: str, seconds: float) -> str:
    return (
        f"fuzz on {device}: seed {seed}, {tally.passed + len(tally.failures)} cases, {tally.passed} passed, "
        f"{len(tally.failures)} failed; {tally.comparisons} comparisons of bits; worst error {tally.worst_ratio:.2f} times "
        f"the comparator's, {BUDGET:g} or half an ulp allowed ({tally.worst_case or 'none'}); {seconds:.0f} s"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random problems of the op, replayable.")
    parser.add_argument("--cases", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", type=int, metavar="CASE", help="this case alone, described")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda on a Hopper GPU, else cpu")
    parser.add_argument("--json", metavar="FILE", help="also write the summary there")
    parser.add_argument("--warm", help=argparse.SUPPRESS)  # PART/PARTS: compile a part of the kernels
    args = parser.parse_args(argv)
    if args.warm:
        part, parts = map(int, args.warm.split("/"))
        warm_part(list_keys()[part::parts])
        return 0
    device = args.device or ("cpu" if why_no_hopper() else "cuda")
    if device == "cuda" and (reason := why_no_hopper()):
        parser.error(f"--device cuda: {reason}")
    keys = list_keys()
    start = time.monotonic()
    if args.only is not None:
        print(draw_case(args.seed, args.only, keys, GPU_LIMITS if device == "cuda" else CPU_LIMITS).describe())
        numbers = range(args.only, args.only + 1)
    else:
        numbers = range(args.cases)
        if device == "cuda":
            warm(min(os.cpu_count() or 1, 8))
    tally = fuzz(args.seed, numbers, device, lambda text: print(text, file=sys.stderr, flush=True))
    seconds = time.monotonic() - start
    print(summarize(args.seed, tally, device, seconds))
    for failure in tally.failures:
        print(f"FAILED {failure}")
    if args.json:
        Path(args.json).write_text(json.dumps({"seed": args.seed, "device": device, "seconds": seconds, **vars(tally)}))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
