"""Compiles backward kernels, once per key: in memory, and on disk across processes.

Host only. A key is everything that shapes the machine code: configuration, dtype, schedule (class and fields), launch
mode, debug, the sources of this package and of `schedules`, the versions of what compiles them, the architecture, and
the processor of the host.
The choice of shapes is not in it: kernels take any batch, heads, lengths and, if they are local, any window.

Only schedules whose classes come from these two packages, by imports too, are cached on disk: of others nothing tells
which sources they depend on, and a stale kernel would run another order than the one asked for. Likewise nothing is
cached on disk once a source file has changed since this process began, because what was imported may be older.

On disk an entry is `<key>.o` with its SHA-256 in `<key>.sha256`. Both are written to temporary names and renamed, the
digest last, so that readers and other writers see whole entries or none; an entry that does not match its digest or
does not load is ignored and written anew.

Environment: CUTE_DASH_CACHE_DIR moves the folder (default: $XDG_CACHE_HOME/cute-dash or ~/.cache/cute-dash),
CUTE_DASH_CACHE=0 turns the disk off, CUTE_DASH_QUIET=1 silences the progress lines on stderr. These two are 0 or 1;
other values have no effect but a warning. What is empty is not set.
"""

import hashlib
import os
import platform
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import distributions
from pathlib import Path
from types import NoneType
from typing import Any

from cute_dash.check import METHOD_ERRORS, ScheduleError, describe_failure, find_method, find_violation
from cute_dash.config import BwdConfig
from cute_dash.imports import depends_on_covered_sources
from cute_dash.naming import is_found_by_name
from cute_dash.problem import ProblemShape, Window
from cute_dash.schedule import Schedule

ARCH = "sm_90a"
DTYPES = {"bfloat16": "BFloat16", "float16": "Float16"}  # torch's name -> the DSL's
_FUNCTION = "cute_dash_backward"
_IMPORTED_AT = time.time()

CompiledBackward = Callable[..., None]


@dataclass(frozen=True)
class CompileKey:
    """What a compiled backward depends on, besides sources and versions.

    Attributes:
        dtype: "bfloat16" or "float16".
        cooperative: launched cooperatively, for schedules that need several resident CTAs.
        debug: with bounded waits and a record of the additions.
        grouped: for several query heads per KV head, any number of them.
        varlen: for sequences of different lengths; not in debug builds.
        dlse: with a gradient of the LSE; not in debug builds.
    """

    config: BwdConfig
    schedule: Schedule
    dtype: str
    cooperative: bool = False
    debug: bool = False
    grouped: bool = False
    varlen: bool = False
    dlse: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not supported; allowed: {', '.join(DTYPES)}")
        if self.varlen and (self.debug or self.cooperative):
            raise ValueError("varlen=True is not supported with debug=True or cooperative=True")
        if self.dlse and self.debug:
            raise ValueError("dlse=True is not supported with debug=True")

    def describe(self) -> str:
        flags = [name for name in ("varlen", "grouped", "dlse", "debug") if getattr(self, name)]
        return " ".join((self.schedule.name, f"hd{self.config.head_dims}", self.config.mask, self.dtype, *flags))

    def digest(self) -> str:
        """Hex digest of the key, the sources and the versions."""
        schedule = type(self.schedule)
        fields = sorted(vars(self.schedule).items())
        parts = (repr(self), schedule.__module__, schedule.__qualname__, repr(fields), _fingerprint())
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    def is_cacheable(self) -> bool:
        """Whether the digest covers all that the machine code depends on."""
        return (
            all(_is_covered(cls) for cls in type(self.schedule).__mro__)
            and all(_is_plain(value) for value in vars(self.schedule).values())
            and not _sources_changed()
        )


def _is_covered(cls: type) -> bool:
    """Whether the digest tells a class and all that its source depends on."""
    if not is_found_by_name(cls):  # others may have its name: it is made in a function, say
        return False
    module = cls.__module__
    return module in ("builtins", "typing") or depends_on_covered_sources(module, _schedule_folders())


def _is_plain(value: object) -> bool:
    """Whether the digest tells the value of a field: its repr is all of it."""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in (int, bool, float, str, NoneType)


_compiled: dict[CompileKey, CompiledBackward] = {}
_lock = threading.RLock()


def get_backward(key: CompileKey) -> CompiledBackward:
    """The compiled backward for a key: from memory, else from disk, else compiled now (seconds).

    The returned function launches the three kernels; see `kernels.backward.AttentionBackward.__call__`.

    Raises:
        ScheduleError: the schedule cannot be traced; in one line its method, and the rule that it broke.
    """
    compiled = _compiled.get(key)
    if compiled is None:
        with _lock:
            compiled = _compiled.get(key)
            if compiled is None:
                compiled = _compiled[key] = _load(key) or _compile_and_store(key)
    return compiled


