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
from halfbyte.lab.levels.kernel_path import MOST_DRAFTED, RULES, PathEvidence, exercise, judge, read_log, read_record
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.trace import read_trace

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


def record(
    regimes: dict[str, list[dict[str, Any]]], way: str = "eager", differences: tuple[str, ...] = ()
) -> PathEvidence:
    ways = {r: [{"way": way, "phases": phases}] for r, phases in regimes.items()}
    return PathEvidence({"record": {"regimes": ways}, "differences": list(differences)})


def failed(evidence: PathEvidence, of: Gates, traffic: tuple[str, ...] = ()) -> dict[str, str]:
    return {c.what: c.note for c in judge(of, evidence, traffic) if not c.ok}


# ---- logs and traces -------------------------------------------------------------------------------------------------


def log(tmp_path: Path, text: str) -> PathEvidence:
    path = tmp_path / "server.log"
    path.write_text(text)
    return PathEvidence(statements=read_log(path))


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
    assert not judge(Gates(), PathEvidence())  # nothing was asked for


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
    assert not failed(PathEvidence(kernels=(right, "rms_norm")), asked)
    assert failed(PathEvidence(kernels=("rms_norm",)), asked)
    if wrong:
        assert failed(PathEvidence(kernels=(right, wrong)), asked)


# Kernels of a real profile: vLLM with Marlin's experts, FlashInfer's attention, dense products of cuBLAS and CUTLASS.
PROFILE = (
    "gemvx::kernel", "cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64_32x6_tn_align8", "marlin_moe_wna16::Marlin",
    "elementwise_kernel", "CatArrayBatchedCopy", "swigluoai", "fused_add_rms_norm", "marlin_repack",
    "topkGatingSoftmax", "BatchPrefillWithPagedKVCacheKernel", "triton_red_fused_add_moe_forward_mul_rsqrt_0",
)  # fmt: skip


def test_dense_kernels_are_not_taken_for_experts() -> None:
    ran = PathEvidence(kernels=PROFILE)
    assert not failed(ran, gates(moe_kernel="marlin", attention="flashinfer"))
    for value in ("cutlass", "triton"):
        assert "must not be seen: marlin_moe" in failed(ran, gates(moe_kernel=value))[f"moe_kernel {value} ran"]
    assert failed(ran, gates(attention="triton"))
    dense = PathEvidence(kernels=tuple(k for k in PROFILE if "marlin_moe" not in k))
    for value in ("gemv", "cutlass", "triton", "marlin"):  # each of them has a dense namesake there
        assert failed(dense, gates(moe_kernel=value)) == {f"moe_kernel {value} ran": f"nothing shows {value}"}
    assert failed(PathEvidence(kernels=("marlin_moe_wna16::Marlin", "marlin_repack")), gates(linear_kernel="marlin"))
    assert not failed(PathEvidence(kernels=("marlin::Marlin<bf16>",)), gates(linear_kernel="marlin"))
    assert failed(PathEvidence(statements=("Using 'MARLIN' Mxfp4 MoE backend",)), gates(linear_kernel="marlin"))


def test_traces_of_both_kinds(tmp_path: Path) -> None:
    events = [{"cat": "kernel", "name": "marlin_moe"}, {"cat": "cpu_op", "name": "aten::mm"}]
    plain, packed, nsys = tmp_path / "t.json", tmp_path / "t.json.gz", tmp_path / "t.sqlite"
    plain.write_text(json.dumps({"traceEvents": events}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with sqlite3.connect(nsys) as db:
        db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, demangledName INTEGER, shortName INTEGER)")
        db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "marlin_moe"), (2, "not a kernel")])
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 9, ?, 2)", [(1,), (1,)])
    db.close()
    for path in (plain, packed, nsys):
        assert read_trace(path).kernels == ("marlin_moe",)
    plain.write_text("{")
    with pytest.raises(UsageError, match="neither JSON nor SQLite"):
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
    assert failed(ran, gates(attention="reference")) == {
        "attention reference ran": "nothing shows it: no kernel of it is in the record"
    }
    # The plugin's record has its own kernels alone: dense layers that none of them computed are vLLM's.
    assert not failed(record({"decode": [phase("cpu.moe", ("moe",))]}), gates(linear_kernel="vllm"))
    ours = record({"decode": [phase("cpu.linear", ("qkv", "o"))]})
    assert "ran instead" in failed(ours, gates(linear_kernel="vllm"))["linear_kernel vllm ran"]


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


