"""Real engines through the protocol, not mocks: llama.cpp's server (built from PyPI's sdist) and vLLM on a CPU.

vLLM may live in an environment of its own: VLLM_TEST_PYTHON names its interpreter.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from halfbyte.lab.levels.answers import Reference, find_reference
from halfbyte.lab.levels.protocol import CheckOptions, Report, run_levels
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.under_load import Counts
from halfbyte.lab.peers.engines import engine_named
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import Limits

SMALL = Counts(sequential=10, together=(4, 8), prefill=1024, generation=128, load=16, at_once=4)
LIMITS = Limits(start_s=1500.0, request_s=900.0)


def checked(engine: str, folder: Path, levels: list[str], setup: Setup) -> Report:
    peer = engine_named(engine)
    subject = Subject(peer, peer.prepare(setup, print), folder, limits=LIMITS)
    embedded = Subject(engine_named("halfbyte"), Setup(None), folder)
    reference = find_reference(embedded)
    assert reference is not None
    Reference.read(reference)
    return run_levels(subject, levels, CheckOptions(SMALL, reference=reference))


def assert_passed(report: Report) -> None:
    said = {o.level: (o.verdict, o.reasons) for o in report.outcomes}
    assert report.ok, json.dumps(said, indent=1)


@pytest.mark.peers
@pytest.mark.slow
def test_llamacpps_own_server(tmp_path: Path) -> None:
    """The embedded model as GGUF: it starts, answers like the reference, stands, and leaves nothing."""
    assert_passed(checked("llamacpp", tmp_path, ["1", "2", "3", "4"], Setup(None, device="cpu")))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_with_the_plugin_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    python = os.environ.get("VLLM_TEST_PYTHON")  # of another environment; without it vLLM is in this one
    flags = ("--max-model-len", "4096", "--max-num-seqs", "8", "--enforce-eager")
    assert_passed(checked("vllm+halfbyte", tmp_path, ["1", "1.5", "2"], Setup(None, flags=flags, python=python)))
