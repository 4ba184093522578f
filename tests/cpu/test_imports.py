"""Schedules and their analysis run where torch, numpy, cutlass and matplotlib are not installed."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
for blocked in ("torch", "numpy", "cutlass", "matplotlib"):
    sys.modules[blocked] = None  # makes `import` raise ModuleNotFoundError

import cute_dash.analysis, cute_dash.check, cute_dash.config, cute_dash.plot, cute_dash.registry
from cute_dash import ProblemShape

for name in cute_dash.registry.available():
    schedule = cute_dash.registry.load(name)
    shape = ProblemShape(1, 2, 300, 500, 64, 128, causal=name != "shift")
    cute_dash.check.check(schedule, shape)
    assert cute_dash.analysis.simulate(schedule, shape, 8, 4, 1).makespan > 0
    print(name)
"""


def test_schedules_and_analysis_need_no_dependency():
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "symmetric_shift" in result.stdout
