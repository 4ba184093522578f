"""Reads what compute-sanitizer prints about a backward: which warps did what to which buffer, and where in the code.

A record of the tool is a line behind its prefix and the indented ones under it:

    ========= Error: Potential WAR hazard detected at __shared__ 0x4d0 in block (3,0,0) :
    =========     Read Thread (130,0,0) at KERNEL+0x55c0 in flash_bwd_sm90.py:938
    =========     Write Thread (32,0,0) at KERNEL+0x2920 in flash_bwd_sm90.py:581
    =========     Current Value : 0, Incoming Value : 1

The earlier access comes first. racecheck prints one for each byte, and, about the same hazards once more, one for each
pair of instructions ("Race reported between"); synccheck and memcheck print one for each thread. Records that differ
only in bytes, lanes and CTAs are one `Row` with a count. A record in a form that is not known becomes a row
`UNPARSED`, with its lines.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from cute_dash.compile import DTYPES
from cute_dash.config import BwdConfig
from cute_dash.kernels.roles import WARP_THREADS, WARPGROUP_THREADS, WarpRole
from tests.compile import sass

PREFIX = "========="
UNPARSED = "unparsed"
KERNELS = {**sass.ROLES, "flash_bwd_control": "control"}  # part of a mangled name -> what it is called here
# the hardware keeps the first KiB of a CTA's window for itself; the storage, aligned to as much, begins behind it
SHARED_BASE = 1024

_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_CUT = re.compile(r"\d+ errors were (?:not printed|skipped)")
_BANNER = "COMPUTE-SANITIZER"
# about the process, not about a kernel
_PROCESS = re.compile(r"(?:Error: )?(?:process didn't|Target application|No attachable process)")
_SEVERITY = re.compile(r"^(?:Error|Warning|Warn|Info): ?", re.IGNORECASE)
_HAZARD = re.compile(r"Potential (WAR|RAW|WAW) hazard detected.*? at __shared__ 0x([0-9a-f]+)")
_REMARK = re.compile(r"\(([A-Za-z][^()]*)\)")  # "(Warp Level Programming)"
_BLOCK = re.compile(r"in block \((\d+), ?(\d+), ?(\d+)\)")
_ACCESS = re.compile(r"^([\w ]+?) Thread \((\d+), ?\d+, ?\d+\).*? at (.+)")
_RACE = re.compile(r"^Race reported between (\w+) access at (.+)")
_AND = re.compile(r"^and (\w+) access at (.+?)(?: \[(\d+) hazards?\])?$")
_AT = re.compile(r"^at (.+)")
_FRAME = re.compile(r"^Device Frame: ?(.+)")
_THREAD = re.compile(r"^by thread \((\d+), ?\d+, ?\d+\) in block")
_SHARED_ADDRESS = re.compile(r"\bshared address 0x([0-9a-f]+)|__shared__.*?\bAddress 0x([0-9a-f]+)", re.DOTALL)


# Where, and who


class Buffer(NamedTuple):
    """A field of the main kernel's storage, with the padding behind it: bytes [start, end) of the storage."""

    name: str
    start: int
    end: int


def list_buffers(config: BwdConfig, dtype: str) -> list[Buffer]:
    """The buffers of the main kernel, from the struct that it allocates; those without bytes are left out."""
    import cutlass

    from cute_dash import registry
    from cute_dash.kernels.flash_bwd_sm90 import FlashAttentionBackwardSm90

    kernel = FlashAttentionBackwardSm90(config, getattr(cutlass, DTYPES[dtype]), registry.load("baseline"))
    storage = kernel.shared_storage()
    starts = dict(storage._offsets)
    ends = [*list(starts.values())[1:], storage.size_in_bytes()]
    buffers = [Buffer(name, start, end) for (name, start), end in zip(starts.items(), ends, strict=True)]
    return [buffer for buffer in buffers if buffer.start < buffer.end]


def name_buffer(address: int, buffers: list[Buffer]) -> str:
    """What lies at a __shared__ address of the tool."""
    offset = address - SHARED_BASE
    found = (buffer.name for buffer in buffers if buffer.start <= offset < buffer.end)
    return next(found, f"outside the storage, 0x{address:x}")


def name_role(kernel: str, thread: int) -> str:
    """The role of a thread of the main kernel, the warp of one of the others, whose warps all do the same."""
    warp = thread // WARP_THREADS
    if kernel != "main":
        return f"warp {warp} of {kernel}"
    if warp >= WarpRole.MMA:
        return f"MMA warpgroup {(thread - WarpRole.MMA * WARP_THREADS) // WARPGROUP_THREADS}"
    return next((role.name for role in WarpRole if role == warp), "idle warp")


class Place(NamedTuple):
    """An instruction: what its kernel is called here, its address in the code, and its source line, where given."""

    kernel: str
    address: str
    source: str

    @property
    def label(self) -> str:
        """The source line, which unrolled instructions share, or the address."""
        return self.source or f"{self.kernel}{self.address and f'+{self.address}'}"


