"""A model of what warps of a CTA synchronise with, run in random interleavings: barriers, asynchronous copies, memory.

A task is a generator that yields what it waits for, as a function that says whether it may go on. What breaks a rule
raises `ProtocolError`: so does a standstill.
"""


class ProtocolError(Exception):
    pass


def check(condition, message):
    if not condition:
        raise ProtocolError(message)


def ready():
    """What a task waits for that others may overtake here."""
    return True


class Tasks:
    def __init__(self, rng):
        self.rng, self.tasks = rng, []

    def start(self, generator):
        """Some tasks are much slower than others."""
        self.tasks.append([generator, ready, self.rng.choice((1, 10, 300))])

    def run(self):
        """Runs all tasks to their ends, those that they start included."""
        while self.tasks:
            enabled = [task for task in self.tasks if task[1]()]
            check(enabled, "standstill")
            (task,) = self.rng.choices(enabled, [task[2] for task in enabled])
            if task[1] is not ready and self.rng.random() < 0.3:
                task[1] = ready  # the wait is over, but what follows comes later
                continue
            try:
                task[1] = next(task[0])
            except StopIteration:
                self.tasks.remove(task)


class Mbarrier:
    """Completes a phase when all have arrived and the bytes are there that they have announced."""

    def __init__(self, count):
        self.count = self.pending = count
        self.num_bytes = 0
        self.phase = 0

    def arrive(self, num_bytes=0):
        check(self.pending > 0, "an mbarrier has more arrivals than it counts")
        self.pending -= 1
        self.receive(-num_bytes)

    def receive(self, num_bytes):
        self.num_bytes += num_bytes
        if self.pending == self.num_bytes == 0:
            self.phase += 1
            self.pending = self.count

    def wait(self, parity):
        """Until the phase of this parity is over, as far as the parity of the current one can tell."""
        yield lambda: self.phase & 1 != parity


class Ring:
    """As `cute_dash.kernels.pipeline.Ring`."""

    def __init__(self, num_stages, num_consumers):
        self.num_stages = num_stages
        self.full = [Mbarrier(1) for _ in range(num_stages)]
        self.empty = [Mbarrier(num_consumers) for _ in range(num_stages)]

    def wait_full(self, it):
        return self.full[it % self.num_stages].wait(it // self.num_stages & 1)

    def wait_empty(self, it):
        return self.empty[it % self.num_stages].wait(it // self.num_stages & 1 ^ 1)

    def arrive_full(self, it, num_bytes=0):
        barrier = self.full[it % self.num_stages]
        barrier.arrive(num_bytes)
        return barrier

    def arrive_empty(self, it):
        self.empty[it % self.num_stages].arrive()


class NamedBarrier:
    def __init__(self, num_warps):
        self.num_warps, self.arrived, self.round = num_warps, set(), 0

    def arrive(self, warp):
        check(warp not in self.arrived, "a warp arrives twice in one round of a named barrier")
        self.arrived.add(warp)
        if len(self.arrived) == self.num_warps:
            self.arrived, self.round = set(), self.round + 1

    def sync(self, warp):
        before = self.round
        self.arrive(warp)
        yield lambda: self.round > before


class Buffer:
    """Shared memory that is filled by so many writes of one tag, then read so many times, before it is filled again."""

    def __init__(self, name):
        self.name, self.tag, self.num_writes, self.num_reads = name, None, 0, 0

    def begin_write(self, tag, num_writes, num_reads):
        if tag != self.tag:
            check(self.num_writes == self.num_reads == 0, f"{self.name}: {self.tag} is overwritten by {tag}")
            self.tag, self.num_writes, self.num_reads = tag, num_writes, num_reads
        check(self.num_writes > 0, f"{self.name}: {tag} is written once too often")

    def end_write(self, tag):
        check(tag == self.tag, f"{self.name}: {self.tag} and {tag} are written at once")
        self.num_writes -= 1

    def write(self, tag, num_writes, num_reads):
        self.begin_write(tag, num_writes, num_reads)
        self.end_write(tag)

    def begin_read(self, tag):
        check((self.tag, self.num_writes) == (tag, 0), f"{self.name}: {tag} is read where {self.tag} is, or is to come")

    def end_read(self, tag):
        self.begin_read(tag)
        self.num_reads -= 1


def copy_in(tasks, buffer, tag, num_writes, num_reads, barrier, num_bytes):
    """Starts one of the copies from global memory that fill a buffer."""
    buffer.begin_write(tag, num_writes, num_reads)

    def finish():
        buffer.end_write(tag)
        barrier.receive(num_bytes)
        yield ready

    tasks.start(finish())


class BulkGroup:
    """A warp's copies to global memory."""

    def __init__(self, tasks):
        self.tasks, self.num_reading, self.num_writing = tasks, 0, 0

    def copy_out(self, buffer, tag):
        buffer.begin_read(tag)
        self.num_reading += 1
        self.num_writing += 1

        def finish():
            buffer.end_read(tag)
            self.num_reading -= 1
            yield ready
            self.num_writing -= 1

        self.tasks.start(finish())

    def wait(self, read):
        """Until the copies have read shared memory, or until they are complete."""
        yield lambda: (self.num_reading if read else self.num_writing) == 0

    def check_exit(self):
        check(self.num_reading == 0, "a warp exits while its copies read shared memory")
