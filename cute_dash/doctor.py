"""What this machine has, and what of cute-dash does not work on it and why.

Host only. Looks at one thing at a time and imports torch and the CuTe DSL only to ask them, so that the report also
comes out where one of them is missing or broken: that is when it is needed.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import cute_dash
from cute_dash import registry
from cute_dash.compile import cache_dir

DSL_RANGE = ((4, 8, 1), (4, 9))  # as pyproject.toml requires it: lower bound included, upper bound not
SUPPORTED_CAPABILITY = (9, 0)
PEERS = {"flash-attn-4": "flash_attn.cute", "nvidia-cudnn-frontend": "cudnn"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        found: what is there, in a few words.
        limit: what does not work because of it and what to do; empty if nothing is limited.
        broken: True if cute-dash was not installed properly, False if the machine merely offers less.
    """

    subject: str
    found: str
    limit: str = ""
    broken: bool = False


def examine() -> list[Finding]:
    """Everything worth knowing about this machine, in the order of the report. Never raises."""
    torch, torch_finding = _import("torch", "torch", "Only schedules, check, analyze and plot work without it.")
    return [
        Finding("cute-dash", f"{cute_dash.__version__} in {_package_folder()}"),
        Finding("Python", f"{platform.python_version()} ({sys.executable})"),  # pip and make refuse one that is too old
        Finding("platform", platform.platform()),
        torch_finding,
        _import("numpy", "numpy", "The bench and the plots need it.")[1],
        _dsl(),
        _import("tvm_ffi", "apache-tvm-ffi", "No kernel can be launched without it.")[1]
        if _is_linux()
        else _not_linux(),
        _driver(),
        *_gpus(torch),
        _cache_folder(),
        _schedules(),
        _matplotlib(),
        *[_peer(distribution) for distribution in PEERS],
        _bench(),
    ]


def install_command(extra: str) -> str:
    """What to type to install the packages of an extra, for the Python that runs: editable where this is a checkout."""
    checkout = _package_folder().parent
    if (checkout / "pyproject.toml").exists():
        return shlex.join([sys.executable, "-m", "pip", "install", "-e", f"{checkout}[{extra}]"])
    return shlex.join([sys.executable, "-m", "pip", "install", f"cute-dash[{extra}]"])


def _package_folder() -> Path:
    return Path(cute_dash.__file__).parent


def _is_linux() -> bool:
    return sys.platform == "linux"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _import(module: str, distribution: str, without: str) -> tuple[ModuleType | None, Finding]:
    """Imports a required module; `without` says what is lost if that fails."""
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or module).split(".")[0] == module.split(".")[0]:
            limit = f"{without} Install it: pip install {distribution}"
            return None, Finding(distribution, "not installed", limit, broken=True)
        return None, _import_failure(distribution, without, error)
    except Exception as error:  # a damaged install can raise anything, and saying so is this module's purpose
        return None, _import_failure(distribution, without, error)
    return imported, Finding(distribution, str(getattr(imported, "__version__", None) or _version(distribution)))


def _import_failure(distribution: str, without: str, error: Exception) -> Finding:
    found = f"{_version(distribution)}, but importing it fails"
    return Finding(distribution, found, f"{type(error).__name__}: {error}. {without}", broken=True)


def _not_linux() -> Finding:
    return Finding("apache-tvm-ffi", "not used on this platform")


