"""The reproducibility record says what is compiled already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfbyte.cli.app import app


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
