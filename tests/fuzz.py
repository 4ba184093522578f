"""Random problems of the op, replayable: `python -m tests.fuzz --cases 2000 --seed 0`, one of them with `--only 17`.

A case draws lengths (ragged ones and tile edges), mask, head dims, heads, dtype, scale, schedule, which gradients come
in, a learnable sink and the strides of every tensor from its seed and number, and nothing else. Checked of each:

- gradients against fp64, within the project's error budget (`cute_dash.testing`), and finite: of q, k, v and, where
  there is one, of a sink; with a gradient of out, of the LSE, or of both;
- on the GPU: equal bits when outputs and workspace start as NaN and as large numbers, and with contiguous inputs; on
  small problems the emulator's gradients, within the same budget;
- on the CPU: equal bits of the emulator in random interleavings of the CTAs, and with contiguous inputs;
- where the op's own forward was run: equal bits through autograd;
- batch-invariant schedules: equal bits of a sequence alone;
- sequences of different lengths: each of them against fp64, equal bits alone, zeros elsewhere.

On a Hopper GPU it takes kernels from a fixed list, `list_keys`, and compiles them first, in several processes at once;
elsewhere it runs the emulator on small problems. With `--jobs N` as many processes share the cases out. Exit status: 0
all passed, 1 some failed, each named with what replays it, or have no result, because their process died or got stuck.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cute_dash import attention_backward, emulator, flash_attn_func, interface, validation
from cute_dash.config import TILE_HEAD_DIMS, UNEQUAL_HEAD_DIMS, describe_head_dims
from cute_dash.registry import UnsupportedShapeError
from cute_dash.testing import (
    assert_accurate,
    assert_bitwise_equal,
    attention_backward_ref,
    attention_backward_rounded,
    attention_forward_ref,
    relative_error,
    sink_gradient_ref,
    why_no_hopper,
)
from cute_dash.verify import GRADIENTS, find_difference
from cute_dash.verify_gpu import Watchdog, fill_free_memory, list_allocations
from tests.processes import Ended, Program, run_all
from tests.sink_gradient import check_sink_gradient

BUDGET = 2.0  # times the error of fp64 with the unavoidable roundings
FILLS = (0xFF, 0x7F)  # NaN; 3.4e38
EDGES = (1, 2, 3, 63, 64, 65, 79, 80, 81, 127, 128, 129, 159, 160, 161, 255, 256, 257, 383, 384, 385, 640, 1024)
STUCK_S = 180.0
WARM_S = 3600.0  # in which a process must have compiled its part of the kernels
PROGRESS = "progress "  # begins a line of a process that runs a part of the cases; others are not for its parent


class Key(NamedTuple):
    """What a case is compiled for."""

    schedule: str
    head_dim: int
    mask: str
    dtype: torch.dtype = torch.bfloat16
    grouped: bool = False
    varlen: bool = False
    unequal: bool = False  # head dims of Q, K and of V
    dlse: bool = False  # a gradient of the LSE

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
        keys += [Key("shortest_first", head_dim, mask, dlse=True) for mask in of_mask]
        keys.append(Key("longest_first", head_dim, "causal", grouped=True, varlen=True, dlse=True))
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
            Key("hybrid", head_dim, "causal", unequal=unequal, dlse=True),
            Key("shortest_first", head_dim, "local", torch.float16, unequal=unequal),
            Key("longest_first", head_dim, "causal", grouped=True, varlen=True, unequal=unequal),
        ]
    # padded to 64, 96 and 256
    keys += [
        Key("shift", 40, "full", grouped=True),
        Key("shortest_first", 72, "causal", dlse=True),
        Key("shortest_first", 200, "local", varlen=True),
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
    uses: str = "out"  # which gradients come in: of out, of the LSE, or of both
    sink: bool = False
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
            f"{key.schedule}, head dim {describe_head_dims(key.head_dim, key.head_dim_v)}, {key.mask}{window}, "
            f"{key.dtype}, batch {self.batch}, {self.num_heads} heads, {self.num_heads_kv} KV heads, {lengths} tokens, "
            f"scale {self.softmax_scale}, gradient of {self.uses}, {'own forward, ' if self.own_forward else ''}"
            f"{'sink, ' if self.sink else ''}{layouts}"
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
        *draw_tensors(rng, key),
    )
    return case if can_implement(case) else draw_case(seed, number, [k for k in keys if k != key], limits)


def draw_tensors(rng: random.Random, key: Key) -> tuple[dict[str, str], bool, str, bool]:
    """Strides of all tensors, whether the forward is the op's own, which gradients come in, whether there is a sink."""
    layouts = {name: rng.choice(LAYOUTS[name]) for name in LAYOUTS}
    return layouts, rng.random() < 0.2, rng.choice(["lse", "both"]) if key.dlse else "out", rng.random() < 0.15


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
    layouts, own_forward, uses, sink = draw_tensors(rng, case.key)
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
        layouts=layouts,
        own_forward=own_forward,
        uses=uses,
        sink=sink,
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
    "dlse": ["contiguous", "heads last", "padded", "one value"],
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
    """The same for LSE and its gradient (batch, num_heads, seqlen_q)."""
    if layout == "heads last":
        return lse.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "padded":
        padded = lse.new_full((*lse.shape[:2], lse.shape[2] + 3), math.nan)[..., : lse.shape[2]]
        return padded.copy_(lse)
    if layout == "one value" and lse.numel():
        return lse[0, 0, 0].expand(lse.shape)
    return lse


