"""Processes that form a torch.distributed group and run functions of the tests, all of them at once."""

import contextlib
import datetime
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 120
GRACE_SECONDS = 10  # for the other ranks once one has failed: they may wait for it in a collective


class ProcessGroup:
    """`world_size` processes that live as long as this context manager: starting one takes longer than most tests.

    After a failure the processes are killed, and the next function gets new ones: a hang costs its timeout once.
    """

    def __init__(self, world_size, backend, timeout_seconds=TIMEOUT_SECONDS):
        self.world_size, self.backend, self.timeout_seconds = world_size, backend, timeout_seconds
        self._pipes, self._processes = [], []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for pipe in self._pipes:
            pipe.close()  # ends the process
        self._end_processes(seconds=10)

    def run(self, function, *args):
        """function(*args) on every rank at once; a list of the results, which are pickled, by rank.

        Raises:
            RuntimeError: with the tracebacks of ranks on which it raised, and which ranks died or did not come back.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # of a process that has died, which is found out below
                pipe.send_bytes(pickle.dumps((function, args)))
        answers, failures = self._receive()
        missing = set(range(self.world_size)) - answers.keys() - failures.keys()
        failures.update({rank: "has not answered in time; killed" for rank in missing})
        if failures:
            self._end_processes(seconds=0)  # a collective that not all of them have finished may have broken the group
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
        return [answers[rank] for rank in range(self.world_size)]

    def _receive(self):
        """The results and what went wrong, by rank; a rank that has not come back is in neither."""
        answers, failures = {}, {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        deadline = time.monotonic() + self.timeout_seconds
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answer, text = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answer, text = None, "its process has died"
                if text is None:
                    answers[rank] = answer
                else:
                    failures[rank] = text
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, failures

    def _start(self):
        context = mp.get_context("spawn")  # a forked process could not use CUDA
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            arguments = theirs, rank, self.world_size, self.backend, store, self.timeout_seconds
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _end_processes(self, seconds):
        if not self._processes:
            return
        for process in self._processes:
            process.join(seconds)
            process.kill()
            process.join(10)
        self._pipes, self._processes = [], []
        self._folder.cleanup()


def _serve(pipe, rank, world_size, backend, store, timeout_seconds):
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend, f"file://{store}", rank=rank, world_size=world_size, timeout=timeout, device_id=device
    )
    try:
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            try:
                answer = function(*args), None
            except Exception:
                answer = None, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))
    except EOFError:
        dist.destroy_process_group()
