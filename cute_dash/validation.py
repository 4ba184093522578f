"""Every check of the op's arguments, made on the host before anything is launched or allocated.

Each function raises TypeError (wrong kind of object or dtype) or ValueError (wrong value), naming the argument, its
value and what is allowed. What is not supported is refused here and nowhere else. Lengths are in tokens.
"""

import math
import numbers
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cute_dash import registry
from cute_dash.check import ScheduleError, check, check_sample, check_selection_by_length
from cute_dash.config import ALLOWED_HEAD_DIMS, SUPPORTED_HEAD_DIMS, UNEQUAL_HEAD_DIMS, get_config
from cute_dash.device import num_sms
from cute_dash.naming import name_type
from cute_dash.problem import ProblemShape, Window, normalize_mask
from cute_dash.registry import UnsupportedShapeError, load, resolve, resolve_varlen
from cute_dash.schedule import DenseSchedule, Schedule

_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CPU_DTYPES = (*_CUDA_DTYPES, torch.float32)
MAX_PROVEN_STEPS = 50_000
_PART_STEPS = 35_000  # of what is proved of a larger problem, which leaves time for a sample of all of it
# defined here and not found by looking, so that a file that a user adds to the package is not taken for a tested one
TESTED_SCHEDULES = frozenset(
    ("baseline", "descending", "shift", "symmetric_shift", "shortest_first", "longest_first", "hybrid", "unordered")
)
TESTED_SELECTORS = frozenset(("auto", "auto_invariant"))  # which choose among these
SHIPPED_SCHEDULES = TESTED_SCHEDULES | TESTED_SELECTORS  # looked at once in a process
_TESTED_MODULES = frozenset(f"schedules.{name}" for name in SHIPPED_SCHEDULES)
MAX_TILES = 2**30  # the kernel numbers tiles in 32 bits, and the sum of two numbers has to fit
MAX_VARLEN_TILES = 2**23  # of a head: the kernel finds a sequence's statistics, 2**8 elements a tile, in 32 bits
MAX_LENGTH = 2**31 - 1  # beyond every sequence, so no limit; larger numbers would not fit an op's schema
# in the sequence dim of a tensor: two lengths and a tile add up in 32 bits, and with cu_seqlens the kernel tells the
# end of a sequence by coordinates around 2**30
MAX_TOKENS = 2**30 - 2**16
_MIN_SCALE, _MAX_SCALE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
_HOPPER = (9, 0)


def check_scale(softmax_scale: float | None) -> None:
    """None for the default, or a number above 0, finite in fp32: forward kernels take the row maximum, then scale.

    A GPU may take subnormal numbers for 0, so they are refused, too. Comparisons alone, which torch.compile traces; an
    op's float argument is a constant of the graph all the same, so that a scale that changes compiles anew.
    """
    if softmax_scale is None:
        return
    if not _is_number(softmax_scale, float, numbers.Real):
        raise TypeError(f"{softmax_scale=} is a {name_type(softmax_scale)}; allowed: a finite number above 0, or None")
    if not _MIN_SCALE <= softmax_scale <= _MAX_SCALE:
        raise ValueError(
            f"{softmax_scale=}; allowed: a finite number above 0 (in fp32), at least {_MIN_SCALE:.3g}, or None for "
            "1 / sqrt(head_dim)"
        )


def check_dropout(dropout_p: float) -> None:
    """0: no other value is supported by the interfaces that have the argument."""
    if not isinstance(dropout_p, numbers.Real):
        raise TypeError(f"{dropout_p=} is a {name_type(dropout_p)}; allowed: 0.0")
    if dropout_p != 0:
        raise ValueError(f"{dropout_p=}: dropout is not supported; allowed: 0.0")


def check_flag(name: str, flag: bool) -> None:
    if not isinstance(flag, bool):
        raise TypeError(f"{name}={flag!r} is a {name_type(flag)}; allowed: True or False")


