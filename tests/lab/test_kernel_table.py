"""One table of kernel categories from three sources: a profile of ours, a torch trace, an nsys export.

Two torch traces were made on a CPU (traces/README.md), one of them of vLLM; the profile is the H200's receipt. The nsys
export and the trace of a GPU are composed here, from the documented tables and fields, and say so.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.errors import UsageError
from halfbyte.lab import kernel_table
from halfbyte.lab.kernel_table import (
    CATEGORIES,
    KernelTable,
    from_profile,
    own_time,
    read_table,
    table_of,
)
from halfbyte.lab.receipts import RESULTS
from halfbyte.lab.trace import Interval, Trace

TRACES = Path(__file__).parent / "traces"
KERNELS = [
    ("void marlin_moe_wna16::Marlin<__nv_bfloat16>(int)", 0, 40),
    ("void cutlass::device_kernel<GemmUniversal>(Params)", 40, 70),
    ("flash_fwd_splitkv_kernel", 75, 85),
    ("triton_red_fused_rms_norm_0", 85, 90),
    ("mxfp8_quantize_kernel", 90, 94),
    ("Memcpy DtoD (Device -> Device)", 94, 96),
    ("_topk_topp_sample", 96, 100),
]


def us(table: KernelTable) -> dict[str, float]:
    return {row.category: row.us for row in table.rows}


def expect(table: KernelTable) -> None:
    assert us(table) == pytest.approx(
        {"MoE": 40, "dense": 30, "attention": 10, "norm": 5, "quantise": 4, "move": 2, "other": 4}
    )
    assert (table.busy_us, table.idle_us, table.gaps, table.longest_gap_us) == pytest.approx((95, 5, 1, 5))
    assert sum(row.share for row in table.rows) == pytest.approx(0.95)


def torch_trace() -> dict[str, Any]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "engine"}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 7, "ts": 70, "dur": 4},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 1, "tid": 7, "ts": 80, "dur": 20},
        {"ph": "i", "name": "a mark", "ts": 3},
    ]
    for name, start, end in KERNELS:
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        events.append({"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "pid": 0, "tid": 3})
    return {"traceEvents": events, "composed": "by a test, in torch's format"}


def nsys_export(path: Path) -> Path:
    with sqlite3.connect(path) as db:
        db.execute("create table COMPOSED (why text)")
        db.execute("insert into COMPOSED values ('by a test, in the tables that nsys exports')")
        db.execute("create table StringIds (id integer, value text)")
        db.execute("create table ThreadNames (nameId integer, globalTid integer)")
        db.execute("create table CUPTI_ACTIVITY_KIND_KERNEL (start, end, demangledName integer, shortName integer)")
        db.execute("create table CUPTI_ACTIVITY_KIND_MEMCPY (start, end, bytes)")
        db.execute("create table CUPTI_ACTIVITY_KIND_RUNTIME (start, end, nameId, globalTid)")
        for i, (name, start, end) in enumerate(KERNELS):
            if name.startswith("Memcpy"):
                db.execute("insert into CUPTI_ACTIVITY_KIND_MEMCPY values (?, ?, 1)", (start * 1000, end * 1000))
            else:
                db.execute("insert into StringIds values (?, ?)", (i, name))
                db.execute(
                    "insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, ?, ?)", (start * 1000, end * 1000, i, i)
                )
        db.executemany("insert into StringIds values (?, ?)", [(90, "engine"), (91, "cudaLaunchKernel"), (92, "poll")])
        db.execute("insert into ThreadNames values (90, 5)")
        db.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (70000, 74000, 91, 5)")
        db.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (80000, 100000, 92, 5)")
    db.close()
    return path


def test_a_torch_trace_and_an_nsys_export_give_the_same_table(tmp_path: Path) -> None:
    plain = tmp_path / "t.json"
    plain.write_text(json.dumps(torch_trace()))
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed, nsys_export(tmp_path / "n.sqlite")):
        table = read_table(path)
        expect(table)
        assert "Composed" in table.note
        (thread,) = table.threads
        assert (thread.name, thread.busy_us, thread.waiting_us, thread.while_idle_us) == ("engine", 24, 20, 4)


def test_kernels_that_overlap_count_once() -> None:
    overlapping = Trace(device=[Interval("gemm_a", 0, 10), Interval("moe_b", 5, 12), Interval("norm_c", 6, 8)])
    table = table_of(overlapping, "x")
    assert us(table) == {"MoE": 2.0, "dense": 10.0, "norm": 0.0}
    assert table.busy_us == 12


def test_own_time_leaves_out_what_was_called() -> None:
    calls = [Interval("outer", 0, 10), Interval("inner", 2, 5), Interval("innermost", 3, 4), Interval("next", 12, 13)]
    pieces = [(i.name, i.start, i.end) for i in own_time(calls)]
    assert pieces == [
        ("outer", 0, 2), ("inner", 2, 3), ("innermost", 3, 4), ("inner", 4, 5), ("outer", 5, 10), ("next", 12, 13),
    ]  # fmt: skip


def test_a_real_trace_of_torch_on_a_cpu() -> None:
    table = read_table(TRACES / "torch-cpu-attention-block.json.gz")
    found = us(table)
    assert found["dense"] > 0
    assert found["attention"] > 0
    assert found["norm"] > 0
    assert set(found) <= set(CATEGORIES)
    assert "No kernels" in table.note
    assert "Composed" not in table.note
    assert table.busy_us + table.idle_us == pytest.approx(sum(found.values()) + table.idle_us, rel=1e-3)
    assert len(table.threads) >= 1


def test_a_real_trace_of_vllm_on_a_cpu() -> None:
    """What lies between its operators is Python, and no operator of any kind."""
    table = read_table(TRACES / "vllm-cpu-decode-step.json.gz")
    found = us(table)
    kernels = {row.category: " ".join(row.kernels) for row in table.rows}
    assert "cpu_fused_moe" in kernels["MoE"]
    assert "onednn_mm" in kernels["dense"]
    assert "unified_attention_with_output" in kernels["attention"]
    assert "unified_kv_cache_update" in kernels["attention"]
    assert not any("execute_context" in names for names in kernels.values())
    assert table.busy_us + table.idle_us == pytest.approx(6115, rel=0.01)
    assert table.idle_us == pytest.approx(3228, rel=0.01)
    (thread,) = table.threads
    assert thread.while_idle_us == pytest.approx(table.idle_us, rel=0.01)
    assert max(found, key=lambda c: found[c] if c != "other" else 0.0) == "MoE"


def test_a_real_profile_of_an_h200() -> None:
    file = json.loads((RESULTS / "profile.json").read_text(encoding="utf-8"))
    table = from_profile(file["results"][0]["detail"])
    found = us(table)
    assert found["MoE"] > found["attention"] > 0
    assert sum(row.share for row in table.rows) == pytest.approx(1.0, abs=0.05)
    assert table.threads


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("_p_matmul_ogs_NNT_bf16xbf16xmxfp4", "MoE"), ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "dense"),
        ("void vllm::reshape_and_cache_flash_kernel", "attention"), ("fused_add_rms_norm_kernel", "norm"),
        ("aten::mm", "dense"), ("aten::copy_", "move"), ("vectorized_elementwise_kernel", "other"),
        ("topkGatingSoftmax", "MoE"), ("scaled_fp8_quant_kernel", "quantise"), ("mul_mat_vec_q_moe", "MoE"),
    ],
)  # fmt: skip
def test_names_of_kernels(name: str, category: str) -> None:
    assert kernel_table.category_of(name) == category


def test_what_is_no_trace_is_one_sentence(tmp_path: Path) -> None:
    for name, data in (("a", b"hello"), ("b", b"[]"), ("c", b'{"x": 1}'), ("d", b"SQLite format 3\x00 and no more")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError):
            read_table(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be read"):
        read_table(tmp_path / "nothing")


def test_the_command_shows_it(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(torch_trace()))
    said = CliRunner().invoke(app, ["profile", "--trace", str(tmp_path / "t.json")])
    assert said.exit_code == 0, said.output
    assert "attention" in said.stdout
    assert "Composed" in said.stdout
    as_json = CliRunner().invoke(app, ["profile", "--trace", str(tmp_path / "t.json"), "--json"])
    assert json.loads(as_json.stdout)["rows"][0]["category"] == "MoE"
