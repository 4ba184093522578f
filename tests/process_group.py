"""Processes that form a torch.distributed group and run functions of the tests, all of them at once."""

import datetime
import pickle
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 120


class ProcessGroup:
    """`world_size` processes that live as long as this context manager: starting one takes longer than most tests."""

    def __init__(self, world_size, backend):
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = theirs, rank, world_size, backend, str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self):
        return self

    def run(self, function, *args):
        """function(*args) on every rank at once; a list of the results, which are pickled, by rank.

        Raises:
            RuntimeError: with the tracebacks of the ranks on which it raised.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = [self._receive(rank) for rank in range(self.world_size)]
        failures = [f"rank {rank}: {text}" for rank, (result, text) in enumerate(answers) if text is not None]
        if failures:
            raise RuntimeError("\n".join(failures))
        return [result for result, _ in answers]

    def _receive(self, rank):
        if not self._pipes[rank].poll(TIMEOUT_SECONDS):
            raise TimeoutError(f"rank {rank} has not answered for {TIMEOUT_SECONDS} s")
        return pickle.loads(self._pipes[rank].recv_bytes())

    def __exit__(self, *exception):
        for pipe in self._pipes:
            pipe.close()  # ends the process
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _serve(pipe, rank, world_size, backend, store):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
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
