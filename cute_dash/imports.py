"""What the source of a schedule imports: whether the sources of this package and of `schedules` are all it depends on.

Host only. Sources are read, nothing is imported. In doubt the answer is no.
"""

import ast
from collections.abc import Iterator, Sequence
from importlib.util import resolve_name
from pathlib import Path

_SCHEDULES = "schedules"
# their sources or versions are in a kernel's key, or they have no say in an order and load and read nothing
_COVERED = frozenset(
    "cute_dash cutlass tvm_ffi __future__ abc collections dataclasses enum functools itertools math numbers operator "
    "typing".split()
)
_LOADING_MODULE = "cute_dash.registry"
_LOADING_NAMES = frozenset("__builtins__ __import__ compile eval exec open".split())


def depends_on_covered_sources(module: str, folders: Sequence[Path]) -> bool:
    """Whether a module of `schedules`, and what it imports of them, imports nothing that a kernel's key leaves out.

    Args:
        module: full name.
        folders: of the package `schedules`.
    """
    pending, seen = [module], set[str]()
    while pending:
        name = pending.pop()
        package = name.partition(".")[0]
        if name in seen or (package in _COVERED and name != _LOADING_MODULE):
            continue
        sources = _find_sources(name, folders)
        if package != _SCHEDULES or not sources:
            return False
        seen.add(name)
        try:
            pending += [other for path in sources for other in _read_imports(path, name, folders)]
        except (ImportError, OSError, SyntaxError, ValueError):
            return False
    return True


def _find_sources(name: str, folders: Sequence[Path]) -> list[Path]:
    """The files that a module of `schedules` can have been imported from."""
    _, *parts = name.split(".")
    candidates = [folder.joinpath(*parts, "__init__.py") for folder in folders]
    if parts:
        candidates += [folder.joinpath(*parts[:-1], f"{parts[-1]}.py") for folder in folders]
    return [path for path in candidates if path.is_file()]


def _read_imports(path: Path, name: str, folders: Sequence[Path]) -> Iterator[str]:
    """Full names of the modules that a module imports, and of the packages that they are in.

    Raises:
        ImportError: it can load or read something else.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Name) and node.id in _LOADING_NAMES:
            raise ImportError(f"{path}, line {node.lineno}: {node.id}")
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        if isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            yield from _with_parents(base)
            for alias in node.names:  # a module, or a name in the one
                member = f"{base}.{alias.name}"
                if member == _LOADING_MODULE or (member.startswith(_SCHEDULES) and _find_sources(member, folders)):
                    yield member


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
