"""The schedules that ship with cute-dash: one file each, `SCHEDULE = ...` at its end, module name = schedule name.

A schedule imports `cute_dash.schedule`, `cute_dash.problem` and `cute_dash.ints` only (`auto` and `auto_invariant` also
the schedules they choose among). `cute_dash.registry` scans this package at every call: a new file is found at once.
"""