def check_window_size(window_size: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right) in tokens, at least 0; -1 or None on a side, or None for both, is no limit.

    Returns:
        the pair as ints, -1 for no limit.
    """
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise TypeError(f"{window_size=}; allowed: a pair (left, right), or None")
    left, right = window_size
    return _check_side(left, window_size), _check_side(right, window_size)


def _check_side(side: Any, window_size: object) -> int:
    if type(side) is int and -1 <= side <= MAX_LENGTH:  # first, as nearly all are
        return side
    if side is None:
        return -1
    if not _is_number(side, int, numbers.Integral):
        raise TypeError(f"{window_size=} holds a {name_type(side)}; allowed: ints, or None for no limit")
    if side < -1:
        raise ValueError(f"{window_size=}; allowed: tokens, at least 0, or -1 for no limit")
    return min(int(side), MAX_LENGTH)


def check_softcap(softcap: float) -> None:
    """Only 0: torch's forward passes have no softcap."""
    if not _is_number(softcap, float, numbers.Real):
        raise TypeError(f"{softcap=} is a {name_type(softcap)}; allowed: the number 0")
    if softcap != 0:
        raise ValueError(f"{softcap=}: a softcap is not there yet; allowed: 0")


def _is_number(x: object, usual: type, kind: type) -> bool:
    """Whether x is a `kind` of number, no bool. One of the `usual` type is told without the abstract class's 0.3 us."""
    return type(x) is usual or (isinstance(x, kind) and not isinstance(x, bool))


