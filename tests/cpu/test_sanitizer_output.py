"""What `tests.sanitizer_output` reads from the output of compute-sanitizer; no GPU.

The forms are those of the tool's manual and of runs on an H200.
"""

import re

import pytest

from cute_dash.config import get_config
from tests.sanitizer_output import SHARED_BASE, UNPARSED, list_buffers, name_buffer, name_role, read_output, read_place

MAIN = "kernel_cutlass_kernel_cute_dashkernelsflash_bwd_sm90FlashAttentionBackwardSm90_object_at__GmemmQtensor0000_1"
PRE = "kernel_cutlass_kernel_cute_dashkernelsflash_bwd_preFlashAttentionBackwardPreprocess_object_at__PreGmem_0"
BEGIN = ["========= COMPUTE-SANITIZER", "== problem"]


@pytest.fixture(scope="module")
def buffers():
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    return list_buffers(get_config(64, False), "bfloat16")


def hazard(address, block, first, second, kind="WAR", head="Error: ", tail=()):
    """A hazard report; an access is what it does, its thread and its place."""
    lines = [f"{head}Potential {kind} hazard detected at __shared__ 0x{address:x} in block ({block},0,0) :"]
    lines += [f"    {does} Thread ({thread},0,0) at {place}" for does, thread, place in (first, second)]
    return [f"========= {line}" for line in [*lines, *tail]] + ["========="]


def barrier_error(thread, block, what="Divergent thread(s) in block.", place=f"{MAIN}+0x5590 in pipeline.py:40"):
    return [
        f"========= Barrier error detected. {what}",
        f"=========     at {place}",
        f"=========     by thread ({thread},0,0) in block ({block},0,0)",
        "=========",
    ]


def read_rows(*records, buffers=()):
    lines = [*BEGIN, *(line for record in records for line in record)]
    return read_output((line + "\n" for line in lines), list(buffers)).rows


# racecheck


def test_the_bytes_of_one_race_are_one_row(buffers):
    """The first finding of a run at head dim 64: four bytes of an int, read and written over in three CTAs."""
    read, written = ("Read", 130, f"{MAIN}+0x55c0"), ("Write", 32, f"{MAIN}+0x2920")
    records = [hazard(0x4D0 + byte, block, read, written) for block in (3, 4, 2) for byte in range(4)]
    (row,) = read_rows(*records, buffers=buffers)
    assert row.describe() == (
        "12 x WAR on sDuty (0x4d0 to 0x4d3) in 3 CTAs: "
        "read by MMA warpgroup 0 at main+0x55c0, then write by STORE_DQ_EVEN at main+0x2920"
    )
    assert row.key.roles == ("MMA warpgroup 0", "STORE_DQ_EVEN")
    assert row.lines[1] == f"Read Thread (130,0,0) at {MAIN}+0x55c0"


def test_rows_differ_by_kind_buffer_role_and_place(buffers):
    read, written = ("Read", 130, f"{MAIN}+0x55c0"), ("Write", 32, f"{MAIN}+0x2920")
    other_lane, other_role = ("Read", 255, read[2]), ("Read", 256, read[2])
    records = [
        hazard(0x4D0, 0, read, written),
        hazard(0x4D0, 0, other_lane, written),  # the same warpgroup
        hazard(0x4D0, 0, other_role, written),
        hazard(0x4D0, 0, ("Read", 130, f"{MAIN}+0x55d0"), written),
        hazard(0x29000, 0, read, written),
        hazard(0x4D0, 0, written, read, kind="RAW"),
        hazard(0x4D0, 0, read, written, head="Warning: (Warp Level Programming) "),
    ]
    rows = read_rows(*records, buffers=buffers)
    assert [row.count for row in rows] == [2, 1, 1, 1, 1, 1]
    assert [row.key.kind for row in rows] == ["WAR"] * 4 + ["RAW", "WAR (Warp Level Programming)"]
    assert rows[3].key.buffer == "sdQ" and rows[4].key.accesses[0].role == "STORE_DQ_EVEN"


def test_remarks_where_the_tool_may_have_them(buffers):
    record = hazard(0x400, 0, ("Write", 0, f"{MAIN}+0x2f0"), ("Read", 128, f"{MAIN}+0x5140"), kind="RAW")
    record[0] = record[0].replace("detected at", "detected (CUDA barrier operation) at")
    record[1] = record[1].replace("Write Thread (0,0,0) at", "Bulk copy write Thread (0,0,0) (block rank 0) at")
    (row,) = read_rows(record, buffers=buffers)
    assert (row.key.kind, row.key.buffer) == ("RAW (CUDA barrier operation)", "ring_Q")
    assert row.key.accesses[0] == ("bulk copy write", "LOAD", "main+0x2f0")