# Running


class Inputs(NamedTuple):
    """What the backward takes: dout is None where the gradient comes through the LSE alone, dlse where none does.

    With `sink`, out and lse are those of attention with it.
    """

    dout: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None
    sink: torch.Tensor | None

    def change(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Inputs":
        """These with `function` of every tensor but the sink."""
        *tensors, sink = self
        return Inputs(*(None if x is None else function(x) for x in tensors), sink)

    @property
    def dout_or_zeros(self) -> torch.Tensor:
        return torch.zeros_like(self.out) if self.dout is None else self.dout


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(case.seed * 1_000_003 + case.number)
    key = case.key

    def draw(name: str, seqlen: int, num_heads: int) -> torch.Tensor:
        head_dim = key.head_dim if name in ("q", "k") else key.head_dim_v
        x = torch.randn(case.batch, seqlen, num_heads, head_dim, generator=generator, device=device)
        return lay_out(x.to(key.dtype), case.layouts[name])

    q, dout = (draw(name, case.seqlen_q, case.num_heads) for name in ("q", "dout"))
    k, v = (draw(name, case.seqlen_k, case.num_heads_kv) for name in ("k", "v"))
    dlse = torch.randn(case.batch, case.num_heads, case.seqlen_q, generator=generator, device=device)
    sink = 3 * torch.randn(case.num_heads, generator=generator, device=device) if case.sink else None
    if case.own_forward:
        out, lse = dense_forward(case, q, k, v, sink)
    else:
        out, lse = attention_forward_ref(q, k, v, case.scale, case.causal, case.window_size, sink)
    return finish_inputs(case, Inputs(dout, q, k, v, out, lse, dlse, sink))


def dense_forward(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of the op."""
    arguments = q, k, v, case.softmax_scale, case.causal, case.window_size
    return flash_attn_func(*arguments, schedule=case.key.schedule, return_lse=True, learnable_sink=sink)  # type: ignore[return-value]


def finish_inputs(case: Case, x: Inputs) -> Inputs:
    """Dtypes and strides of what the forward pass made, and only those gradients that the case has."""
    out = lay_out(x.out.to(case.key.dtype).contiguous(), case.layouts["out"])
    lse = x.lse.float().contiguous()
    dlse = x.dlse
    if case.layouts["dlse"] != "one value":
        dlse = dlse.masked_fill(lse == -math.inf, math.nan)  # where it is not read
    return x._replace(
        dout=None if case.uses == "lse" else x.dout,
        out=out,
        lse=lay_out_lse(lse, case.layouts["lse"]),
        dlse=None if case.uses == "out" else lay_out_lse(dlse, case.layouts["dlse"]),
    )


@dataclass
class Tally:
    """What all cases came to.

    Attributes:
        comparisons: of bits.
        worst_ratio: the greatest error, in those of the comparator; of `worst_case`.
        failures: one per case that failed.
        left: cases without a result; `lost` says which they are, and why.
    """

    passed: int = 0
    comparisons: int = 0
    worst_ratio: float = 0.0
    worst_case: str = ""
    failures: list[str] = field(default_factory=list)
    left: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        return self.passed + len(self.failures) + self.left

    @property
    def ok(self) -> bool:
        return not self.failures and not self.lost

    def add(self, other: "Tally") -> None:
        """The cases of another tally."""
        self.passed += other.passed
        self.comparisons += other.comparisons
        self.left += other.left
        self.failures += other.failures
        self.lost += other.lost
        if other.worst_ratio > self.worst_ratio:
            self.worst_ratio, self.worst_case = other.worst_ratio, other.worst_case

    def lose(self, seed: int, numbers: Sequence[int], reason: str) -> None:
        """These cases have no result."""
        self.left += len(numbers)
        named = f"cases {', '.join(map(str, numbers))} of --seed {seed}" if numbers else "no case"
        self.lost.append(f"{reason}, with {named} left")

    def note_ratio(self, ratio: float, case: Case, name: str) -> None:
        if ratio > self.worst_ratio:
            self.worst_ratio, self.worst_case = ratio, f"case {case.number}, {name}"

    def assert_same_bits(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
        """dq, dk, dv, with a batch dim or packed, and a dsink that may follow."""
        self.comparisons += 1
        (*found, dsink), (*expected, expected_dsink) = ((*x, None)[:4] for x in (found, expected))
        with_batch_dim = (tuple(x if x.ndim == 4 else x[None] for x in grads) for grads in (found, expected))
        difference = find_difference(*with_batch_dim)
        assert difference is None, f"{what}: {difference}"
        if dsink is not None:
            assert_bitwise_equal(dsink, expected_dsink, f"{what}: dsink")


def run_case(case: Case, device: str, limits: Limits, tally: Tally) -> None:
    """Every check of one case.

    Raises:
        AssertionError: the first that fails.
    """
    if case.lengths:
        run_varlen_case(case, device, limits, tally)
        return
    inputs = make_inputs(case, device)

    def backward(x: Inputs = inputs) -> tuple[torch.Tensor, ...]:
        options = {"schedule": case.key.schedule, "dlse": x.dlse}
        grads = attention_backward(*x[:6], case.softmax_scale, case.causal, case.window_size, **options)
        return *grads, *get_dsink(x)

    sizes = list_allocations(backward) if device == "cuda" else []
    fill_if_cuda(sizes, FILLS[0])
    grads = backward()
    check_accuracy(case, inputs, grads, limits, tally)
    if device == "cuda":
        fill_if_cuda(sizes, FILLS[1])
        tally.assert_same_bits(backward(), grads, f"memory full of 0x{FILLS[1]:02X}")
    else:
        concrete = validation.resolve_schedule(case.key.schedule, inputs.q, inputs.k, case.causal, case.window_size)
        arguments = inputs.dout_or_zeros, *inputs[1:6], case.scale, case.causal, concrete
        for interleaving in (case.number, case.number + 1):
            options = {"window_size": case.window_size, "dlse": inputs.dlse, "interleaving": interleaving}
            tally.assert_same_bits(emulator.backward(*arguments, **options), grads[:3], f"interleaving {interleaving}")
    contiguous = inputs.change(lambda x: x.clone(memory_format=torch.contiguous_format))
    tally.assert_same_bits(backward(contiguous), grads, "contiguous inputs")
    if case.own_forward:
        check_autograd(partial(dense_forward, case), inputs, grads, tally)
    if case.sink:
        check_dsink(grads[3], inputs, sink_ref(case, inputs))
    check_sequence_alone(case, inputs, grads, backward, tally)


def get_dsink(x: Inputs) -> tuple[torch.Tensor, ...]:
    """The gradient of the sink, if there is one."""
    if x.sink is None:
        return ()
    return (torch.ops.cute_dash.attention_sink_backward(x.dout_or_zeros, x.out, x.lse, x.sink, x.dlse),)


def fill_if_cuda(sizes: list[int], byte: int) -> None:
    if sizes:
        fill_free_memory(sizes, byte)


def check_autograd(forward: Callable[..., Any], inputs: Inputs, grads: Sequence[torch.Tensor], tally: Tally) -> None:
    """Where out and LSE are the op's own: autograd gives the gradients that the backward op gave."""
    leaves = [x.detach().requires_grad_() for x in (*inputs[1:4], inputs.sink) if x is not None]
    results = forward(*leaves[:3], None if inputs.sink is None else leaves[3])
    used = [(y, dy) for y, dy in zip(results, (inputs.dout, inputs.dlse), strict=True) if dy is not None]
    found = torch.autograd.grad([y for y, _ in used], leaves, [dy for _, dy in used])
    tally.assert_same_bits(found, grads, "autograd")


def check_sequence_alone(case: Case, inputs: Inputs, grads: tuple[torch.Tensor, ...], backward, tally: Tally) -> None:
    """Batch-invariant schedules: one of the sequences without the others has the bits that it had among them."""
    schedule = validation.resolve_schedule(case.key.schedule, inputs.q, inputs.k, case.causal, case.window_size)
    if not schedule.batch_invariant or case.batch == 1:
        return
    sequence = case.number % case.batch
    found = backward(inputs.change(lambda x: x[sequence : sequence + 1]))
    expected = tuple(grad[sequence : sequence + 1] for grad in grads[:3])
    tally.assert_same_bits(found[:3], expected, f"sequence {sequence} alone")


def check_accuracy(case: Case, inputs: Inputs, grads: tuple[torch.Tensor, ...], limits: Limits, tally: Tally) -> None:
    """Shapes, finite values, errors against fp64 and, where the problem is small, against the emulator."""
    _, q, k, v, _, lse, dlse, sink = inputs
    dout, options = inputs.dout_or_zeros, (case.scale, case.causal, case.window_size)
    read = None if dlse is None else dlse.masked_fill(lse == -math.inf, 0.0)
    of_rows = {"dlse": read, "learnable_sink": sink}
    refs = attention_backward_ref(dout, q, k, v, *options, **of_rows)
    comparators = attention_backward_rounded(dout, q, k, v, *options, **of_rows)
    factor = BUDGET + (case.sink and case.own_forward)  # whose out is rounded twice
    for name, grad, x, ref, comparator in zip(GRADIENTS, grads, (q, k, v), refs, comparators, strict=False):
        assert grad.shape == x.shape and grad.dtype == x.dtype, f"{name} is {tuple(grad.shape)} {grad.dtype}"
        assert grad.is_contiguous(), f"{name} has strides {grad.stride()}"
        if ref.any():
            ratio = assert_accurate(grad, ref, comparator, name, factor)
            tally.note_ratio(ratio * BUDGET / factor, case, name)  # how much of what is allowed, in terms of BUDGET
        else:
            noise, allowed = float(grad.double().norm()), bound_noise(case, dout, v, k if name == "dq" else q)
            assert noise <= allowed, (
                f"{name}: relative error: its norm is {noise:.3e} instead of 0, allowed {allowed:.3e}"
            )
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] > limits.max_emulated:
        return
    emulated = emulator.backward(
        dout, *inputs[1:6], *options[:2], case.key.schedule, window_size=case.window_size, dlse=dlse
    )
    for name, grad, other, ref, comparator in zip(GRADIENTS, grads, emulated, refs, comparators, strict=False):
        if not ref.any():
            continue
        # both have the kernel's roundings, so they are closer to each other than to fp64; relative to that
        budget = max(factor * relative_error(comparator, ref), torch.finfo(grad.dtype).eps / 2)
        distance = float((grad.double() - other.double()).norm()) / (float(ref.norm()) or 1.0)
        assert distance <= budget, f"{name} is {distance:.3e} from the emulator's, allowed {budget:.3e}"


def bound_noise(case: Case, dout: torch.Tensor, v: torch.Tensor, other: torch.Tensor) -> float:
    """What fp32 may leave of dq or dk where they are 0, because each query sees one key, whose probability is 1.

    dS = P (dP - dPsum) is then a difference of equal sums of at most |dO| |v|.
    """
    longest_v, longest = (float(x.double().norm(dim=-1).max()) for x in (v, other))
    return 2.0**-20 * case.scale * math.sqrt(dout.shape[1]) * float(dout.double().norm()) * longest_v * longest


def check_dsink(dsink: torch.Tensor, x: Inputs, ref: torch.Tensor) -> None:
    """The gradient of the sink against fp64; some layouts repeat values."""
    check_sink_gradient(dsink, ref, x.dout_or_zeros, x.out, x.lse, x.sink, x.dlse, independent=False)


def sink_ref(case: Case, x: Inputs) -> torch.Tensor:
    """The gradient of the sink in fp64, from q, k and v."""
    dlse = torch.zeros_like(x.lse) if x.dlse is None else x.dlse
    if x.k.shape[1] == 0:  # all probability is the sink's
        return dlse.double().sum(dim=(0, 2))
    masks = case.causal, case.window_size
    return sink_gradient_ref(x.dout_or_zeros, x.q, x.k, x.v, case.scale, *masks, x.sink, dlse)


# Sequences of different lengths

NUM_TAIL_TOKENS = 3  # behind the last sequence: nobody's


def run_varlen_case(case: Case, device: str, limits: Limits, tally: Tally) -> None:
    """Every sequence against fp64, and with the bits that it has alone; zeros where there is nothing to see."""
    inputs, ranges = make_varlen_inputs(case, device)
    backward = partial(varlen_backward, case)
    sizes = list_allocations(lambda: backward(inputs, case.lengths)) if device == "cuda" else []
    fill_if_cuda(sizes, FILLS[0])
    grads = backward(inputs, case.lengths)
    fill_if_cuda(sizes, FILLS[1])
    tally.assert_same_bits(backward(inputs, case.lengths), grads, "the same again")
    contiguous = inputs.change(lambda x: x.clone(memory_format=torch.contiguous_format))
    tally.assert_same_bits(backward(contiguous, case.lengths), grads, "contiguous inputs")
    if case.own_forward:
        check_autograd(partial(varlen_forward, case), inputs, grads, tally)
    refs_of_sink = []
    for sequence, (queries, keys) in enumerate(ranges):
        parts = grads[0][queries], grads[1][keys], grads[2][keys]
        alone = backward(move_to_front(inputs, queries, keys), [case.lengths[sequence]])
        mine = tuple(grad[: len(part)] for grad, part in zip(alone, parts, strict=False))
        tally.assert_same_bits(mine, parts, f"sequence {sequence} alone")
        one = select_sequence(inputs, queries, keys)
        if 0 in case.lengths[sequence]:
            assert all((part == 0).all() for part in parts), f"sequence {sequence} has no pairs, but gradients"
        else:
            check_accuracy(case, one, tuple(part[None].contiguous() for part in parts), limits, tally)
        refs_of_sink.append(sink_ref(case, one) if case.sink else 0)
    if case.sink:
        check_dsink(grads[3], inputs, sum(refs_of_sink))
    tails = grads[0][ranges[-1][0].stop :], *(grad[ranges[-1][1].stop :] for grad in grads[1:3])
    assert all(len(tail) == NUM_TAIL_TOKENS and (tail == 0).all() for tail in tails), (
        "gradients behind the last sequence"
    )
    if device == "cpu":
        found = interleaved_varlen_backward(case, inputs)
        tally.assert_same_bits(found, grads[:3], f"interleaving {case.number}")


def make_varlen_inputs(case: Case, device: str) -> tuple[Inputs, list[tuple[slice, slice]]]:
    """Packed inputs: (tokens, num_heads, head_dim), LSE (num_heads, tokens); and where the sequences are.

    The tokens behind the last sequence are NaN in all that is drawn here.
    """
    generator = torch.Generator(device).manual_seed(case.seed * 1_000_003 + case.number)
    starts_q, starts_k = ([0, *itertools.accumulate(lengths)] for lengths in zip(*case.lengths, strict=True))
    ranges = [
        (slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])) for i in range(len(case.lengths))
    ]

    def draw(name: str, num_tokens: int, num_heads: int) -> torch.Tensor:
        head_dim = case.key.head_dim if name in ("q", "k") else case.key.head_dim_v
        x = torch.randn(num_tokens, num_heads, head_dim, generator=generator, device=device)
        return lay_out(add_tail(x, 0).to(case.key.dtype)[None], case.layouts[name])[0]

    q, dout = (draw(name, starts_q[-1], case.num_heads) for name in ("q", "dout"))
    k, v = (draw(name, starts_k[-1], case.num_heads_kv) for name in ("k", "v"))
    dlse = add_tail(torch.randn(case.num_heads, starts_q[-1], generator=generator, device=device), 1)
    sink = 3 * torch.randn(case.num_heads, generator=generator, device=device) if case.sink else None
    if case.own_forward:
        out, lse = varlen_forward(case, q, k, v, sink)
    else:
        out, lse = torch.zeros_like(dout), torch.full_like(dlse, -math.inf)
        for queries, keys in ranges:
            if queries.start < queries.stop and keys.start < keys.stop:
                options = case.scale, case.causal, case.window_size, sink
                out_of_one, lse_of_one = attention_forward_ref(q[None, queries], k[None, keys], v[None, keys], *options)
                out[queries], lse[:, queries] = out_of_one[0].to(out.dtype), lse_of_one[0].float()
            elif sink is not None:
                lse[:, queries] = sink[:, None]
    packed = finish_inputs(case, Inputs(dout, q, k, v, out[None], lse[None], dlse[None], sink))
    return packed._replace(
        out=packed.out[0], lse=packed.lse[0], dlse=None if packed.dlse is None else packed.dlse[0]
    ), ranges


