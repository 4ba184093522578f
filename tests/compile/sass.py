"""What ptxas made of a backward: the kernels of one build, disassembled, with their resources. Host only, no GPU.

The DSL keeps the cubin on request. `nvdisasm` comes from the PyPI package nvidia-cuda-nvdisasm (the dev extra); its
plain output holds both the instructions and, in .nv.info, the registers and the stack frame of each kernel.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from cute_dash.compile import CompileKey, build

NVDISASM_PACKAGE = "nvidia-cuda-nvdisasm"
# part of a kernel's mangled name -> what the tests call it
ROLES = {"flash_bwd_pre": "pre", "flash_bwd_sm90": "main", "flash_bwd_post": "post"}

_SECTION = re.compile(r"^\t\.section\t\.text\.(\S+?),", re.MULTILINE)
# "        /*37c0*/              @!P0 HGMMA.64x128x16.F32.BF16 R88, gdesc[UR16], RZ, !UPT ;"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# opcode, constant part of the address: "SYNCS.EXCH.64 URZ, [UR14+0x10], UR6 ;", "LDS R4, [R2+0xa0] ;"
_SHARED_ACCESS = re.compile(r"\s(SYNCS\.EXCH|STS|LDS)[\w.]* [^;\[]*\[[^;\]]*?(?:\+(0x[0-9a-f]+))?\]")
# attribute, kernel, value
_ATTRIBUTE = re.compile(r"EIATTR_(REGCOUNT|FRAME_SIZE)\n(?:.*\n){1,8}?.*index@\((\S+)\)\n.*\.word\s+(0x[0-9a-f]+)")
_HGMMA_SHAPE = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.")


@dataclass(frozen=True)
class Kernel:
    """One kernel's machine code.

    Attributes:
        opcodes: one per instruction, in order, with their modifiers, e.g. "HGMMA.64x128x16.F32.BF16".
        num_registers: per thread at launch, before setmaxnreg.
        frame_bytes: stack frame per thread, where spills and local arrays live.
        shared_accesses: opcode, without modifiers, and the constant part of the address, of initialised mbarriers and
            of what is stored to and loaded from shared memory.
    """

    opcodes: tuple[str, ...] = field(repr=False)
    num_registers: int
    frame_bytes: int
    shared_accesses: tuple[tuple[str, int], ...] = field(repr=False)

    def count(self, opcode: str) -> int:
        """How many instructions are `opcode`, in full or up to one of its dots."""
        return sum(found == opcode or found.startswith(opcode + ".") for found in self.opcodes)

    def hgmma_shapes(self) -> Counter[tuple[int, int, int]]:
        """(M, N, K) of the warpgroup MMAs, with their counts."""
        matches = (_HGMMA_SHAPE.match(opcode) for opcode in self.opcodes)
        return Counter((int(m[1]), int(m[2]), int(m[3])) for m in matches if m)


def disassemble(cubin: Path) -> dict[str, Kernel]:
    """The kernels of a cubin by mangled name."""
    command = [str(find_nvdisasm()), str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    attributes = {(kernel, attribute): int(value, 16) for attribute, kernel, value in _ATTRIBUTE.findall(text)}
    _, *parts = _SECTION.split(text)
    return {
        name: Kernel(
            tuple(_INSTRUCTION.findall(code)),
            attributes[name, "REGCOUNT"],
            attributes[name, "FRAME_SIZE"],
            tuple((opcode, int(offset or "0", 16)) for opcode, offset in _SHARED_ACCESS.findall(code)),
        )
        for name, code in zip(parts[::2], parts[1::2], strict=True)
    }


def disassemble_build(compile_with: Callable[[str], object]) -> dict[str, Kernel]:
    """The kernels, by mangled name, of whatever `compile_with` compiles when called with further compiler options."""
    with tempfile.TemporaryDirectory() as folder:
        compile_with(f"--keep-cubin --dump-dir={folder}")
        (cubin,) = Path(folder).glob("*.cubin")
        return disassemble(cubin)


@cache
def build_and_disassemble(key: CompileKey) -> dict[str, Kernel]:
    """The kernels "pre", "main" and "post" of a key; compiled once per session."""
    kernels = disassemble_build(lambda options: build(key, options))
    return {role: kernel for name, kernel in kernels.items() for part, role in ROLES.items() if part in name}


@cache
def find_nvdisasm() -> Path:
    """The disassembler of the installed package.

    Raises:
        FileNotFoundError: it is not installed, naming the package.
    """
    try:
        listed = files(NVDISASM_PACKAGE) or []
    except PackageNotFoundError:
        listed = []
    for file in listed:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return Path(file.locate())
    raise FileNotFoundError(f"nvdisasm is missing: pip install {NVDISASM_PACKAGE} (part of this project's dev extra)")
