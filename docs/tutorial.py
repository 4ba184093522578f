"""Runs the code blocks of a document in order, and brings the outputs that it shows up to date.

What a block's first line says, after the three backticks:

    python file=NAME, toml file=NAME     written to NAME in the folder where everything runs
    python                               executed, each in a fresh namespace
    text, right after a python block     what that block prints
    console                              `$ cute-dash ...` lines, each followed by what it prints
    anything else                        left alone

Each block starts without the modules of the folder imported, like a new process.
"""

import contextlib
import importlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from cute_dash.cli import USAGE, main

BLOCK = re.compile(r"^```(?P<language>\w+)(?: file=(?P<file>\S+))?\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


def run(document: str, folder: Path) -> str:
    """Runs the document's blocks in `folder`; returns the document with today's outputs.

    Raises:
        RuntimeError: a command was used wrongly. What a python block raises is passed on.
    """
    pieces, end, printed = [], 0, None
    with _working_in(folder):
        for block in BLOCK.finditer(document):
            follows = not document[end : block.start()].strip()
            pieces.append(document[end : block.start("body")])
            body, printed = _run_block(block, printed if follows else None)
            pieces.append(body)
            end = block.end("body")
            pieces.append(document[end : block.end()])
            end = block.end()
    return "".join([*pieces, document[end:]])


def _run_block(block: re.Match[str], printed_before: str | None) -> tuple[str, str | None]:
    """The block's body as it is to be shown, and what it printed if it was executed."""
    language, file, body = block["language"], block["file"], block["body"]
    if file:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
        return body, None
    _forget_modules(Path.cwd())
    if language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(body, "<document>", "exec"), {"__name__": "__main__"})
        return body, out.getvalue()
    if language == "text" and printed_before:
        return printed_before, None
    if language == "console":
        commands = re.findall(r"^\$ cute-dash (.*)$", body, re.MULTILINE)
        return "\n".join(f"$ cute-dash {command}\n{_run_command(command)}" for command in commands), None
    return body, None


def _run_command(command: str) -> str:
    _forget_modules(Path.cwd())
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(shlex.split(command))
    if status == USAGE:
        raise RuntimeError(f"`cute-dash {command}`: {err.getvalue()}")
    return out.getvalue()


def _forget_modules(folder: Path) -> None:
    """Modules and files of `folder` are looked up anew."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{folder}{os.sep}"):
            del sys.modules[name]
    importlib.invalidate_caches()


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Within it, `folder` is the current one and the first in which modules are found."""
    before, path, dont_write = Path.cwd(), list(sys.path), sys.dont_write_bytecode
    # a file that is rewritten within a second would be taken for its old bytecode
    sys.dont_write_bytecode = True
    os.chdir(folder)
    folder = Path.cwd()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        sys.dont_write_bytecode = dont_write
        _forget_modules(folder)
