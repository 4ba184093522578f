"""Who is timed: our kernel under each schedule, flash-attn-4 and cuDNN in both modes.

Every candidate is the whole backward call as a user's autograd would make it: preprocess, main kernel, conversion, and
outputs and workspaces from torch's caching allocator. Peers that are not installed are named with the reason.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bench.cells import Cell
from bench.results import FAILED, NOT_APPLICABLE, Key, Untimed
from cute_dash import registry
from cute_dash.check import METHOD_ERRORS, ScheduleError, describe_failure
from cute_dash.config import BwdConfig
from cute_dash.problem import ProblemShape
from cute_dash.schedule import Schedule, Selector

if TYPE_CHECKING:
    import torch

    from bench.reference import Grads, Inputs

    BackwardCall: TypeAlias = Callable[[], Grads]

OURS = "cute-dash"
MODES = ("det", "nondet")
CELL_FIELDS = ("head_dim", "head_dim_v", "causal", "local")  # of a configuration: the cell says what they are


@dataclass(frozen=True)
class Candidate:
    """One implementation in one mode.

    Attributes:
        key: under which it is recorded.
        prepare: makes the timed call for given inputs; what need not happen on every call happens here.
        prove: raises a ValueError if a schedule of ours breaks a rule, as `prepare` does.
    """

    key: Key
    prepare: "Callable[[Inputs], BackwardCall]"
    prove: Callable[[], None] = lambda: None

    @property
    def deterministic(self) -> bool:
        return self.key.mode == "det"


class Peer(Protocol):
    """Another implementation of the attention backward."""

    name: str
    distribution: str

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""

    def refuses(self, cell: Cell) -> str | None:
        """Why it cannot time this cell, or None."""

    def prepare(self, inputs: "Inputs", deterministic: bool) -> "BackwardCall":
        """The call for these inputs."""


class FlashAttention4:
    """flash-attn-4's CuTe kernels, through the function its autograd calls."""

    name = "flash-attn-4"
    distribution = "flash-attn-4"

    def missing(self) -> str | None:
        return _import_error("flash_attn.cute.interface")

    def refuses(self, cell: Cell) -> str | None:
        return None

    def prepare(self, inputs: "Inputs", deterministic: bool) -> "BackwardCall":
        backward = import_module("flash_attn.cute.interface")._flash_attn_bwd
        x = inputs
        # there only None is no limit
        sides = zip(("window_size_left", "window_size_right"), x.window_size, strict=True)
        options: dict[str, Any] = {name: side for name, side in sides if side >= 0}
        if x.lengths:
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), _make_cu_seqlens(x))
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(x.lengths))

        def call() -> "Grads":
            dq, dk, dv, *_ = backward(
                x.q,
                x.k,
                x.v,
                x.out,
                x.dout,
                x.lse,
                softmax_scale=x.softmax_scale,
                causal=x.causal,
                deterministic=deterministic,
                **options,
            )
            return dq, dk, dv

        return call


class Cudnn:
    """cuDNN's fused attention backward, as a graph built with the cudnn frontend; one plan per shape and mode."""

    name = "cudnn"
    distribution = "nvidia-cudnn-frontend"

    def __init__(self) -> None:
        self._plans: dict[Any, tuple[Any, list[Any]]] = {}

    def missing(self) -> str | None:
        return _import_error("cudnn")

    def refuses(self, cell: Cell) -> str | None:
        if cell.varlen:
            return "the graph that is built here has sequences of one length"
        return None if cell.window_size == (-1, -1) else "the graph that is built here has no sliding window"

    def prepare(self, inputs: "Inputs", deterministic: bool) -> "BackwardCall":
        import torch

        # cuDNN's order of modes is (B, H, S, D); strides say that memory is (B, S, H, D)
        operands = [t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v, inputs.out, inputs.dout)]
        operands.append(inputs.lse.unsqueeze(-1))
        shapes = (inputs.q.shape, inputs.k.shape, inputs.v.shape)
        plan_key = (*shapes, inputs.q.dtype, inputs.softmax_scale, inputs.causal, deterministic)
        if plan_key not in self._plans:
            self._plans[plan_key] = self._build(inputs, operands, deterministic)
        graph, handles = self._plans[plan_key]
        workspace_bytes = graph.get_workspace_size()

        def call() -> "Grads":
            dq, dk, dv = (torch.empty_like(t) for t in (inputs.q, inputs.k, inputs.v))
            workspace = torch.empty(workspace_bytes, device=inputs.q.device, dtype=torch.uint8)
            tensors = [*operands, *(g.transpose(1, 2) for g in (dq, dk, dv))]
            graph.execute(dict(zip(handles, tensors, strict=True)), workspace)
            return dq, dk, dv

        return call

    def _build(self, inputs: "Inputs", operands: Sequence[Any], deterministic: bool) -> tuple[Any, list[Any]]:
        """The built graph and its tensor handles: q, k, v, out, dout, stats, dq, dk, dv."""
        import torch

        cudnn = import_module("cudnn")
        io_type = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[inputs.q.dtype]
        fp32 = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=io_type, intermediate_data_type=fp32, compute_data_type=fp32)
        q, k, v, out, dout, stats = (graph.tensor_like(t) for t in operands)
        grads = graph.sdpa_backward(
            q=q,
            k=k,
            v=v,
            o=out,
            dO=dout,
            stats=stats,
            attn_scale=inputs.softmax_scale,
            use_causal_mask=inputs.causal,
            use_deterministic_algorithm=deterministic,
        )
        for grad, operand in zip(grads, operands, strict=False):
            grad.set_output(True).set_dim(list(operand.shape)).set_stride(list(operand.stride()))
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return graph, [q, k, v, out, dout, stats, *grads]