def _dsl() -> Finding:
    """The CuTe DSL: present, importable and of a tested version."""
    distribution = "nvidia-cutlass-dsl"
    without = "No kernel can be compiled: compile, bench and the op on CUDA tensors do not work; the CPU emulator does."
    if not _is_linux():
        return Finding(distribution, "not available on this platform", f"The DSL exists for Linux only. {without}")
    _, finding = _import("cutlass", distribution, without)
    if finding.broken:
        return finding
    version = _version(distribution) or finding.found
    libraries = [flavour for flavour in ("cu12", "cu13") if _version(f"{distribution}-libs-{flavour}")]
    found = f"{version}, libraries for {' and '.join(libraries) or 'no CUDA version'}"
    low, high = DSL_RANGE
    if low <= _numbers(version) < high:
        return Finding(distribution, found)
    wanted = f">={'.'.join(map(str, low))},<{'.'.join(map(str, high))}"
    limit = f"This version was not tested; the kernel may not compile. pip install 'nvidia-cutlass-dsl{wanted}'"
    return Finding(distribution, found, limit, broken=True)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "4.8.1.dev0" -> (4, 8, 1)."""
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _driver() -> Finding:
    version = _driver_version()
    if version is None:
        return Finding("NVIDIA driver", "none found")
    return Finding("NVIDIA driver", version)


def _driver_version() -> str | None:
    """The driver's version as nvidia-smi or, without it, the kernel module gives it."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done and done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    try:
        # first line: NVRM version: NVIDIA UNIX ... Kernel Module  580.1.2  date
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


_NO_KERNEL = "The kernel does not run here, and the op on CPU tensors runs the emulator (right, but slow)"


def _gpus(torch: ModuleType | None) -> list[Finding]:
    """One finding per CUDA device, or one that says why there is none."""
    if torch is None:
        return [Finding("GPU", "unknown: torch would say", "The kernel cannot be launched without torch.")]
    if torch.version.cuda is None:
        limit = f"{_NO_KERNEL}: this torch is a build without CUDA."
        return [Finding("GPU", "not visible: torch has no CUDA", limit)]
    try:
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_devices == 0:
            limit = f"{_NO_KERNEL}: torch (CUDA {torch.version.cuda}) sees no GPU, or the driver is too old for it."
            return [Finding("GPU", "none", limit)]
        return [_gpu(index, torch.cuda.get_device_properties(index)) for index in range(num_devices)]
    except Exception as error:  # the CUDA runtime reports broken drivers in many ways
        return [Finding("GPU", "not usable", f"{_NO_KERNEL}: {type(error).__name__}: {error}")]


def _gpu(index: int, properties: Any) -> Finding:
    """A finding about one device from torch's device properties."""
    capability = (properties.major, properties.minor)
    found = (
        f"{properties.name}, sm_{capability[0]}{capability[1]}, {properties.multi_processor_count} SMs, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )
    if capability == SUPPORTED_CAPABILITY:
        return Finding(f"GPU {index}", found)
    limit = f"The kernel is written for Hopper (sm_90: H100, H200, H800, GH200) and is refused on {properties.name}."
    return Finding(f"GPU {index}", found, limit)


def _cache_folder() -> Finding:
    """Where compiled kernels are kept, and whether they can be."""
    subject = "kernel cache"
    folder = cache_dir()
    if folder is None:
        return Finding(
            subject, "off", "CUTE_DASH_CACHE=0 is set: every process compiles its kernels anew (seconds each)."
        )
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return Finding(subject, f"{folder} ({len(list(folder.glob('*.o')))} kernels)")
    return Finding(
        subject, str(folder), "It cannot be written: every process compiles its kernels anew (seconds each)."
    )


def _schedules() -> Finding:
    """How many there are, and which files in their folder are none."""
    try:
        loaded, broken = registry.load_all()
    except ImportError as error:
        return Finding("schedules", "none", f"{error}.", broken=True)
    limit = f"These cannot be used: {'; '.join(broken.values())}" if broken else ""
    return Finding("schedules", f"{len(loaded)} ({', '.join(loaded)})", limit, broken=bool(broken))


def _matplotlib() -> Finding:
    version = _version("matplotlib")
    if version:
        return Finding("matplotlib", version)
    return Finding("matplotlib", "not installed", f"`cute-dash plot` does not work: {install_command('plot')}")


def _peer(distribution: str) -> Finding:
    version = _version(distribution)
    if version:
        return Finding(distribution, version)
    limit = f"`cute-dash bench` times nothing of {distribution} beside this kernel: {install_command('bench')}"
    return Finding(distribution, "not installed", limit)


def _bench() -> Finding:
    folder = _package_folder().parent / "bench"
    if folder.is_dir():
        return Finding("bench", str(folder))
    return Finding("bench", "not here", "`cute-dash bench` works in a checkout of the repository only.")
