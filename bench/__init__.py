"""Benchmarks of the attention backward call: ours under every schedule, beside flash-attn-4 and cuDNN.

Run as `python -m bench` from the checkout. The reports (`--table`, `--compare`, `--paper`, `--model`) read recorded
results and need no GPU; importing this package needs neither torch nor cutlass.

    cells            what is timed: shapes, FLOPs, bytes, floor
    implementations  who is timed: our schedules and the peers
    reference        fp64 gradients of some streams, and the error budget
    gate             no number before right gradients and equal bits
    timing           burst and sustained regimes on any clock
    device           the CUDA side: inputs, clock, ceilings, environment
    results          the JSON file
    runner           the run over all cells
    report           tables from a results file
    model_vs_measured  the DAG model's prediction beside the measurement
"""