def check_qkv(q: Tensor, k: Tensor, v: Tensor, learnable_sink: Tensor | None = None) -> None:
    """Shapes, dtypes, devices: q (batch, seqlen_q, num_heads, head_dim) and k, v (batch, seqlen_k, num_heads_kv, ...).

    num_heads_kv divides num_heads. v has the head dim of q and k, or the pair is `UNEQUAL_HEAD_DIMS`. Batch and lengths
    may be 0. learnable_sink is (num_heads,).
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: 4-D (batch, seqlen, num_heads, head_dim)")
        if min(x.shape[2:]) < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: num_heads and head_dim at least 1")
        _check_num_tokens(name, x.shape[1])
    _check_dtype("q", q)
    _check_same("k", k, "q", q)
    _check_same("v", v, "q", q)
    batch, _, num_heads, head_dim = q.shape
    _check_head_dims(head_dim, v.shape[-1])
    check_num_heads(num_heads, k.shape[2])
    _check_shape("k", k, (batch, k.shape[1], k.shape[2], head_dim))
    _check_shape("v", v, (*k.shape[:-1], v.shape[-1]))
    _check_sink(learnable_sink, q)


def check_varlen_qkv(q: Tensor, k: Tensor, v: Tensor, learnable_sink: Tensor | None = None) -> None:
    """Shapes, dtypes and devices of q (total_q, num_heads, head_dim) and k, v (total_k, num_heads_kv, head_dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: 3-D (total tokens, num_heads, head_dim)")
        if min(x.shape[1:]) < 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: every extent but the first at least 1")
        _check_num_tokens(name, x.shape[0])
    _check_dtype("q", q)
    _check_same("k", k, "q", q)
    _check_same("v", v, "q", q)
    _, num_heads, head_dim = q.shape
    _check_head_dims(head_dim, v.shape[-1])
    check_num_heads(num_heads, k.shape[1])
    _check_shape("k", k, (k.shape[0], k.shape[1], head_dim))
    _check_shape("v", v, (*k.shape[:-1], v.shape[-1]))
    _check_sink(learnable_sink, q)


def _check_num_tokens(name: str, num_tokens: int) -> None:
    # of a length that is traced, torch.export would make the limit a guard; the op checks again when it runs
    if not isinstance(num_tokens, torch.SymInt) and num_tokens > MAX_TOKENS:
        raise ValueError(f"{name} has {num_tokens} tokens; allowed: at most {MAX_TOKENS}")


def _check_sink(learnable_sink: Tensor | None, q: Tensor) -> None:
    if learnable_sink is None:
        return
    if learnable_sink.dtype not in _CPU_DTYPES:
        names = ", ".join(map(str, _CPU_DTYPES))
        raise TypeError(f"learnable_sink has dtype {learnable_sink.dtype}; allowed: {names}")
    if learnable_sink.device != q.device:
        raise ValueError(f"learnable_sink is on {learnable_sink.device}; allowed: the device of q ({q.device})")
    _check_shape("learnable_sink", learnable_sink, (q.shape[-2],))


def check_cu_seqlens(cu_seqlens: tuple[Tensor, Tensor], max_seqlens: tuple[int, int], q: Tensor) -> None:
    """Both tensors (number of sequences + 1,), int32, on the device of q, and max_seqlens at least 0."""
    check_kind_of_cu_seqlens(cu_seqlens, q)
    for side, cu, max_seqlen in zip("qk", cu_seqlens, max_seqlens, strict=True):
        if len(cu) < 2:
            raise ValueError(_describe_cu_seqlens(side, cu))
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen_{side}={max_seqlen}; allowed: at least 0")
    _check_shape("cu_seqlens_k", cu_seqlens[1], tuple(cu_seqlens[0].shape))


def check_kind_of_cu_seqlens(cu_seqlens: tuple[Tensor, Tensor], q: Tensor) -> None:
    """What is known of fake tensors, too, whatever their extents: both 1-D, int32, on the device of q."""
    for side, cu in zip("qk", cu_seqlens, strict=True):
        if cu.dtype != torch.int32:
            raise TypeError(f"cu_seqlens_{side} has dtype {cu.dtype}; allowed: torch.int32")
        if cu.device != q.device:
            raise ValueError(f"cu_seqlens_{side} is on {cu.device}; allowed: the device of q ({q.device})")
        if cu.ndim != 1:
            raise ValueError(_describe_cu_seqlens(side, cu))


def _describe_cu_seqlens(side: str, cu: Tensor) -> str:
    return f"cu_seqlens_{side} has shape {tuple(cu.shape)}; allowed: 1-D, with one more than there are sequences"


def check_lengths(cu_seqlens: tuple[Tensor, Tensor], max_seqlens: tuple[int, int], num_tokens: tuple[int, int]) -> None:
    """The values of `check_cu_seqlens`'s tensors: read, so for CPU tensors only."""
    for side, cu, max_seqlen, total in zip("qk", cu_seqlens, max_seqlens, num_tokens, strict=True):
        starts = cu.tolist()
        if starts[0] != 0 or sorted(starts) != starts or starts[-1] > total:
            raise ValueError(
                f"cu_seqlens_{side} is {starts}; allowed: from 0, not descending, to at most {total} tokens"
            )
        if max_seqlen < (longest := max(_lengths(starts))):
            raise ValueError(f"max_seqlen_{side}={max_seqlen}; allowed: at least the longest sequence ({longest})")


def check_varlen_backward_tensors(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> None:
    """`check_varlen_qkv`, and dout and out like q with the head dim of v, lse and dlse (num_heads, total_q) fp32."""
    check_varlen_qkv(q, k, v)
    check_row_tensors(dout, q, v, out, lse, dlse)


def check_num_heads(num_heads: int, num_heads_kv: int) -> None:
    """Every KV head has the same number of query heads."""
    if num_heads % num_heads_kv:
        divisors = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ValueError(
            f"k has {num_heads_kv} heads and q has {num_heads}; allowed: a divisor of {num_heads} ({divisors})"
        )


def check_backward_tensors(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> None:
    """`check_qkv`, and dout and out like q with the head dim of v, lse and dlse (batch, num_heads, seqlen_q) fp32."""
    check_qkv(q, k, v)
    check_row_tensors(dout, q, v, out, lse, dlse)


def check_row_tensors(dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> None:
    """dout, out like q (..., seqlen_q, num_heads, head_dim) with V's head dim; lse, dlse (..., num_heads, seqlen_q)."""
    *batch, seqlen_q, num_heads, _ = q.shape
    for name, x in (("out", out), ("dout", dout)):  # a dout that was not given is made like out
        _check_same(name, x, "q", q)
        _check_shape(name, x, (*q.shape[:-1], v.shape[-1]))
    for name, row in (("lse", lse), ("dlse", dlse)):
        if row is None:
            continue
        if row.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {row.dtype}; allowed: torch.float32")
        if row.device != q.device:
            raise ValueError(f"{name} is on {row.device}; allowed: the device of q ({q.device})")
        _check_shape(name, row, (*batch, num_heads, seqlen_q))


def check_sink_tensors(dout: Tensor, out: Tensor, lse: Tensor, learnable_sink: Tensor, dlse: Tensor | None) -> None:
    """What the gradient of a sink is made of, (batch, seqlen, num_heads, head_dim) or with cu_seqlens (tokens, ...)."""
    if out.ndim not in (3, 4):
        raise ValueError(f"out has shape {tuple(out.shape)}; allowed: 3-D or 4-D")
    _check_dtype("out", out)
    check_row_tensors(dout, out, out, out, lse, dlse)
    _check_sink(learnable_sink, out)


def check_device(device: torch.device) -> None:
    """CPU, or a Hopper GPU."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ValueError(f"q is on {device}; allowed: cpu, or cuda on a Hopper GPU")
    if (capability := torch.cuda.get_device_capability(device)) != _HOPPER:
        raise ValueError(f"q is on {device}, of compute capability {capability}; allowed: {_HOPPER} (Hopper)")


def resolve_schedule(
    spec: "str | Schedule", q: Tensor, k: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> Schedule:
    """The concrete schedule for these tensors, refused if it cannot run on their device.

    Raises:
        ValueError: unknown name, a schedule that cannot implement the shape, or one that needs more resident CTAs than
            the device has SMs (one CTA of the backward kernel fills an SM).
    """
    device_sms = num_sms(q.device.index) if q.device.type == "cuda" else None
    if isinstance(spec, str) and spec not in SHIPPED_SCHEDULES:
        spec = registry.load(spec)  # anew: a string may name another schedule by now
    return _resolve_for(spec, q.shape, k.shape, causal, window_size, device_sms)  # type: ignore[arg-type]  # a protocol cannot promise a hash


@lru_cache(maxsize=1024)
def _resolve_for(
    spec: "str | Schedule",
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    causal: bool,
    window_size: tuple[int, int],
    device_sms: int | None,
) -> Schedule:
    shape = _make_shape(q_shape, k_shape, causal, window_size)
    check_index_range(shape)
    schedule = _resolve(spec, shape)
    _check_heads_per_group(schedule, shape)
    if device_sms is not None:
        check_residency(schedule, shape, device_sms)
    return schedule


def get_longest_shape(
    q: Tensor, k: Tensor, max_seqlens: tuple[int, int], causal: bool, window_size: tuple[int, int]
) -> ProblemShape:
    """The problem of a sequence of the greatest lengths; its mask is that of all sequences.

    Sides of a window may be longer than another sequence, which hides nothing there.
    """
    (total_q, num_heads, head_dim), (total_k, num_heads_kv, _) = q.shape, k.shape
    seqlen_q, seqlen_k = (
        max(min(length, total), 1) for length, total in zip(max_seqlens, (total_q, total_k), strict=True)
    )
    return _make_shape((1, seqlen_q, num_heads, head_dim), (1, seqlen_k, num_heads_kv, head_dim), causal, window_size)


def resolve_varlen_schedule(
    spec: "str | Schedule", longest: ProblemShape, num_tokens: tuple[int, int], num_sequences: int
) -> Schedule:
    """The concrete schedule for sequences of different lengths, fit for all.

    Args:
        longest: see `get_longest_shape`.
        num_tokens: queries and keys of all sequences.

    Raises:
        ValueError: unknown name, or a schedule that may need several resident CTAs or cannot implement the shape; a
            selector that says batch_invariant and goes by the longest; too many tiles.
    """
    total_q, total_k = num_tokens
    per_head = num_sequences + 1 + max(total_q // longest.tile_m, total_k // longest.tile_n)
    num_tiles = longest.num_query_heads * per_head
    if num_tiles > MAX_TILES or per_head > MAX_VARLEN_TILES:
        raise ValueError(
            f"{total_q} queries and {total_k} keys in {num_sequences} sequences of {longest.num_query_heads} heads "
            f"make {num_tiles} tiles; allowed: at most {MAX_TILES}, and {MAX_VARLEN_TILES} of a head"
        )
    given = load(spec)
    schedule = resolve_varlen(given, longest)
    _check_heads_per_group(schedule, longest)
    if not is_tested(given):
        check_selection_by_length(given, longest)
    return schedule


def is_tested(schedule: Schedule) -> bool:
    """Whether this package's own tests prove the schedule, or what a selector selects and promises."""
    return type(schedule).__module__ in _TESTED_MODULES


def prove_lengths(schedule: Schedule, longest: ProblemShape, cu_seqlens: tuple[Tensor, Tensor]) -> None:
    """`prove` for each pair of lengths, for which a copy of `cu_seqlens` goes to the host."""
    starts_q, starts_k = (cu.tolist() for cu in cu_seqlens)
    for seqlen_q, seqlen_k in set(zip(_lengths(starts_q), _lengths(starts_k), strict=True)):
        if seqlen_q and seqlen_k:
            prove_once(schedule, replace(longest, seqlen_q=seqlen_q, seqlen_k=seqlen_k))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def prove_once(schedule: Schedule, shape: ProblemShape) -> None:
    """`prove`, once for a schedule and a shape."""
    prove(schedule, shape)


def _lengths(starts: list[int]) -> list[int]:
    return [end - start for start, end in zip(starts, starts[1:], strict=False)]


def check_index_range(shape: ProblemShape) -> None:
    """Raises ValueError if the problem has more tiles than 32-bit indices number."""
    num_tiles = shape.batch * shape.num_query_heads * max(shape.num_m_blocks, shape.num_n_blocks)
    if num_tiles > MAX_TILES:
        raise ValueError(f"{shape} has {num_tiles} tiles in its longer direction; allowed: at most {MAX_TILES}")


def _check_heads_per_group(schedule: Schedule, shape: ProblemShape) -> None:
    """Raises ValueError if the tiles of a full group of streams are too many to number."""
    if not isinstance(schedule, DenseSchedule):
        return
    if (num_tiles := schedule.heads_per_group * shape.num_n_blocks) > MAX_TILES:
        raise ValueError(
            f"schedule={schedule.name!r} with heads_per_group={schedule.heads_per_group} has groups of {num_tiles} "
            f"tiles; allowed: at most {MAX_TILES}, here heads_per_group={MAX_TILES // shape.num_n_blocks}"
        )


def check_residency(schedule: Schedule, shape: ProblemShape, num_sms: int) -> None:
    """Raises ValueError if `schedule` needs more than `num_sms` CTAs resident at once."""
    if (needed := schedule.min_resident_ctas(shape)) > num_sms:
        raise ValueError(
            f"schedule={schedule.name!r} needs {needed} resident CTAs for {shape}; "
            f"allowed: at most {num_sms}, one for each SM of the device"
        )


def get_shape(q: Tensor, k: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1)) -> ProblemShape:
    """The problem in the tiles of the kernel that is compiled for this head dim and mask."""
    return _make_shape(q.shape, k.shape, causal, window_size)


def _make_shape(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], causal: bool, window_size: tuple[int, int]
) -> ProblemShape:
    # for what has nothing to compute a schedule is chosen as for one token
    q_shape, k_shape = (tuple(max(extent, 1) for extent in shape) for shape in (q_shape, k_shape))
    causal, window = normalize_mask(causal, window_size, q_shape[1], k_shape[1])
    # the head dim of V has no say in the tiles
    return get_config(q_shape[-1], causal, window is not None).make_shape_of(q_shape, k_shape, window)


def _resolve(spec: "str | Schedule", shape: ProblemShape) -> Schedule:
    given = load(spec)
    schedule = resolve(given, shape)
    if not (is_tested(given) and is_tested(schedule)):  # a shipped selector may have been given another table
        prove(given, shape)
    return schedule


def prove(given: Schedule, shape: ProblemShape) -> None:
    """Checks a schedule that this package's own tests do not, before a kernel hangs on it or adds in a wrong order.

    Of a selector it checks what it selects for the shape, and the promise of batch invariance.

    A problem of at most MAX_PROVEN_STEPS steps, those that the mask hides counted, is proved, all of it. Of a larger
    one every rule is proved for a part, with two sequences and two heads at least where there are as many, and fewer
    tokens if need be; and of the whole a sample is looked at (`check_sample`), which can miss what only few tiles show.
    `cute-dash check` proves all of a larger shape, too. It takes about a second.

    Raises:
        ScheduleError: a ValueError that names the schedule, the first rule broken and where.
        TooManyStepsError: a ValueError: the schedule cannot order the part, and the whole is too large to be proved.
    """
    schedule, part = resolve(given, shape), _part_to_prove(shape)
    try:
        if part == shape or not _can_implement(schedule, part):
            check(given, shape)
        else:
            check(schedule, part)
            check_sample(given, shape)
    except ScheduleError as error:
        raise ScheduleError(f"schedule={given.name!r} breaks a rule: {error}") from error


def _can_implement(schedule: Schedule, shape: ProblemShape) -> bool:
    try:
        resolve(schedule, shape)
    except UnsupportedShapeError:
        return False
    return True


def _part_to_prove(shape: ProblemShape) -> ProblemShape:
    """The shape itself if it has few steps; else fewer streams, if need be query heads of a KV head, and tokens."""
    if _count_tiles(shape) <= MAX_PROVEN_STEPS:
        return shape
    part = replace(shape, batch=min(shape.batch, 2), num_heads=min(shape.num_heads, 2))
    if _count_tiles(part) > _PART_STEPS:
        part = replace(part, group_size=min(shape.group_size, 2))
    if _count_tiles(part) > _PART_STEPS:
        part = _shorten(part)
    part = replace(part, num_heads=_fit(part.num_heads, shape.num_heads, part))
    return replace(part, batch=_fit(part.batch, shape.batch, part))


def _count_tiles(shape: ProblemShape) -> int:
    """Steps that a problem has, those that the mask hides counted."""
    return shape.num_streams * shape.group_size * shape.num_m_blocks * shape.num_n_blocks


def _fit(least: int, most: int, part: ProblemShape) -> int:
    """How large an extent of the part, `least` so far, can be."""
    return max(least, min(most, least * _PART_STEPS // _count_tiles(part)))


def _shorten(shape: ProblemShape) -> ProblemShape:
    """With fewer tokens, about _PART_STEPS steps, and the same mask."""
    longest = math.isqrt(_PART_STEPS * shape.tile_m * shape.tile_n // (shape.num_streams * shape.group_size))
    cut = max(min(shape.seqlen_q, shape.seqlen_k) - longest, 0)  # of both alike: the mask depends on their difference
    seqlen_q, seqlen_k = min(shape.seqlen_q - cut, 2 * longest), min(shape.seqlen_k - cut, 2 * longest)
    window = shape.window and Window(min(shape.window.left, seqlen_k - 1), min(shape.window.right, seqlen_q - 1))
    return replace(shape, seqlen_q=seqlen_q, seqlen_k=seqlen_k, window=window)


def _check_dtype(name: str, x: Tensor) -> None:
    allowed = _CPU_DTYPES if x.device.type == "cpu" else _CUDA_DTYPES
    if x.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} has dtype {x.dtype}; allowed on {x.device.type}: {names}")


def _check_head_dims(head_dim: int, head_dim_v: int) -> None:
    if head_dim not in SUPPORTED_HEAD_DIMS:
        raise ValueError(f"q has head_dim {head_dim}; allowed: {ALLOWED_HEAD_DIMS}")
    if head_dim_v != head_dim and (head_dim, head_dim_v) != UNEQUAL_HEAD_DIMS:
        unequal_qk, unequal_v = UNEQUAL_HEAD_DIMS
        raise ValueError(
            f"v has head_dim {head_dim_v} and q has {head_dim}; allowed: equal ones, or {unequal_v} with {unequal_qk}"
        )


def _check_same(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.dtype != other.dtype:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: the dtype of {other_name} ({other.dtype})")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device}; allowed: the device of {other_name} ({other.device})")


def _check_shape(name: str, x: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {expected}")
