"""Level 1.5's judgement: what a record, a log or a trace must show for a gate, and must not."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import UsageError
from halfbyte.gates import Gates, parse
from halfbyte.lab.levels.kernel_path import RULES, Evidence, judge, read_log, read_record, read_trace

ALL = ("embed", "qkv", "attention", "o", "moe", "lm_head")


def gates(**flags: str) -> Gates:
    return parse(flags, env={})


def phase(name: str, covers: tuple[str, ...] = ALL, activation: str = "bf16", **more: Any) -> dict[str, Any]:
    formats = more.pop("formats", {"qkv": "bf16", "gate_up": "mxfp4", "down": "mxfp4", "lm_head": "bf16"})
    kernels = [{"name": more.pop("kernel", f"{name}_kernel"), "launches": 1}]
    return {
        "phase": name,
        "covers": list(covers),
        "activation": activation,
        "formats": formats,
        "kernels": kernels,
    } | more


def record(regimes: dict[str, list[dict[str, Any]]], way: str = "eager", differences: tuple[str, ...] = ()) -> Evidence:
    ways = {r: [{"way": way, "phases": phases}] for r, phases in regimes.items()}
    return Evidence({"record": {"regimes": ways}, "differences": list(differences)})


def failed(evidence: Evidence, of: Gates, traffic: tuple[str, ...] = ()) -> dict[str, str]:
    return {c.what: c.note for c in judge(of, evidence, traffic) if not c.ok}


# ---- logs and traces -------------------------------------------------------------------------------------------------


def log(tmp_path: Path, text: str) -> Evidence:
    path = tmp_path / "server.log"
    path.write_text(text)
    return Evidence(statements=read_log(path))


VLLM_MARLIN = """
INFO 11-16 [oracle.py:201] Using 'MARLIN' Mxfp4 MoE backend out of potential backends: ['CUTLASS', 'TRITON', 'MARLIN'].
INFO 11-16 [cuda.py:300] Using TRITON_ATTN attention backend out of potential backends: ('FLASHINFER', 'TRITON_ATTN')
INFO 11-16 [gpu.py:12] Capturing CUDA graphs (mixed prefill-decode)
"""


def test_a_log_is_believed_in_what_it_uses_and_not_in_what_it_could(tmp_path: Path) -> None:
    evidence = log(tmp_path, VLLM_MARLIN)
    assert not failed(evidence, gates(moe_kernel="marlin", attention="triton"))
    assert failed(evidence, gates(moe_kernel="cutlass")) == {
        "moe_kernel cutlass ran": "must not be seen: INFO 11-16 [oracle.py:201] Using 'MARLIN' Mxfp4 MoE backend"
    }
    assert "must not be seen" in failed(evidence, gates(attention="flashinfer"))["attention flashinfer ran"]
    assert "must not be seen" in failed(evidence, gates(graphs="off"))["graphs off ran"]


def test_the_cache_that_llamacpps_log_tells_of(tmp_path: Path) -> None:
    """Lines of the real server, started with `-ctk bf16 -ctv bf16 -lv 4`."""
    line = "0.01.564.432 I llama_kv_cache: size =    8.00 MiB (  2048 cells,   4 layers,  2/2 seqs), K ({}):    4.00 MiB, V ({}):    4.00 MiB"  # noqa: E501
    evidence = log(tmp_path, "\n".join([line.format("bf16", "bf16"), "I llama_kv_cache: attn_rot_k = 0"]))
    assert not failed(evidence, gates(kv_dtype="bf16"))
    assert "must not be seen" in failed(evidence, gates(kv_dtype="f32"))["kv_dtype f32 ran"]
    mixed = log(tmp_path, "\n".join([line.format("f32", "f32"), line.format("f32", "f16")]))
    assert failed(mixed, gates(kv_dtype="f32"))


def test_a_gate_that_nothing_speaks_of_is_not_proven(tmp_path: Path) -> None:
    evidence = log(tmp_path, "Using 'MARLIN' Mxfp4 MoE backend\n")
    assert failed(evidence, gates(activation="mxfp8")) == {"activation mxfp8 ran": "nothing shows mxfp8"}
    assert "no rule" in failed(evidence, gates(activation="int8"))["activation int8 ran"]
    assert failed(log(tmp_path, "hello\n"), gates(moe_kernel="marlin"))  # a log that says nothing at all
    assert not judge(Gates(), Evidence())  # nothing was asked for


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        ("marlin", "marlin_moe_wna16::Marlin<...>", "cutlass::gemm::device_kernel<moe>"),
        ("cutlass", "cutlass_sm120_grouped_gemm_mxfp4", "marlin_moe_wna16"),
        ("triton", "_matmul_ogs_NNT_bf16xbf16xmxfp4", "marlin_moe_wna16"),
        ("gemv", "gemv_fp4_dp4a_kernel", ""),
    ],
)
def test_the_seeds_table_of_kernels(value: str, right: str, wrong: str) -> None:
    asked = gates(moe_kernel=value)
    assert not failed(Evidence(kernels=(right, "rms_norm")), asked)
    assert failed(Evidence(kernels=("rms_norm",)), asked)
    if wrong:
        assert failed(Evidence(kernels=(right, wrong)), asked)


def test_traces_of_both_kinds(tmp_path: Path) -> None:
    events = [{"cat": "kernel", "name": "marlin_moe"}, {"cat": "cpu_op", "name": "aten::mm"}]
    plain, packed, nsys = tmp_path / "t.json", tmp_path / "t.json.gz", tmp_path / "t.sqlite"
    plain.write_text(json.dumps({"traceEvents": events}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with sqlite3.connect(nsys) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (demangledName INTEGER)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "marlin_moe"), (2, "not a kernel")])
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?)", [(1,), (1,)])
    db.close()
    for path in (plain, packed, nsys):
        assert read_trace(path) == ("marlin_moe",)
    plain.write_text("{")
    with pytest.raises(UsageError, match="neither torch's trace"):
        read_trace(plain)


def test_every_rule_is_of_a_gate() -> None:
    for rule in RULES:
        assert rule.must or rule.must_not
        gates(**{rule.axis: rule.value})  # raises where the gate has no such value


# ---- our own record --------------------------------------------------------------------------------------------------


def test_a_record_is_held_against_every_gate() -> None:
    ran = record(
        {"decode": [phase("reference.moe", ("moe",), "f32")], "prefill": [phase("reference.moe", ("moe",), "f32")]}
    )
    assert not failed(ran, gates(moe_kernel="reference", activation="f32"), ("decode", "prefill"))
    assert failed(ran, gates(moe_kernel="triton")) == {
        "moe_kernel triton ran": "ran instead: reference.moe (decode), reference.moe (prefill)"
    }
    assert "took f32" in failed(ran, gates(activation="prefill=mxfp8"))["activation prefill=mxfp8 ran"]
    assert not failed(ran, gates(moe_kernel="prefill=reference"))
    assert failed(ran, Gates(), ("batch",)) == {"something ran in batch": ""}
    assert failed(ran, gates(attention="reference"))  # nothing that attends is on record


def test_formats_instructions_and_graphs_of_a_record() -> None:
    q8 = {"qkv": "q8", "o": "bf16", "lm_head": "bf16", "gate_up": "mxfp4", "down": "mxfp4"}
    ran = record({"decode": [phase("cpu.step", formats=q8, kernel="halfbyte_cpu.avx2: hb_run")]})
    assert not failed(ran, gates(layers="qkv=q8"))
    assert failed(ran, gates(layers="qkv=q8,o=q8")) == {"layers qkv=q8,o=q8 ran": "o (decode) was bf16"}
    assert not failed(ran, gates(cpu_instructions="avx2"))
    assert failed(ran, gates(cpu_instructions="avx512")) == {"instructions avx512 ran": "halfbyte_cpu.avx2: hb_run"}
    assert not failed(ran, gates(graphs="off"))
    replayed = record({"decode": [phase("cuda.decode_step")]}, way="graph of 1 rows")
    assert failed(replayed, gates(graphs="off")) == {"no graph was replayed": "graph of 1 rows"}


def test_a_difference_fails_whatever_was_asked() -> None:
    ran = record({"decode": [phase("cpu.step")]}, differences=("cpu.step (decode): launched another build",))
    assert "another build" in failed(ran, Gates())["the chosen kernels ran"]
    assert failed(record({}), Gates())  # nothing ran


def test_a_phase_of_the_plugin_says_itself_what_it_answers_to() -> None:
    theirs = phase("vllm.moe", ("moe",), answers={"moe": "marlin"})
    assert not failed(record({"decode": [theirs]}), gates(moe_kernel="marlin"))
    assert failed(record({"decode": [theirs]}), gates(moe_kernel="cutlass"))


def test_a_file_that_is_no_record(tmp_path: Path) -> None:
    assert read_record(None) is None
    assert read_record(tmp_path / "none.json") is None
    path = tmp_path / "kernels.json"
    for text in ("{", "[]", '{"record": {}}'):
        path.write_text(text)
        with pytest.raises(UsageError, match="no record of kernels"):
            read_record(path)