PEERS: dict[str, Peer] = {"fa4": FlashAttention4(), "cudnn": Cudnn()}


def parse_schedules(text: str) -> list[str]:
    """Schedule specs from a comma-separated list; 'all' means every one that loads, 'none' no schedule.

    Raises:
        ValueError: a name that is not registered.
    """
    if text == "none":
        return []
    specs = list(registry.load_all()[0]) if text == "all" else [s.strip() for s in text.split(",") if s.strip()]
    for spec in specs:
        registry.load(spec)
    return list(specs)


def parse_peers(text: str) -> list[Peer]:
    """Peers from a comma-separated list of short names; 'all' or 'none'.

    Raises:
        ValueError: a name that is not known.
    """
    names = list(PEERS) if text == "all" else [] if text == "none" else [s.strip() for s in text.split(",")]
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peers={name!r} is not known; allowed: all, none, {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


@dataclass(frozen=True)
class ConfigChange:
    """Fields of the kernel's configuration to be timed with other values, beside the shipped ones.

    Attributes:
        fields: (name, value) pairs; none for the shipped configuration.
    """

    fields: tuple[tuple[str, int | bool], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "ConfigChange":
        """From "NAME=VALUE,NAME=VALUE".

        Raises:
            ValueError: a field that `BwdConfig` does not have, or a value of another type than the field's.
        """
        known = {f.name: f.default for f in fields(BwdConfig)}
        changes = []
        for part in text.split(","):
            name, _, value = (x.strip() for x in part.partition("="))
            if name not in known or name in CELL_FIELDS:
                names = ", ".join(n for n in known if n not in CELL_FIELDS)
                raise ValueError(f"config={part!r}: {name!r} is no field of the configuration; allowed: {names}")
            allowed = {"True": True, "False": False} if isinstance(known[name], bool) else None
            if (value not in allowed) if allowed else not value.isdecimal():
                raise ValueError(f"config={part!r}: {value!r} must be {'True or False' if allowed else 'a number'}")
            changes.append((name, allowed[value] if allowed else int(value)))
        return cls(tuple(changes))

    def apply(self, cell: Cell) -> BwdConfig:
        """The configuration of a cell with these changes; ValueError if the kernel or the launch cannot have it."""
        if self.fields and cell.varlen:
            raise ValueError("sequences of different lengths run with the shipped configuration only")
        changes: dict[str, Any] = dict(self.fields)
        return replace(cell.shipped_config(), **changes)

    def label(self, name: str) -> str:
        return f"{name}[{','.join(f'{n}={v}' for n, v in self.fields)}]" if self.fields else name


SHIPPED_CONFIG = ConfigChange()


def find_candidates(
    cell: Cell,
    schedules: Iterable[str],
    peers: Iterable[Peer],
    num_sms: int | None = None,
    configs: Iterable[ConfigChange] = (SHIPPED_CONFIG,),
) -> tuple[list[Candidate], list[Untimed]]:
    """The candidates of a cell: ours first, then the installed peers, each in both modes.

    A spec that resolves to a schedule already in the list, as `auto` does, is left out: it would time the same kernel.

    Args:
        cell: the shape.
        schedules: specs of ours, see `cute_dash.registry.load`.
        peers: who else.
        num_sms: of the device, which holds one CTA of the kernel on each; None: not known, any number is enough.
        configs: configurations to time each schedule with.
    Returns:
        Candidates, and those that cannot implement the cell: our schedules, and peers; or whose methods fail.
    """
    schedules, ours, untimed = list(schedules), [], []
    for change in configs:
        candidates, refused = _our_candidates(cell, schedules, num_sms, change)
        ours += candidates
        untimed += refused
    theirs = []
    for peer, mode in product((peer for peer in peers if peer.missing() is None), MODES):
        if reason := peer.refuses(cell):
            untimed.append(Untimed.of(Key(peer.name, mode, None), cell, NOT_APPLICABLE, reason))
        else:
            theirs.append(_peer_candidate(peer, mode))
    return [*ours, *theirs], untimed


def _our_candidates(
    cell: Cell, specs: Iterable[str], num_sms: int | None, change: ConfigChange
) -> tuple[list[Candidate], list[Untimed]]:
    untimed: list[Untimed] = []
    labels: dict[Schedule, str] = {}
    # selectors such as `auto` last: what they select is mostly there already
    for spec in sorted(specs, key=lambda s: isinstance(registry.load(s), Selector)):
        try:
            config = change.apply(cell)
            schedule = _resolve(spec, cell, cell.problem_shape(config), num_sms)
        except ValueError as error:
            loaded = registry.load(spec)
            key = Key(OURS, _mode(loaded), change.label(loaded.name))
            verdict = FAILED if isinstance(error, ScheduleError) else NOT_APPLICABLE
            untimed.append(Untimed.of(key, cell, verdict, str(error)))
        else:
            if schedule not in labels:
                labels[schedule] = _label(schedule, spec, labels.values())
    prepare = _prepare_ours_varlen if cell.varlen else _prepare_ours
    candidates = []
    for schedule, label in labels.items():
        prove = partial(_prove, schedule, config, cell)
        key = Key(OURS, _mode(schedule), change.label(label))
        candidates.append(Candidate(key, prepare(schedule, config, cell), prove))
    return candidates, untimed


def _label(schedule: Schedule, spec: str, taken: Iterable[str]) -> str:
    """The name of the schedule, or 'name@spec' where that name means another one, as with other parameters."""
    is_other = schedule.name in registry.available() and registry.load(schedule.name) != schedule
    return f"{schedule.name}@{spec}" if is_other or schedule.name in taken else schedule.name


def _resolve(spec: str, cell: Cell, shape: ProblemShape, num_sms: int | None) -> Schedule:
    """The concrete schedule; ValueError if it cannot implement the cell, or not with a CTA on each of num_sms SMs."""
    if cell.varlen:
        return registry.resolve_varlen(spec, shape)
    schedule = registry.resolve(spec, shape)
    try:
        needed = schedule.min_resident_ctas(shape)
    except METHOD_ERRORS as error:
        raise ScheduleError(f"{schedule.name}: {describe_failure(error, schedule)}") from error
    if num_sms is not None and needed > num_sms:
        raise ValueError(f"schedule={schedule.name!r} needs {needed} resident CTAs, the device holds {num_sms}")
    return schedule


def _prove(schedule: Schedule, config: BwdConfig, cell: Cell) -> None:
    """As the op does before it launches what is not shipped, and for each length: a deadlock would hang the GPU."""
    from cute_dash.validation import is_tested, prove_once

    if not is_tested(schedule):
        for seqlen in dict.fromkeys(cell.lengths):
            prove_once(schedule, replace(cell.problem_shape(config), seqlen_q=seqlen, seqlen_k=seqlen))


def _prepare_ours(schedule: Schedule, config: BwdConfig, cell: Cell) -> "Callable[[Inputs], BackwardCall]":
    def prepare(inputs: "Inputs") -> "BackwardCall":
        from cute_dash.launch import backward

        _prove(schedule, config, cell)
        x = inputs
        arguments = (x.dout, x.q, x.k, x.v, x.out, x.lse, x.softmax_scale, x.causal, schedule, config)
        return lambda: backward(*arguments, window_size=x.window_size)

    return prepare


def _prepare_ours_varlen(schedule: Schedule, config: BwdConfig, cell: Cell) -> "Callable[[Inputs], BackwardCall]":
    longest = cell.problem_shape(config)

    def prepare(inputs: "Inputs") -> "BackwardCall":
        from cute_dash.launch import backward_varlen

        _prove(schedule, config, cell)
        x = inputs
        cu_seqlens = (_make_cu_seqlens(x),) * 2
        arguments = (x.dout, x.q, x.k, x.v, x.out, x.lse, *cu_seqlens, x.softmax_scale, longest.causal, schedule)
        return lambda: backward_varlen(*arguments, window=longest.window)

    return prepare


def _make_cu_seqlens(inputs: "Inputs") -> "torch.Tensor":
    from bench.reference import make_cu_seqlens

    return make_cu_seqlens(inputs.lengths or (), inputs.q.device)


def _peer_candidate(peer: Peer, mode: str) -> Candidate:
    return Candidate(Key(peer.name, mode, None), lambda inputs: peer.prepare(inputs, mode == "det"))


def _mode(schedule: Schedule) -> str:
    return "det" if schedule.ordered else "nondet"


@cache
def _import_error(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # libraries raise more than ImportError when a shared object is missing
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
