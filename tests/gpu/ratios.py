"""Error of each gradient checked in this session, over its comparator's; the summary line names the worst."""

ERROR_RATIOS: list[float] = []
