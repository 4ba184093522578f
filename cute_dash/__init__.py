"""cute-dash: deterministic attention backward for Hopper, with pluggable accumulation schedules.

Importing this package needs neither torch nor cutlass: schedules and their analysis stay usable on any machine. The
torch API is loaded on first use.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_LAZY = {
    "flash_attn_func": "cute_dash.interface",
    "flash_attn_varlen_func": "cute_dash.interface",
    "attention_backward": "cute_dash.interface",
    "attention_varlen_backward": "cute_dash.interface",
    "register_sdpa": "cute_dash.sdpa",
    "ProblemShape": "cute_dash.problem",
    "WorkTile": "cute_dash.schedule",
    "Schedule": "cute_dash.schedule",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