def test_instructions_of_one_source_line_are_one_row(buffers):
    """The accumulator is staged by eight stores."""
    second = ("Write", 33, f"{MAIN}+0x2920 in flash_bwd_sm90.py:581")
    records = [
        hazard(0x29000, 0, ("Write", 128, f"{MAIN}+0x{address:x} in flash_bwd_sm90.py:945"), second, kind="WAW")
        for address in range(0x5630, 0x56B0, 16)
    ]
    (row,) = read_rows(*records, buffers=buffers)
    assert row.count == 8 and row.key.accesses[0].place == "flash_bwd_sm90.py:945"
    assert row.as_dict()["code"] == ["main+0x2920", *(f"main+0x{a:x}" for a in range(0x5630, 0x56B0, 16))]


def test_values_behind_the_accesses_are_kept(buffers):
    record = hazard(
        0x4D0,
        1,
        ("Read", 130, f"{MAIN}+0x55c0"),
        ("Write", 64, f"{MAIN}+0x2920"),
        tail=["    Current Value : 0, Incoming Value : 1"],
    )
    (row,) = read_rows(record, buffers=buffers)
    assert row.lines[-1] == "Current Value : 0, Incoming Value : 1" and row.key.roles[1] == "STORE_DQ_ODD"


def test_the_analysis_of_hazards_that_are_listed_is_no_row(buffers):
    """Also where it has several partners; of one that is not listed, the row says how many hazards there were."""
    place = f"{MAIN}+0x%x"
    analysis = [
        f"========= Error: Race reported between Read access at {place % 0x10}",
        f"=========     and Write access at {place % 0x20} [4 hazards]",
        f"=========     and Write access at {place % 0x30} [8 hazards]",
        "=========",
    ]
    listed = [hazard(0x4D0, 0, ("Read", 130, place % 0x10), ("Write", 32, place % p)) for p in (0x20, 0x30)]
    assert len(read_rows(*listed, analysis, buffers=buffers)) == 2
    *_, row = read_rows(listed[0], analysis, buffers=buffers)
    assert (row.key.kind, row.count, len(row.key.accesses)) == ("race", 12, 3)
    assert row.key.accesses[0] == ("read", "a warp of main", "main+0x10")


def test_other_kernels_have_warps_and_no_buffers(buffers):
    record = hazard(0x4D0, 0, ("Write", 70, f"{PRE}+0x10"), ("Read", 3, f"{PRE}+0x20"), kind="RAW")
    (row,) = read_rows(record, buffers=buffers)
    assert row.key.buffer == "" and row.key.roles == ("warp 2 of pre", "warp 0 of pre")
    assert "(0x4d0)" in row.describe()


# synccheck and memcheck


def test_threads_of_one_barrier_error_are_one_row():
    records = [barrier_error(thread, block) for block in (0, 1) for thread in (128, 129, 200)]
    rows = read_rows(*records, barrier_error(64, 0), barrier_error(128, 0, "Missing wait."))
    assert [row.count for row in rows] == [6, 1, 1]
    assert rows[0].describe() == (
        "6 x Divergent thread(s) in block in 2 CTAs: found by MMA warpgroup 0 at pipeline.py:40"
    )
    assert rows[1].key.roles == ("STORE_DQ_ODD",) and rows[2].key.kind == "Missing wait"


def test_an_mbarrier_is_named(buffers):
    record = barrier_error(0, 0, "Missing wait.")
    record.insert(3, "=========     Barrier is located at shared address 0x458")
    (row,) = read_rows(record, buffers=buffers)
    assert row.key.buffer == "ring_work" and "ring_work (0x458)" in row.describe()


def test_a_call_is_placed_with_its_frames():
    record = barrier_error(32, 0, place="[clone kernel] outlineSync()+0x11f0 in barrier.py:42")
    record.insert(3, f"=========         Device Frame: {MAIN}+0xe40 in flash_bwd_sm90.py:60")
    (row,) = read_rows(record)
    assert row.key.accesses == (("", "STORE_DQ_EVEN", "barrier.py:42 < flash_bwd_sm90.py:60"),)


def test_other_errors_of_a_thread_keep_their_words(buffers):
    outside = [
        "========= Invalid __global__ write of size 4 bytes",
        f"=========     at {PRE}+0x90",
        "=========     by thread (1,0,0) in block (0,0,0)",
        "=========     Access at 0x7f13d7000200 is out of bounds",
    ]
    shared = [
        "========= Invalid __shared__ read of size 16 bytes",
        f"=========     at {MAIN}+0x90",
        "=========     by thread (130,0,0) in block (2,0,0)",
        "=========     Address 0x29010 is out of bounds",
    ]
    sequence = ["========= Warpgroup MMA sequence error detected. Mismatching warpgroup instruction pc", *shared[1:3]]
    rows = read_rows(outside, ["========="], shared, sequence, buffers=buffers)
    assert [row.key.kind for row in rows] == [
        "Invalid __global__ write of size 4 bytes",
        "Invalid __shared__ read of size 16 bytes",
        "Warpgroup MMA sequence error detected. Mismatching warpgroup instruction pc",
    ]
    assert [row.key.buffer for row in rows] == ["", "sdQ", ""]
    assert rows[0].lines[-1] == "Access at 0x7f13d7000200 is out of bounds"


# What is not known


