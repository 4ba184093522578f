"""Schedules as users get them wrong, one mistake each, and what is to be said of them."""

from typing import NamedTuple

SOURCE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cute_dash.ints import where
from cute_dash.schedule import DenseSchedule


@dataclass(frozen=True)
class Broken(DenseSchedule):
    name: ClassVar[str] = "broken"

{method}

SCHEDULE = Broken()
"""


class Mistake(NamedTuple):
    method: str  # source, with the parameters that the protocol gives it
    message: str  # a regular expression

    @property
    def source(self):
        return SOURCE.format(method="\n".join("    " + line for line in self.method.splitlines()))


LOOP = "def get_m_block(self, step, tile, shape):\n    "
LOCK = "def get_lock_value(self, m_block, tile, shape):\n    "
UNTRUE = "a traced condition has no truth value: use cute_dash.ints.where, minimum or maximum"
UNKNOWN = "a traced int is not known on the host"
NO_COMPARISON = r"gives cute_dash\.ints\.where a condition that is no comparison: write x % 2 == 1 instead of x % 2"
FIRST = "shape.get_m_block_min(tile.n_block)"
SEEN = "shape.get_n_block_min(m_block)"
# what can be seen only while tracing, the DSL's tracing included
TRACED = {
    "if": Mistake(LOOP + f"return {FIRST} + (step if step > 0 else 0)", rf"rule 4 .*Broken\.get_m_block \(.*{UNTRUE}"),
    "and": Mistake(
        LOOP + f"return {FIRST} + where(step > 0 and step > 1, step, step)",
        rf"rule 4 .*Broken\.get_m_block \(.*{UNTRUE}",
    ),
    "min": Mistake(
        LOOP + f"return min({FIRST} + step, shape.num_m_blocks)", rf"rule 4 .*Broken\.get_m_block \(.*{UNTRUE}"
    ),
    "loop": Mistake(
        LOCK + f"return sum(1 for _ in range(tile.n_block)) - {SEEN}",
        rf"rule 4 .*Broken\.get_lock_value \(.*{UNKNOWN}",
    ),
    "list": Mistake(
        LOCK + f"return list(range(99))[tile.n_block] - {SEEN}", rf"rule 4 .*Broken\.get_lock_value \(.*{UNKNOWN}"
    ),
    "raises": Mistake(LOCK + "raise RuntimeError('no')", r"rule 1 .*Broken\.get_lock_value \(.*RuntimeError: no"),
    "parameters": Mistake(
        "def get_m_block(self, step, tile):\n    return step", r"rule 1 .*Broken\.get_m_block\(\) takes 3"
    ),
    "tuple": Mistake(
        "def get_work_tile(self, work_idx, shape):\n    return tuple(super().get_work_tile(work_idx, shape))",
        r"rule 1 .*get_work_tile gives \(0, 0, 0\) of type tuple; allowed: a WorkTile",
    ),
    "float": Mistake(LOOP + f"return {FIRST} + step / 1", r"rule 1 .*get_m_block gives 0\.0 of type float at step 0"),
}
MISTAKES = TRACED | {
    "negative %": Mistake(
        LOOP + f"return {FIRST} + (step - shape.num_m_blocks * 4) % (shape.num_m_blocks - {FIRST})",
        r"rule 4 .*Broken\.get_m_block \(.*`%` truncates on the device.*use cute_dash\.ints\.wrap",
    ),
    "None": Mistake(LOCK + "pass", r"rule 1 .*get_lock_value gives None; allowed: ints in \[0, 1\)"),
    "numpy": Mistake(
        LOCK + f"return np.int64(tile.n_block - {SEEN})",
        r"rule 1 .*get_lock_value gives .*0.* of type numpy.int64; allowed: ints",
    ),
    "bool": Mistake(
        "def get_num_steps(self, tile, shape):\n    return True", r"rule 1 .*get_num_steps gives True of type bool, but"
    ),
    "no CTA": Mistake(
        "def min_resident_ctas(self, shape):\n    return 0", r"rule 2 .*min_resident_ctas is 0; it must be"
    ),
    "can_implement": Mistake(
        "def can_implement(self, shape):\n    pass", r"broken: can_implement gives None; allowed: True or False"
    ),
    "can_implement raises": Mistake(
        "def can_implement(self, shape):\n    return {}['x']", r"broken: Broken\.can_implement \(.*KeyError: 'x'"
    ),
    "an int is no condition": Mistake(
        LOCK + f"return where(tile.n_block % 2, tile.n_block, tile.n_block) - {SEEN}",
        rf"rule 4 .*Broken\.get_lock_value \(.*{NO_COMPARISON}",
    ),
    "~ of a bool is no condition": Mistake(
        LOOP + f"return {FIRST} + where(~(step < 0), step, 0)", rf"rule 4 .*Broken\.get_m_block \(.*{NO_COMPARISON}"
    ),
    "no m_block": Mistake(LOOP + "pass", r"rule 1 .*get_m_block gives None at step 0; the mask leaves it ints in"),
    "a generator of m_blocks": Mistake(
        LOOP + f"yield {FIRST} + step", r"rule 1 .*get_m_block gives <generator .*> of type generator at step 0"
    ),
    "no window": Mistake(
        "def get_window(self, shape):\n    return 0", r"rule 1 .*get_window gives 0; allowed: ints of at least 1"
    ),
    "no group": Mistake(
        "def get_heads_per_group(self, shape):\n    return 0", r"rule 1 .*get_heads_per_group gives 0; allowed: ints"
    ),
    "exit": Mistake(LOCK + "exit(3)", r"rule 1 .*Broken\.get_lock_value \(.*raised SystemExit: 3"),
    "can_implement exits": Mistake(
        "def can_implement(self, shape):\n    exit(0)", r"broken: Broken\.can_implement \(.*raised SystemExit: 0"
    ),
    "name": Mistake("name = 3", r"rule 3 .*Broken\.name is 3; allowed: str"),
    "taken name": Mistake("name = 'baseline'", r"calls itself 'baseline', which schedules/baseline\.py is"),
    "not frozen": Mistake(
        "def __setattr__(self, name, value):\n    pass", r"Cannot overwrite attribute __setattr__ .*broken_schedule\.py"
    ),
}
