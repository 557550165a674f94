"""The reproducibility record says what is compiled already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte import installed
from halfbyte.cli.app import app
from halfbyte.lab import environment
from halfbyte.lab.result import ResultFile


def test_the_kernel_cache_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    empty = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)["kernel_cache"]
    assert empty["cuda"] == {"folder": str(tmp_path / "cubin"), "kernels": 0, "bytes": 0}
    (tmp_path / "cubin").mkdir()
    (tmp_path / "cubin" / "a-sm_90a-0.cubin").write_bytes(b"12345")
    (tmp_path / "triton" / "x").mkdir(parents=True)
    (tmp_path / "triton" / "x" / "k.cubin").write_bytes(b"123")
    (tmp_path / "triton" / "x" / "k.ptx").write_bytes(b"1")
    full = json.loads(CliRunner().invoke(app, ["env", "--json"]).stdout)["kernel_cache"]
    assert (full["cuda"]["kernels"], full["cuda"]["bytes"]) == (1, 5)
    assert (full["triton"]["kernels"], full["triton"]["bytes"]) == (1, 3)


def test_every_entry_that_a_result_needs_is_there() -> None:
    record = environment.collect()
    assert record["schema"] == environment.SCHEMA
    assert {"commit", "container", "cpu", "cores", "host", "packages", "installed", "imports", "variables", "gpus",
            "driver", "use"} <= set(record)  # fmt: skip
    assert record["use"]["peak_memory_bytes"] > 1 << 20
    assert record["imports"]["halfbyte"]["path"] == "<checkout>/src/halfbyte"
    assert "probes_failed" not in record
    json.dumps(record, allow_nan=False)


def test_a_probe_that_fails_costs_its_own_entry_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("the driver is gone")

    for name in ("gpus", "container", "use", "commit", "cpu_name"):
        monkeypatch.setattr(environment, name, broken)
    record = environment.collect()
    assert record["gpus"] is None
    assert set(record["probes_failed"]) == {"gpus", "container", "use", "commit", "cpu"}
    assert "the driver is gone" in record["probes_failed"]["gpus"]
    assert record["python"]
    assert ResultFile("t", (), record, {}, ()).gpu == ""


def test_a_copy_that_is_hidden_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("first", "second"):
        (tmp_path / where / "flashinfer").mkdir(parents=True)
        (tmp_path / where / "flashinfer" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "second")
    monkeypatch.syspath_prepend(tmp_path / "first")
    found = installed.imports()["flashinfer"]
    assert found["path"].endswith("first/flashinfer")
    assert any(path.endswith("second/flashinfer") for path in found["shadows"])


def test_keys_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("MY_OWN", "x")
    found = environment.variables()
    assert found["VLLM_USE_V1"] == "1"
    assert "VLLM_API_KEY" not in found
    assert "MY_OWN" not in found