def add_tail(x: torch.Tensor, dim: int, value: float = math.nan, num_tokens: int = NUM_TAIL_TOKENS) -> torch.Tensor:
    """With tokens more in `dim`."""
    shape = list(x.shape)
    shape[dim] = num_tokens
    return torch.cat([x, x.new_full(shape, value)], dim)


def select_sequence(inputs: Inputs, queries: slice, keys: slice) -> Inputs:
    """One sequence as a batch of one."""
    dout, q, k, v, out, lse, dlse, sink = inputs
    rows = (None if x is None else x[None, queries] for x in (dout, q, out))
    dout, q, out = rows
    lse, dlse = (None if x is None else x[None, :, queries] for x in (lse, dlse))
    return Inputs(dout, q, k[None, keys], v[None, keys], out, lse, dlse, sink)


def move_to_front(inputs: Inputs, queries: slice, keys: slice) -> Inputs:
    """One sequence alone, with tokens behind it that are nobody's: as many in all, so that the kind of mask stays."""
    one, total_q, total_k = select_sequence(inputs, queries, keys), len(inputs.q), len(inputs.k)

    def fill(x: torch.Tensor | None, total: int, dim: int = 0, value: float = math.nan) -> torch.Tensor | None:
        return None if x is None else add_tail(x[0], dim, value, total - x.shape[dim + 1])

    dout, q, out = fill(one.dout, total_q), fill(one.q, total_q), fill(one.out, total_q, value=0.0)
    k, v = fill(one.k, total_k), fill(one.v, total_k)
    lse, dlse = fill(one.lse, total_q, 1, -math.inf), fill(one.dlse, total_q, 1)
    return Inputs(dout, q, k, v, out, lse, dlse, one.sink)


