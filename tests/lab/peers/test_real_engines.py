"""Real engines through the protocol, not mocks: llama.cpp's server (built from PyPI's sdist) and vLLM on a CPU.

vLLM may live in an environment of its own: VLLM_TEST_PYTHON names its interpreter.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from halfbyte.lab.bench import run_bench
from halfbyte.lab.levels.correctness import Reference, find_reference
from halfbyte.lab.levels.protocol import ProtocolReport, run_levels
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.options import BenchOptions, CheckOptions, StressCounts, Works
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import TimeLimits

SMALL = StressCounts(sequential=10, together=(4, 8), prefill=1024, generation=128, load=16, at_once=4)
WORKS = Works((256,), (128,), repeats=3)
LIMITS = TimeLimits(start_s=1500.0, request_s=900.0)
# A few streams of short contexts are enough, and leave memory for others.
VLLM_FLAGS = ("--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager")
VLLM_VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def checked(engine: str, folder: Path, levels: list[str], setup: Setup) -> ProtocolReport:
    peer = engine_named(engine)
    subject = Subject(peer, peer.prepare(setup, print), folder, limits=LIMITS)
    embedded = Subject(engine_named("halfbyte"), Setup(None), folder)
    reference = find_reference(embedded)
    assert reference is not None
    Reference.read(reference)
    return run_levels(subject, levels, CheckOptions(counts=SMALL, reference=reference, works=WORKS))


def assert_passed(report: ProtocolReport) -> None:
    """Every level is a PASS, or NOT PROVEN at level 2: these engines do not score prompts, or cannot render a chat of
    the embedded model. Every check that was made holds."""
    reasons = {o.level: (o.verdict, o.reasons) for o in report.outcomes}
    verdicts = {o.level: o.verdict for o in report.outcomes}
    assert verdicts.pop("2", "NOT PROVEN") == "NOT PROVEN", json.dumps(reasons, indent=1)
    assert set(verdicts.values()) == {"PASS"}, json.dumps(reasons, indent=1)
    assert all(c.ok for r in report.results for c in r.checks)


def vllm() -> Setup:
    python = os.environ.get("VLLM_TEST_PYTHON")  # of another environment; without it vLLM is in this one
    return Setup(None, device="cpu", flags=VLLM_FLAGS, python=python, environment=VLLM_VARIABLES)


@pytest.mark.peers
@pytest.mark.slow
def test_llamacpps_own_server(tmp_path: Path) -> None:
    """The embedded model as GGUF: it starts, answers like the reference, stands, has a speed, and leaves nothing."""
    assert_passed(checked("llamacpp", tmp_path, ["1", "1.5", "2", "3", "4"], Setup(None, device="cpu")))


@pytest.mark.peers
@pytest.mark.slow
def test_the_bench_of_llamacpps_own_server() -> None:
    file = run_bench(BenchOptions(device="cpu", engine="llamacpp", prompts=(128,), tokens=(16,), concurrency=(1, 2)))
    assert [r.cell.label for r in file.results] == ["pp128", "tg16", "pp128, c=2", "tg16, c=2"]
    assert all(r.cell.engine == "llamacpp" and r.figure("speed").value > 0 for r in file.results)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_alone_on_a_cpu(tmp_path: Path) -> None:
    """On a copy of the embedded model in bf16, which has the same numbers: the same answers."""
    assert_passed(checked("vllm", tmp_path, ["1", "1.5", "2", "4"], vllm()))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_with_the_plugin_on_a_cpu(tmp_path: Path) -> None:
    assert_passed(checked("vllm+halfbyte", tmp_path, ["1", "1.5", "2"], vllm()))