def compile_backward(
    config: BwdConfig, schedule: Schedule, dtype: str = "bfloat16", *, cooperative: bool = False, grouped: bool = False
) -> CompiledBackward:
    """`get_backward` by parts; works without a GPU."""
    return get_backward(CompileKey(config, schedule, dtype, cooperative, grouped=grouped))


def cache_dir() -> Path | None:
    """Folder of the on-disk cache, or None where CUTE_DASH_CACHE=0 turns it off. Not created by this call."""
    if not _is_on("CUTE_DASH_CACHE", os.environ.get("CUTE_DASH_CACHE"), default=True):
        return None
    if folder := os.environ.get("CUTE_DASH_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute-dash"


def _is_on(name: str, value: str | None, default: bool) -> bool:
    """A switch of the environment; a value that it does not have is warned of, and the default taken."""
    if value in ("0", "1"):
        return value == "1"
    if value:
        warnings.warn(f"{name}={value!r} has no effect; allowed: 0 or 1 (default: {int(default)})", stacklevel=2)
    return default


def build(key: CompileKey, options: str = "") -> Any:
    """Compiles without any cache; `options` are further compiler options of the DSL.

    Returns:
        The DSL's compiled function, which can be called and exported.
    """
    import cutlass
    from cutlass import Float32, Int32, cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from cute_dash.kernels.backward import AttentionBackward

    dtype = getattr(cutlass, DTYPES[key.dtype])
    head_dim, head_dim_v = key.config.head_dim, key.config.head_dim_v
    batch, num_heads, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(4))
    num_heads_kv = cute.sym_int() if key.grouped else num_heads

    def strides(count: int, divisibility: int = 1) -> Any:
        return tuple(cute.sym_int(64, divisibility=divisibility) for _ in range(count))

    def token_tensor(seqlen: Any, heads: Any, head_dim: int) -> Any:
        # TMA wants 16-byte aligned strides: multiples of 8 elements
        shape: Any = (batch, seqlen, heads, head_dim)
        return make_fake_tensor(dtype, shape, (*strides(3, divisibility=8), 1), assumed_align=16)

    def debug_tensor(shape: Any, stride: Any) -> Any:
        return make_fake_tensor(Int32, shape, stride, assumed_align=4) if key.debug else None

    def cu_seqlens() -> Any:
        return make_fake_tensor(Int32, (num_cu_seqlens,), (1,), assumed_align=4) if key.varlen else None

    num_cu_seqlens = cute.sym_int()

    def row_tensor() -> Any:
        return make_fake_tensor(Float32, (batch, num_heads, seqlen_q), strides(3))

    workspace = make_fake_tensor(Float32, (cute.sym_int(64),), (1,), assumed_align=128)
    return cute.compile(
        AttentionBackward(key.config, dtype, key.schedule, key.cooperative, key.debug, key.grouped),
        token_tensor(seqlen_q, num_heads, head_dim_v),  # dO
        token_tensor(seqlen_q, num_heads, head_dim),  # Q
        token_tensor(seqlen_k, num_heads_kv, head_dim),  # K
        token_tensor(seqlen_k, num_heads_kv, head_dim_v),  # V
        token_tensor(seqlen_q, num_heads, head_dim_v),  # O
        row_tensor(),  # LSE
        token_tensor(seqlen_q, num_heads, head_dim),  # dQ
        token_tensor(seqlen_k, num_heads_kv, head_dim),  # dK
        token_tensor(seqlen_k, num_heads_kv, head_dim_v),  # dV
        workspace,
        debug_tensor((cute.sym_int(), cute.sym_int(), cute.sym_int()), (*strides(2), 1)),
        debug_tensor((8,), (1,)),
        cu_seqlens(),  # of Q
        cu_seqlens(),  # of K
        row_tensor() if key.dlse else None,  # dLSE
        Float32(1.0),  # softmax_scale
        Int32(0),  # window_left
        Int32(0),  # window_right
        Int32(1),  # num_ctas
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {ARCH} {options}".strip(),
    )


def explain_failure(error: BaseException, key: CompileKey) -> str | None:
    """One line about what the schedule did to make the DSL raise; None if the schedule did nothing.

    In the checker's words where it finds it too, on a few tiles; else the method that the error passed through.
    """
    if violation := find_small_violation(key.schedule, key.config):
        return violation
    return describe_failure(error, key.schedule) if find_method(error, key.schedule) else None


# of square problems: an odd number first, so that orders that need an even one show it
_SMALL_TILES = (5, 1, 2, 4, 8, 16, 32)