@pytest.mark.parametrize(
    "record",
    [
        ["========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect."],
        ["========= Error: Something new in block (0,0,0)", "=========     with 3 details"],
        ["========= Error: Potential WAR hazard detected at __shared__ 0x4d0 in block (3,0,0) :"],
        [
            "========= Error: Potential WAR hazard detected in a new place",
            f"=========     Read Thread 5 at {MAIN}+0x10",
        ],
        ["=========", "=========     details of nothing"],
        [f"========= Error: Race reported between Write access at {MAIN}+0x10"],
        ["========= Barrier error detected. Missing wait."],
    ],
)
def test_an_unknown_form_is_a_row_with_its_lines(record):
    (row,) = read_rows(record)
    assert row.key.kind.startswith(UNPARSED) and row.count == 1
    assert row.lines == [text for line in record if (text := line.removeprefix("=========").strip())]


def test_details_behind_a_line_that_is_no_finding_are_a_row():
    (row,) = read_rows(["=========     behind the banner"])
    assert row.key.kind.startswith(UNPARSED) and row.lines[1:] == ["behind the banner"]


def test_unknown_lines_that_differ_in_numbers_are_one_row():
    first, second = read_rows(
        ["========= Deadlock of 3 threads at 0x1f"], ["========= Deadlock of 40 threads at 0x2f"], ["========= Other"]
    )
    assert (first.count, second.count) == (2, 1) and first.lines == ["Deadlock of 3 threads at 0x1f"]


# The process


def test_marks_summary_and_cut():
    lines = [*BEGIN, *barrier_error(0, 0), "== done", "========= ERROR SUMMARY: 1 error"]
    output = read_output(lines, [])
    assert (output.marks, output.num_records, output.num_reported, output.cut) == (["problem", "done"], 1, 1, "")
    output = read_output(lines[:-2], [])
    assert output.marks == ["problem"] and output.num_reported is None
    lines[-1] = "========= RACECHECK SUMMARY: 300 hazards displayed (300 errors, 0 warnings)"
    assert read_output(lines, []).num_reported == 300
    cut = "200 errors were not printed. Use --print-limit option to adjust the number of printed errors"
    output = read_output([*lines, f"========= {cut}"], [])
    assert output.cut == cut and output.num_records == 1


def test_what_is_said_of_the_process_is_no_finding():
    lines = [
        "========= Error: process didn't terminate successfully",
        "=========     The application may have hit an error when dereferencing Unified Memory from the host.",
        "========= Target application returned an error",
    ]
    output = read_output([*BEGIN, *lines], [])
    assert output.rows == [] and output.num_records == 0
    assert [text.split()[-1] for text in output.of_process] == ["host.", "error"]


def test_lines_of_the_program_are_no_findings():
    assert read_rows(["Error: Potential WAR hazard", "  at somewhere", "== another", "==== a title"]) == []


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{MAIN}+0x2920", ("main", "0x2920", "")),
        (f"{MAIN}+0x2920 in flash_bwd_sm90.py:581", ("main", "0x2920", "flash_bwd_sm90.py:581")),
        (f"{MAIN}+0x2920 in /root/cute_dash/flash_bwd_sm90.py:581", ("main", "0x2920", "flash_bwd_sm90.py:581")),
        (f"0x00000170 in ./kernels/stats.py:4:{PRE}", ("pre", "0x00000170", "stats.py:4")),
        ("void at::native::fill(int*)+0x10", ("void at::native::fill(int*)", "0x10", "")),
    ],
)
def test_places(text, expected):
    assert read_place(text) == expected


def test_roles_of_threads():
    roles = [name_role("main", thread) for thread in (0, 31, 32, 64, 96, 127, 128, 255, 256, 383)]
    assert roles == [
        *("LOAD", "LOAD", "STORE_DQ_EVEN", "STORE_DQ_ODD", "idle warp", "idle warp"),
        *("MMA warpgroup 0", "MMA warpgroup 0", "MMA warpgroup 1", "MMA warpgroup 1"),
    ]
    assert name_role("post", 64) == "warp 2 of post"


def test_buffers_of_addresses(buffers):
    """Two that were seen in a run at head dim 64, the first and the last byte, and those around them."""
    names = [name_buffer(address, buffers) for address in (0x4D0, 0x29000, 0x400, 0x400 + buffers[-1].end - 1)]
    assert names == ["sDuty", "sdQ", "ring_Q", "sdQ"]
    for address in (0x3FF, 0x400 + buffers[-1].end):
        assert re.fullmatch("outside the storage, 0x[0-9a-f]+", name_buffer(address, buffers))


def test_buffers_have_no_gaps_and_those_without_bytes_are_left_out(buffers):
    assert all(before.end == after.start for before, after in zip(buffers, buffers[1:], strict=False))
    assert {"sOnes", "sP"}.isdisjoint(buffer.name for buffer in buffers)
    with_them = {b.name for head_dim in (128, 192) for b in list_buffers(get_config(head_dim, False), "float16")}
    assert with_them >= {"sOnes", "sP", "sDuty", "sWork", "sums", "ring_KV"}
    assert SHARED_BASE == 0x29000 - next(buffer.start for buffer in buffers if buffer.name == "sdQ")