@lru_cache
def read_place(text: str) -> Place:
    """From "KERNEL+0x2920 in flash_bwd_sm90.py:581"; older tools write "0x2920 in FILE:581:KERNEL"."""
    name, _, rest = text.partition("+") if "+0x" in text else (text, "", text)
    kernel = next((called for part, called in KERNELS.items() if part in text), name)
    address = re.search(r"0x[0-9a-f]+", rest)
    source = re.search(r"([^\s/]+\.\w+:\d+)", rest)
    return Place(kernel, address[0] if address else "", source[1] if source else "")


# Records


class Access(NamedTuple):
    """What was done, by whom, and where. `does`: read or write; "" where the tool does not say."""

    does: str
    role: str
    place: str

    def __str__(self) -> str:
        return f"{self.does or 'found'} by {self.role} at {self.place}"


class Side(NamedTuple):
    """One access of a record, or the one thing that it is about."""

    place: Place
    access: Access


@dataclass
class Record:
    """One record of the tool. `count`: hazards that it stands for; `address`: a __shared__ one."""

    kind: str
    lines: list[str]
    sides: tuple[Side, ...] = ()
    address: int | None = None
    block: tuple[str, ...] | None = None
    count: int = 1
    is_summary: bool = False  # of hazards that have records of their own


def split_records(lines: Iterable[str]) -> Iterator[list[str]]:
    """The records' lines, without the prefix; the output of the program that runs under the tool is left out."""
    record: list[str] = []
    for line in lines:
        _, prefix, text = line.partition(PREFIX)
        if not prefix:
            continue
        if text.startswith("  ") and text.strip() and record:
            record.append(text.strip())
            continue
        if record:
            yield record
        record = [text.strip()] if text.strip() else []
    if record:
        yield record


def read_record(lines: list[str]) -> Record:
    """A record from its lines."""
    head = _SEVERITY.sub("", lines[0])
    for read in (_read_hazard, _read_race, _read_precise):
        if record := read(head, lines):
            record.block = next((match.groups() for line in lines if (match := _BLOCK.search(line))), None)
            return record
    return Record(UNPARSED, lines)


def _read_hazard(head: str, lines: list[str]) -> Record | None:
    hazard = _HAZARD.search(head)
    accesses = [match for line in lines[1:] if (match := _ACCESS.match(line))]
    if not hazard or len(accesses) != 2:
        return None
    sides = tuple(_make_side(does, place, int(thread)) for does, thread, place in (m.groups() for m in accesses))
    kind = " ".join([hazard[1], *(f"({remark})" for remark in _REMARK.findall(head))])
    return Record(kind, lines, sides, int(hazard[2], 16))


def _read_race(head: str, lines: list[str]) -> Record | None:
    first, others = _RACE.match(head), [match for line in lines[1:] if (match := _AND.match(line))]
    if not first or not others:
        return None
    sides = tuple(_make_side(match[1], match[2], None) for match in (first, *others))
    return Record("race", lines, sides, count=sum(int(match[3] or 1) for match in others), is_summary=True)


def _read_precise(head: str, lines: list[str]) -> Record | None:
    """Of one thread at one place: barrier errors and accesses that are not allowed."""

    def find(pattern: re.Pattern[str]) -> list[str]:
        return [match[1] for line in lines[1:] if (match := pattern.match(line))]

    places, threads = find(_AT), find(_THREAD)
    if len(places) != 1 or len(threads) != 1:
        return None
    side = _make_side("", places[0], int(threads[0]), tuple(find(_FRAME)))
    address = _SHARED_ADDRESS.search("\n".join(lines))
    kind = head.removeprefix("Barrier error detected.").strip().rstrip(".")
    return Record(kind, lines, (side,), int(address[1] or address[2], 16) if address else None)


@lru_cache(maxsize=100_000)
def _make_side(does: str, place: str, thread: int | None, frames: tuple[str, ...] = ()) -> Side:
    at, *around = (read_place(text) for text in (place, *frames))
    # a call has a kernel's name in its frames only
    kernel = next((p.kernel for p in (at, *around) if p.kernel in KERNELS.values()), at.kernel)
    role = f"a warp of {kernel}" if thread is None else name_role(kernel, thread)
    return Side(at._replace(kernel=kernel), Access(does.lower(), role, " < ".join(p.label for p in (at, *around))))


# Rows