def find_small_violation(schedule: Schedule, config: BwdConfig) -> str | None:
    """The violation of the first problem of a few tiles that the schedule can order; cheap beside compiling."""
    for num_tiles in _SMALL_TILES:
        shape = make_square_shape(2, 2, num_tiles, config)
        if schedule.can_implement(shape):
            return find_violation(schedule, shape)
    return None


def make_square_shape(batch: int, num_heads: int, num_tiles: int, config: BwdConfig) -> ProblemShape:
    """Of a local configuration with a causal window of half the tokens: the kernel is the same for any."""
    seqlen = num_tiles * config.tile_n
    window = Window(left=seqlen // 2, right=0) if config.local else None
    return config.make_shape(batch, num_heads, seqlen, seqlen, window)


def _compile_and_store(key: CompileKey) -> CompiledBackward:
    start = time.monotonic()
    _progress(f"compiling {key.describe()} ...")
    try:
        compiled = build(key)
    except METHOD_ERRORS as error:  # the DSL reports what it cannot trace in many ways
        if (reason := explain_failure(error, key)) is None:
            raise
        raise ScheduleError(f"{key.describe()} cannot be compiled: {reason}") from error
    _store(key, compiled)
    _progress(f"compiled {key.describe()} in {time.monotonic() - start:.1f} s")
    return compiled  # type: ignore[no-any-return]


def _load(key: CompileKey) -> CompiledBackward | None:
    folder = cache_dir()
    if folder is None or not key.is_cacheable():
        return None
    digest = key.digest()
    try:
        expected = (folder / f"{digest}.sha256").read_text()
        contents = (folder / f"{digest}.o").read_bytes()
    except OSError:
        return None
    if hashlib.sha256(contents).hexdigest() != expected:
        return None
    try:
        return _load_object(folder / f"{digest}.o")
    except Exception as error:  # whatever the loader finds wrong with a whole file: compile anew
        _progress(f"ignoring {digest}.o in {folder}: {error}")
        return None


def _load_object(path: Path) -> CompiledBackward:
    from cutlass.cute import runtime

    _preload_runtime()
    return getattr(runtime.load_module(str(path), enable_tvm_ffi=True), _FUNCTION)  # type: ignore[no-any-return]


@lru_cache
def _preload_runtime() -> None:
    """Makes the DSL's runtime symbols global: loaded objects refer to them, and the DSL loads them privately."""
    import ctypes

    from cutlass.cute import runtime

    for library in runtime.find_runtime_libraries(enable_tvm_ffi=False):
        if Path(library).exists():
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


def _store(key: CompileKey, compiled: Any) -> None:
    folder = cache_dir()
    if folder is None or not key.is_cacheable():
        return
    digest = key.digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            target = Path(scratch) / "object"
            compiled.export_to_c(object_file_path=str(target), function_name=_FUNCTION)
            checksum = Path(scratch) / "sha256"
            checksum.write_text(hashlib.sha256(target.read_bytes()).hexdigest())
            target.replace(folder / f"{digest}.o")
            checksum.replace(folder / f"{digest}.sha256")
    except Exception as error:  # a full or read-only disk, say, costs the next process a compile, nothing else
        _progress(f"not cached in {folder}: {error}")


def _fingerprint() -> str:
    """Sources of this package and of the schedules, the versions of what compiles them, and the processor."""
    return _fingerprint_of(tuple(_packages()))  # of the folders that there are now: a process may add one


@lru_cache
def _fingerprint_of(packages: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    compilers = sorted(
        f"{distribution.name}={distribution.version}"
        for distribution in distributions()
        if (distribution.name or "").startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))
    )
    return " ".join([digest.hexdigest(), ARCH, platform.machine(), _describe_processor(), *compilers])


def _describe_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instructions that the host's processor has.

    The DSL compiles the host's part of a launch for the machine that it runs on, with AVX-512 where there is that; in a
    home directory that several kinds of machines share, others would meet instructions that they do not have.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _sources_changed() -> bool:
    """Whether a source file was written after this process imported this module."""
    return any(path.stat().st_mtime > _IMPORTED_AT for package in _packages() for path in package.rglob("*.py"))


def _packages() -> list[Path]:
    return [Path(__file__).parent, *_schedule_folders()]


def _schedule_folders() -> list[Path]:
    """Folders of `schedules`, which users may have extended by folders of their own."""
    import schedules  # only to find its files; by name, as any user of the registry would

    return list(map(Path, schedules.__path__))


def _progress(message: str) -> None:
    if not _is_on("CUTE_DASH_QUIET", os.environ.get("CUTE_DASH_QUIET"), default=False):
        print(f"cute-dash: {message}", file=sys.stderr, flush=True)
