"""Rewrites what is generated of architecture.md: `python -m docs.make_architecture` from the root of a checkout.

Draws the CTA, the life of a work tile and the shared-memory map, and fills in the table of configurations; sizes come
from `cute_dash.config`. Needs the `plot` extra; no GPU.
"""

from collections.abc import Callable
from typing import Any

from tabulate import tabulate

from cute_dash.config import SMEM_CAPACITY_BYTES, BwdConfig, get_config
from docs import regions
from docs.figures import cta, memory, work_tile

DOCUMENT = regions.FOLDER / "architecture.md"
FIGURES: dict[str, Callable[[], Any]] = {"cta": cta.draw, "work_tile": work_tile.draw, "memory": memory.draw}


def main() -> None:
    """Draws the figures and rewrites the document."""
    with regions.repeatable_svg():
        for name, draw in FIGURES.items():
            draw().savefig(regions.FIGURES / f"{name}.svg")
    DOCUMENT.write_text(render(DOCUMENT.read_text()))


def render(document: str) -> str:
    """The document with its generated parts as they are today."""
    return regions.fill(document, "configs", describe_configs())


def describe_configs() -> str:
    """The configurations as a table, one column each."""
    configs = memory.list_configs()
    rows: list[list[str]] = [
        ["tile_m x tile_n", *(f"{c.tile_m} x {c.tile_n}" for c in configs.values())],
        ["consumer warpgroups", *(str(c.num_mma_warpgroups) for c in configs.values())],
        ["registers per thread, MMA / producer", *(_registers(c) for c in configs.values())],
        ["dQ finished by", *("last contributor" if c.fuse_dQ else "postprocess kernel" for c in configs.values())],
    ]
    parts = {label: memory.list_parts(config) for label, config in configs.items()}
    for name in next(iter(parts.values())):
        rows.append([f"`{name}`, bytes", *(f"{sizes[name]:,}" for sizes in parts.values())])
    rows.append([f"all, of {SMEM_CAPACITY_BYTES:,}", *(f"{config.smem_bytes:,}" for config in configs.values())])
    alignment = ["left", *["right"] * len(configs)]
    return tabulate(rows, ["", *configs], tablefmt="pipe", disable_numparse=True, colalign=alignment)


def _registers(config: BwdConfig) -> str:
    """Of the configuration, and of that of the full mask where they differ."""
    configs = (config, get_config(config.head_dim, False))
    return ", full mask ".join(dict.fromkeys(f"{c.num_mma_regs} / {c.num_producer_regs}" for c in configs))


if __name__ == "__main__":
    main()