def with_values(**values: Any) -> PathEvidence:
    evidence = record({"decode": [phase("cpu.step")]})
    assert evidence.record is not None
    return PathEvidence({**evidence.record, "values": values})


def speculation(proposer: str, drafted: int) -> dict[str, Any]:
    return {"proposer": proposer, "drafted": drafted, "accepted": drafted // 2}


def test_gates_that_choose_no_kernel_have_a_witness_in_the_record() -> None:
    ran = with_values(kv_dtype="bf16", sinks="on", threads=[2], speculate=speculation("NgramProposer", 8))
    assert not failed(ran, gates(kv_dtype="bf16", sinks="on", threads="2", speculate="ngram"))
    assert failed(ran, gates(kv_dtype="fp8")) == {"kv_dtype fp8 ran": "the engine had bf16"}
    assert failed(ran, gates(sinks="off")) == {"sinks off ran": "the engine had on"}
    assert failed(ran, gates(threads="1")) == {"threads 1 ran": "pools of 2 threads"}
    assert failed(ran, gates(speculate="suffix")) == {"speculate suffix ran": "ran instead: NgramProposer"}
    assert (
        "no speculation"
        in failed(with_values(speculate=speculation("", 0)), gates(speculate="ngram"))["speculate ngram ran"]
    )


def test_a_gate_without_a_witness_is_not_proven() -> None:
    idle = with_values(speculate=speculation("Eagle3Proposer", 0))
    assert failed(idle, gates(speculate="eagle3-long"))["speculate eagle3-long ran"].startswith("nothing shows")
    plugin = record({"prefill": [phase("vllm.moe")]})  # its record has no values, and no log speaks of them
    for axis, value in (("kv_dtype", "fp8"), ("speculate", "ngram"), ("tile", "64x128"), ("threads", "2")):
        (note,) = failed(plugin, gates(**{axis: value})).values()
        assert note.startswith("nothing shows"), (axis, note)
    assert plugin.record is not None
    log = PathEvidence(plugin.record, statements=("Using fp8 data type to store kv cache.",))
    assert not failed(log, gates(kv_dtype="fp8"))


@pytest.mark.parametrize(("drafts_after", "answers"), [(0, 3), (5, 5), (999, MOST_DRAFTED)])
def test_an_engine_is_asked_until_it_drafts(drafts_after: int, answers: int) -> None:
    class Counting(Asker):
        asked = 0

        def __init__(self) -> None: ...

        def ask(self, question: Question) -> Reply:
            self.asked += question.tokens > 4
            return Reply("", "length", 1, question.tokens, None)

        def metric(self, name: str) -> float:
            return float(self.asked >= drafts_after)

    asker = Counting()
    drafted = exercise(asker, gates(speculate="eagle3"))
    assert asker.asked == answers
    assert drafted == (drafts_after < MOST_DRAFTED)
    quiet = Counting()
    assert exercise(quiet, Gates()) is None
    assert quiet.asked == 0


def test_drafts_are_counted_by_metrics_and_named_by_settings(tmp_path: Path) -> None:
    """As vLLM 0.32 has them: its log repeats the settings, and says nothing of what it uses."""
    log = tmp_path / "server.log"
    settings = "speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3)"
    log.write_text(f"INFO [core.py:133] Initializing a V1 LLM engine with config: model='tiny', {settings}, seed=0\n")
    said = read_log(log)
    assert not failed(PathEvidence(statements=said, drafted=172.0), gates(speculate="ngram"))
    assert "nothing shows" in str(failed(PathEvidence(statements=said, drafted=0.0), gates(speculate="ngram")))
    assert "ran instead" in str(failed(PathEvidence(statements=said, drafted=172.0), gates(speculate="suffix")))
    other = PathEvidence(statements=("Using something",), drafted=172.0)
    assert "nothing shows" in str(failed(other, gates(speculate="ngram")))


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