class Key(NamedTuple):
    """What the records of a row have in common."""

    kind: str
    buffer: str  # "" where it is none of the main kernel's
    accesses: tuple[Access, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(access.role for access in self.accesses)


@dataclass
class Row:
    """Records of one kind. `lines` are those of the first."""

    key: Key
    lines: list[str]
    count: int = 0
    blocks: set[tuple[str, ...]] = field(default_factory=set)
    addresses: set[int] = field(default_factory=set)
    sides: set[tuple[Side, ...]] = field(default_factory=set)

    def add(self, record: Record) -> None:
        self.count += record.count
        self.sides.add(record.sides)
        if record.block:
            self.blocks.add(record.block)
        if record.address is not None:
            self.addresses.add(record.address)

    @property
    def places(self) -> set[frozenset[Place]]:
        """The instructions of each record, in any order."""
        return {frozenset(side.place for side in sides) for sides in self.sides}

    def describe(self) -> str:
        where = f" on {self.key.buffer}" if self.key.buffer else ""
        span = f" ({_describe_span(self.addresses)})" if self.addresses else ""
        ctas = f" in {len(self.blocks)} CTA{'s' * (len(self.blocks) != 1)}" if self.blocks else ""
        accesses = ", then ".join(map(str, self.key.accesses))
        return f"{self.count} x {self.key.kind}{where}{span}{ctas}{': ' * bool(accesses)}{accesses}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.key.kind,
            "buffer": self.key.buffer,
            "accesses": [access._asdict() for access in self.key.accesses],
            "count": self.count,
            "ctas": len(self.blocks),
            "addresses": _describe_span(self.addresses),
            "code": sorted({f"{p.kernel}+{p.address}" for places in self.places for p in places if p.address}),
            "lines": self.lines,
        }


def _describe_span(addresses: set[int]) -> str:
    ends = sorted({min(addresses), max(addresses)}) if addresses else []
    return " to ".join(f"0x{address:x}" for address in ends)


@dataclass
class Output:
    """What one process printed under the tool.

    Attributes:
        rows: every record is in one of them, but for summaries of hazards that have records of their own.
        marks: what the process announced, in order, see `announce`.
        num_records: how many were read, with those summaries.
        num_reported: how many the tool says it has printed; None: it has not come to its own summary.
        cut: that it has not printed all, in its words.
        of_process: what it says of how the process ended.
    """

    rows: list[Row]
    marks: list[str]
    num_records: int = 0
    num_reported: int | None = None
    cut: str = ""
    of_process: list[str] = field(default_factory=list)


def announce(what: str) -> None:
    """Says where the process is, in a way that `read_output` finds."""
    print(f"== {what}", flush=True)


def read_output(lines: Iterable[str], buffers: list[Buffer]) -> Output:
    """Reads what a process printed, of which the main kernel has these buffers."""
    output, rows = Output([], []), _Rows(buffers)
    for lines_of_record in split_records(_listen(lines, output.marks)):
        head = lines_of_record[0]
        if summary := _SUMMARY.match(head):
            output.num_reported = max(output.num_reported or 0, int(summary[1]))
        elif _CUT.match(head):
            output.cut = " ".join(lines_of_record)
        elif _PROCESS.match(head):
            output.of_process.append(" ".join(lines_of_record))
        elif lines_of_record != [_BANNER]:
            output.num_records += 1
            rows.add(read_record(lines_of_record))
    output.rows = rows.finish()
    return output


def _listen(lines: Iterable[str], marks: list[str]) -> Iterator[str]:
    """The lines; what was announced in them goes to `marks`."""
    for line in lines:
        if line.startswith("== "):
            marks.append(line[3:].partition(PREFIX)[0].strip())
        yield line


class _Rows:
    """Sorts records into rows as they come: there may be hundreds of thousands."""

    def __init__(self, buffers: list[Buffer]):
        self.buffers = buffers
        self.rows: dict[Key, Row] = {}
        self.summaries: list[Record] = []

    def add(self, record: Record) -> None:
        if record.is_summary:
            self.summaries.append(record)
        else:
            self._put(record)

    def finish(self) -> list[Row]:
        """The rows; a summary is among them only where some of its hazards have no records of their own."""
        seen = set[frozenset[Place]]().union(*(row.places for row in self.rows.values()))
        for summary in self.summaries:
            if not _pairs(summary) <= seen:
                self._put(summary)
        return list(self.rows.values())

    def _put(self, record: Record) -> None:
        key = _make_key(record, self.buffers)
        self.rows.setdefault(key, Row(key, record.lines)).add(record)


def _pairs(summary: Record) -> set[frozenset[Place]]:
    first, *others = summary.sides
    return {frozenset({first.place, other.place}) for other in others}


def _make_key(record: Record, buffers: list[Buffer]) -> Key:
    in_main = all(side.place.kernel == "main" for side in record.sides)
    buffer = name_buffer(record.address, buffers) if record.address is not None and in_main else ""
    # of a form that is not known, lines that differ in their numbers are of the same kind
    kind = re.sub(r"0x[0-9a-f]+|\d+", "#", f"{UNPARSED}: {record.lines[0]}") if record.kind == UNPARSED else record.kind
    return Key(kind, buffer, tuple(side.access for side in record.sides))
