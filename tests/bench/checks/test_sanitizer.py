"""What compute-sanitizer prints, read: findings by kernel, explained by name or errors; nothing is dropped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from bench.checks import sanitizer, sanitizer_cases
from bench.checks.sanitizer_findings import EXPLANATIONS, UNREAD, SanitizerFinding, explain, read_log
from halfbyte.kernels.cuda.sampling.sampler import CudaSampler
from tests.kernels.cuda.emulator import Emulator

# Lines of compute-sanitizer 2025.3.1 on an H200.
RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at $decode_step$_Z4feedv+0x13900
=========     and Read access at $decode_step$_Z10phase_downji+0x5d90 [1920 hazards]
=========     and Read access at $decode_step$_Z9phase_qkvILb1EEjji+0x17bc0 [5760 hazards]
=========
========= Error: Race reported between Read access at batch_product+0x4450
=========     and Write access at batch_product+0x5880 [35136 hazards]
=========     and Write access at batch_product+0x58a0 [35328 hazards]
=========
fast ran cuda.decode_step
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
UNWRITTEN = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void moe_kernel<int>(int *)+0x70
=========     by thread (3,0,0) in block (0,0,0)
=========     Address 0x7f0000000200
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void moe_kernel<int>(int *)+0x70
=========     by thread (4,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\nsampler ran cuda.sampler\n========= ERROR SUMMARY: 0 errors\n"


def test_races_are_pairs_of_places() -> None:
    errors, findings = read_log(RACE)
    assert errors == 2
    assert findings == [
        SanitizerFinding("decode_step", "race: Write in feed and Read in phase_down", 1920),
        SanitizerFinding("decode_step", "race: Write in feed and Read in phase_qkv", 5760),
        SanitizerFinding("batch_product", "race: Read and Write", 35136 + 35328),
    ]


def test_known_reports_keep_their_count_and_have_a_reason() -> None:
    row = sanitizer.judge("racecheck", "fast", RACE, 0)
    assert row["clean"]
    assert [f["count"] for f in row["findings"]] == [1920, 5760, 70464]
    assert all(len(f["reason"]) > 80 for f in row["findings"])
    result = sanitizer.result_of("racecheck", ["fast"], [row])
    assert result.figure("clean").value == 1
    assert len(result.detail["explanations"]) == 2


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("Z10phase_downji", "Z4feedv"),  # nobody explained copies that meet each other
        ("Write access at $decode_step$_Z4feedv", "Write access at $decode_step$_Z8phase_upji"),
        ("batch_product", "batch_choose"),
        ("and Write access at batch_product+0x58a0", "and Read access at other_kernel+0x58a0"),
    ],
)
def test_what_nobody_explained_is_an_error(was: str, now: str) -> None:
    log = RACE.replace(was, now)
    if "other_kernel" in now:
        log = log.replace("between Read access at batch_product", "between Write access at other_kernel")
    row = sanitizer.judge("racecheck", "fast", log, 0)
    assert not row["clean"]
    assert any("reason" not in f for f in row["findings"])


def test_another_tool_does_not_borrow_an_explanation() -> None:
    _, findings = read_log(RACE)
    assert explain("memcheck", findings)[0] == []


def test_reports_of_threads_are_counted_together() -> None:
    errors, findings = read_log(UNWRITTEN)
    assert (errors, findings) == (
        2,
        [SanitizerFinding("moe_kernel", "Uninitialized __global__ memory read of size N bytes", 2)],
    )
    assert not sanitizer.judge("initcheck", "fast", UNWRITTEN, 0)["clean"]


def test_reports_that_were_not_printed_are_findings() -> None:
    _, findings = read_log(UNWRITTEN.replace("2 errors", "9 errors"))
    assert SanitizerFinding("", UNREAD, 7) in findings


@pytest.mark.parametrize(
    ("log", "status", "outcome", "clean"),
    [
        (CLEAN, 0, "passed", True),
        (CLEAN, 1, "failed", False),
        (CLEAN, 124, "did not end", False),
        (CLEAN, sanitizer_cases.NO_KERNEL, "skipped", False),
        ("sampler ran cuda.sampler\n", 0, "passed", False),  # no summary: the sanitizer was not there
    ],
)
def test_what_is_called_clean(log: str, status: int, outcome: str, clean: bool) -> None:
    row = sanitizer.judge("memcheck", "sampler", log, status)
    assert (row["outcome"], row["clean"]) == (outcome, clean)


def test_explanations_name_what_exists() -> None:
    root = Path(__file__).parents[3]
    for e in EXPLANATIONS:
        assert all((root / name).is_file() for name in re.findall(r"tests/[\w/]+\.py", e.reason))


def test_the_cases_run() -> None:
    """On a CPU: the same driver with other kernels."""
    assert sanitizer_cases.run_plan("fast", "cpu") == ["cpu.step"]
    sampler = CudaSampler(Emulator(1), 5, 3001, torch.device("cpu"))
    sampler.cutoff_least = 700
    assert sanitizer_cases.run_sampler(sampler, "cpu") == ["cuda.sampler"]
