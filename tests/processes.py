"""Programs side by side, any of which may die or get stuck: parts of the fuzz driver, problems under a sanitizer."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
POLL_S = 0.05


@dataclass(frozen=True)
class Program:
    """A command line, run in the root of the checkout.

    Attributes:
        output: where its stdout goes.
        errors: where its stderr goes; None: to that of this process.
        environment: further variables.
    """

    arguments: Sequence[str]
    output: Path
    errors: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a program ended. `status` is None if it was killed because it was stuck, negative if by another's signal."""

    status: int | None
    seconds: float


def run_all(programs: Sequence[Program], num_at_once: int, silence_s: float) -> list[Ended]:
    """Runs all, `num_at_once` of them at a time.

    Args:
        silence_s: a program whose stdout does not grow for so many seconds is stuck: it is killed with its children.

    Returns:
        How each of `programs` ended.
    """
    waiting, running, ended = deque(enumerate(programs)), dict[int, _Running](), dict[int, Ended]()
    with _note_termination() as signals:
        try:
            while waiting or running:
                while waiting and len(running) < num_at_once:
                    index, program = waiting.popleft()
                    running[index] = _Running(program)
                for index, process in list(running.items()):
                    if end := process.poll(silence_s):
                        ended[index] = end
                        del running[index]
                time.sleep(POLL_S)
                if signals:
                    sys.exit(128 + signals[0])
        finally:  # nothing may stay on the GPU when this process is interrupted
            for process in running.values():
                process.kill()
    return [ended[index] for index in range(len(programs))]


@contextlib.contextmanager
def _note_termination() -> Iterator[list[int]]:
    """Yields a list to which SIGTERM comes, where it would end the process without its `finally`.

    Nothing else happens then: `timeout` sends it twice, and the second one must not break off what the first began.
    """
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # the only one that may say what a signal does
        yield signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


class _Running:
    def __init__(self, program: Program):
        self.program, self.size = program, 0
        self.begun = self.heard = time.monotonic()
        with contextlib.ExitStack() as files:
            output = files.enter_context(program.output.open("wb"))
            errors = None if program.errors is None else files.enter_context(program.errors.open("wb"))
            # a session of its own, so that its children can be killed with it
            self.process = subprocess.Popen(
                program.arguments,
                cwd=ROOT,
                env={**os.environ, **program.environment},
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def poll(self, silence_s: float) -> Ended | None:
        """How it ended, if it has; kills it where it is stuck."""
        now, status = time.monotonic(), self.process.poll()
        if (size := self.program.output.stat().st_size) > self.size:
            self.size, self.heard = size, now
        if status is None and now - self.heard > silence_s:
            self.kill()
            return Ended(None, now - self.begun)
        return None if status is None else Ended(status, now - self.begun)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