class Packing(NamedTuple):
    """Where packed sequences are, as the op takes it."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def pack(case: Case, lengths: Sequence[tuple[int, int]], device: torch.device) -> Packing:
    """The greatest lengths are the whole case's, for some of its sequences too: they choose the kind of mask."""
    starts = (torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32) for side in zip(*lengths, strict=True))
    return Packing(*(x.to(device) for x in starts), *(max(side) for side in zip(*case.lengths, strict=True)))


def varlen_forward(
    case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and LSE of the op."""
    arguments = q, k, v, *pack(case, case.lengths, q.device), case.softmax_scale, case.causal, case.window_size
    options = {"schedule": case.key.schedule, "return_lse": True, "learnable_sink": sink}
    return interface.flash_attn_varlen_func(*arguments, **options)


def varlen_backward(case: Case, x: Inputs, lengths: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    packing = pack(case, lengths, x.q.device)
    options = {"window_size": case.window_size, "schedule": case.key.schedule, "dlse": x.dlse}
    grads = interface.attention_varlen_backward(*x[:6], *packing, case.softmax_scale, case.causal, **options)
    return *grads, *get_dsink(x)


def interleaved_varlen_backward(case: Case, x: Inputs) -> tuple[torch.Tensor, ...]:
    """The emulator's gradients where CTAs progress at random."""
    cu_seqlens_q, cu_seqlens_k, *max_seqlens = pack(case, case.lengths, x.q.device)
    longest = validation.get_longest_shape(x.q, x.k, tuple(max_seqlens), case.causal, case.window_size)
    num_tokens = len(x.q), len(x.k)
    schedule = validation.resolve_varlen_schedule(case.key.schedule, longest, num_tokens, len(case.lengths))
    arguments = x.dout_or_zeros, *x[1:6], cu_seqlens_q, cu_seqlens_k, case.scale, longest.causal, schedule
    return emulator.backward_varlen(*arguments, window=longest.window, interleaving=case.number, dlse=x.dlse)


# Kernels


def warm(num_processes: int) -> None:
    """Compiles the kernels of all keys into the cache on disk, in several processes at once."""
    parts = [
        Program((sys.executable, "-m", "tests.fuzz", "--warm", f"{part}/{num_processes}"), Path(os.devnull))
        for part in range(num_processes)
    ]
    if any(ended.status != 0 for ended in run_all(parts, num_processes, WARM_S)):
        raise RuntimeError(f"a process that compiles kernels failed, or took more than {WARM_S:.0f} s")


def warm_part(keys: list[Key]) -> None:
    """Runs each key once with one KV tile and once with several, which some schedules launch in another way."""
    for key in keys:
        if key.varlen:
            num_heads = 2 if key.grouped else 1
            window_size = (50, 0) if key.mask == "local" else (-1, -1)
            lengths, layouts = ((100, 100), (300, 300)), dict.fromkeys(LAYOUTS, "contiguous")
            options = (window_size, None, layouts, False, "both" if key.dlse else "out", False, lengths)
            case = Case(0, 0, key, 2, num_heads, 1, 300, 300, *options)
            varlen_backward(case, make_varlen_inputs(case, "cuda")[0], lengths)
            continue
        for seqlen in (100, 600):
            layouts = dict.fromkeys(LAYOUTS, "contiguous")
            num_heads = 2 if key.grouped else 1
            window_size = (seqlen // 4, 0) if key.mask == "local" else (-1, -1)
            uses = "both" if key.dlse else "out"
            case = Case(0, 0, key, 1, num_heads, 1, seqlen, seqlen, window_size, None, layouts, False, uses)
            if can_implement(case):
                inputs = make_inputs(case, "cuda")
                options = {"schedule": key.schedule, "dlse": inputs.dlse}
                attention_backward(*inputs[:6], None, case.causal, case.window_size, **options)


# The command


def fuzz(
    seed: int,
    numbers: Sequence[int],
    device: str,
    say: Callable[[str], None] = lambda text: None,
    note: Callable[[int, Tally], None] = lambda num_done, tally: None,
) -> Tally:
    """Runs the cases; failures are in the tally.

    Args:
        note: told after every case how many of `numbers` are done, and what they came to.
    """
    tally, keys = Tally(), list_keys()
    limits = GPU_LIMITS if device == "cuda" else CPU_LIMITS
    with Watchdog(STUCK_S) as watchdog:
        for num_done, number in enumerate(numbers, start=1):
            case = draw_case(seed, number, keys, limits)
            watchdog.alive(f"{case.replay()} ({case.describe()})")
            try:
                run_case(case, device, limits, tally)
                tally.passed += 1
            except Exception as error:
                tally.failures.append(f"{case.replay()}: {describe_error(error)}; {case.describe()}")
                say(f"FAILED {tally.failures[-1]}")
                if "CUDA error" in str(error):  # which every later call would report again
                    tally.lose(seed, numbers[num_done:], f"the process of case {number} broke off after a CUDA error")
                    note(len(numbers), tally)
                    break
            note(num_done, tally)
            if num_done % 200 == 0:
                say(f"{num_done} cases, {len(tally.failures)} failed")
    return tally


def fuzz_part(seed: int, numbers: Sequence[int], device: str) -> None:
    """`fuzz` in a process of several, which says on stdout after each case what all came to so far."""

    def say(text: str) -> None:
        print(f"process {numbers[0]}: {text}", file=sys.stderr, flush=True)

    def note(num_done: int, tally: Tally) -> None:
        print(PROGRESS + json.dumps([num_done, asdict(tally)]), flush=True)

    fuzz(seed, numbers, device, say, note)


def fuzz_in_processes(seed: int, numbers: Sequence[int], jobs: int, arguments: Sequence[str]) -> Tally:
    """`fuzz` in `jobs` processes: case i in process i % jobs.

    Args:
        arguments: the command line of a process but for its part, "--part", "3/12".
    """
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # the processes are the threads
    with tempfile.TemporaryDirectory() as folder:
        programs = [
            Program([*arguments, "--part", f"{part}/{jobs}"], Path(folder) / str(part), environment=environment)
            for part in range(min(jobs, len(numbers)))
        ]
        ended = run_all(programs, jobs, 2 * STUCK_S)  # the process's own watchdog ends it before, if it can
        tally = Tally()
        for part, (program, end) in enumerate(zip(programs, ended, strict=True)):
            tally.add(read_part(seed, numbers[part::jobs], program.output.read_text(), end))
    return tally


def read_part(seed: int, numbers: Sequence[int], text: str, ended: Ended) -> Tally:
    """What the cases of a process came to, those without a result included."""
    *lines, _ = text.split("\n")  # behind the last newline is what it was about to say when it was killed
    said = [line.removeprefix(PROGRESS) for line in lines if line.startswith(PROGRESS)]
    num_done, fields = json.loads(said[-1]) if said else (0, {})
    tally = Tally(**fields)
    if num_done < len(numbers) or ended.status:
        how = "got stuck" if ended.status is None else f"ended with status {ended.status}"
        during = f" in case {numbers[num_done]}" if num_done < len(numbers) else ""
        tally.lose(seed, numbers[num_done:], f"a process {how}{during}")
    return tally


def describe_error(error: Exception) -> str:
    if isinstance(error, AssertionError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def summarize(seed: int, tally: Tally, device: str, seconds: float, jobs: int = 1) -> str:
    return (
        f"fuzz on {device}: seed {seed}, {tally.num_cases} cases, {tally.passed} passed, {len(tally.failures)} failed, "
        f"{tally.left} without a result; {tally.comparisons} comparisons of bits; worst error {tally.worst_ratio:.2f} "
        f"times the comparator's, {BUDGET:g} or half an ulp allowed ({tally.worst_case or 'none'}); {seconds:.0f} s"
        f"{f' in {jobs} processes' if jobs > 1 else ''}"
    )


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random problems of the op, replayable.")
    parser.add_argument("--cases", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", type=int, metavar="CASE", help="this case alone, described")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda on a Hopper GPU, else cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases out; default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="also write the summary there")
    parser.add_argument("--warm", help=argparse.SUPPRESS)  # PART/PARTS: compile a part of the kernels
    parser.add_argument("--part", help=argparse.SUPPRESS)  # PART/PARTS: run a part of the cases, see `fuzz_part`
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
    args.jobs = 1 if args.only is not None else args.jobs
    args.device = args.device or ("cpu" if why_no_hopper() else "cuda")
    if args.device == "cuda" and not args.warm and (reason := why_no_hopper()):
        parser.error(f"--device cuda: {reason}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.warm:
        part, parts = map(int, args.warm.split("/"))
        warm_part(list_keys()[part::parts])
        return 0
    if args.part:
        part, parts = map(int, args.part.split("/"))
        fuzz_part(args.seed, range(args.cases)[part::parts], args.device)
        return 0
    start = time.monotonic()
    tally = run(args)
    seconds = time.monotonic() - start
    print(summarize(args.seed, tally, args.device, seconds, args.jobs))
    for failure in [*tally.failures, *tally.lost]:
        print(f"FAILED {failure}")
    if args.json:
        summary = {"seed": args.seed, "device": args.device, "jobs": args.jobs, "seconds": seconds, **asdict(tally)}
        Path(args.json).write_text(json.dumps(summary))
    return 0 if tally.ok else 1


def run(args: argparse.Namespace) -> Tally:
    """The cases that are asked for."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if args.only is not None:
        limits = GPU_LIMITS if args.device == "cuda" else CPU_LIMITS
        print(draw_case(args.seed, args.only, list_keys(), limits).describe())
        return fuzz(args.seed, [args.only], args.device, say)
    if args.device == "cuda":
        warm(min(os.cpu_count() or 1, 8))
    numbers = range(args.cases)
    if args.jobs == 1:
        return fuzz(args.seed, numbers, args.device, say)
    arguments = [sys.executable, "-m", "tests.fuzz", "--seed", str(args.seed), "--cases", str(args.cases)]
    return fuzz_in_processes(args.seed, numbers, args.jobs, [*arguments, "--device", args.device])


if __name__ == "__main__":
    sys.exit(main())
