"""The shared-memory map of the main kernel's CTA, to scale, one bar per configuration."""

from typing import Any

from cute_dash.config import SMEM_CAPACITY_BYTES, TUNED_HEAD_DIMS, BwdConfig, get_config

COLORS = {
    "sQ": "#4c78a8",
    "sdO": "#72a0cf",
    "sK": "#54a24b",
    "sV": "#88c97f",
    "sdS": "#eeca3b",
    "sdQ": "#e45756",
    "sStats": "#9d9da1",
    "sOnes": "#c4c4c8",
    "barriers": "#555555",
}


def list_configs() -> dict[str, BwdConfig]:
    """The configurations by label; masks with the same tiles share one."""
    labels: dict[str, BwdConfig] = {}
    for head_dim in TUNED_HEAD_DIMS:
        full, causal = get_config(head_dim, False), get_config(head_dim, True)
        if list_parts(full) == list_parts(causal):
            labels[f"hd{head_dim}, all masks"] = causal
        else:
            labels |= {f"hd{head_dim} causal": causal, f"hd{head_dim} full": full}
    return labels


def list_parts(config: BwdConfig) -> dict[str, int]:
    """Bytes of each part of a CTA's shared memory; together `config.smem_bytes`.

    The tensors are those of `FlashAttentionBackwardSm90.shared_storage`; "barriers" is what the configuration sets
    aside for mbarriers, claims, the duty and padding.
    """
    element, fp32 = 2, 4
    q = config.num_stages * config.tile_m * config.head_dim_padded * element
    kv = config.tile_n * config.head_dim_padded * element
    parts = {
        "sQ": q,
        "sdO": q,
        "sK": kv,
        "sV": kv,
        "sdS": config.dS_size * element,
        "sdQ": config.tile_m * config.head_dim_padded * fp32,
        "sStats": config.num_stages * config.stats_size * fp32,
        "sOnes": config.ones_size * element,
    }
    return {**parts, "barriers": config.smem_bytes - sum(parts.values())}


def draw() -> Any:
    """The map as a matplotlib figure."""
    from matplotlib.figure import Figure

    configs = list_configs()
    figure = Figure(figsize=(10, 0.8 + 0.75 * len(configs)), layout="constrained")
    axes = figure.add_subplot()
    for row, config in enumerate(configs.values()):
        left = 0.0
        for name, num_bytes in list_parts(config).items():
            width = num_bytes / 1024
            axes.barh(row, width, left=left, color=COLORS[name], edgecolor="white", linewidth=0.8, height=0.62)
            if width > 7:
                label = f"{name}, at the end dK and dV" if name == "sdS" and config.prefetch_KV else name
                text = f"{label}\n{width:.0f}"
                axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=7.5, color="black")
            left += width
    capacity = SMEM_CAPACITY_BYTES / 1024
    axes.axvline(capacity, color="black", linewidth=1.2)
    axes.text(capacity - 1, len(configs) - 0.42, f"{capacity:.0f} KiB", ha="right", va="center", fontsize=8)
    labels = [f"{label}\n{config.tile_m} x {config.tile_n}" for label, config in configs.items()]
    axes.set_yticks(range(len(configs)), labels, fontsize=8)
    axes.set(xlim=(0, capacity + 2), ylim=(len(configs) - 0.25, -0.5), xlabel="KiB of shared memory")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure
