"""A call that is kept launches the kernel Triton found for it, and asks again for arguments of another kind."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.kernels.launch import loaded_functions, loaded_modules, module_hash
from halfbyte.kernels.triton import call as call_
from halfbyte.kernels.triton.call import Loaded, TritonCall, declared_calls
from halfbyte.plan.launches import PACKING, Counts, KernelImage, state

CUDA = torch.device("cuda", 0)
HANDLES = itertools.count(1 << 40)


class Launched:
    """A function as Triton shows it, and the kernel it finds: both only note what they were given."""

    arg_names = ("x", "out", "M", "BM", "eps")

    def __init__(self) -> None:
        self.searched: list[dict[str, Any]] = []
        self.launched: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def search(**given: Any) -> Kernel:
            self.searched.append(given)
            return Kernel(self)

        return search


class Kernel:
    name = "any"

    def __init__(self, of: Launched, cubin: bytes = b"") -> None:
        self.of = of
        self.module = next(HANDLES)
        self.function = next(HANDLES)
        self.asm = {"cubin": cubin or b"build %d" % len(of.searched)}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.of.launched.append((grid, args))


def test_a_kernel_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_, "_loaded", {})
    monkeypatch.setattr(call_, "remember_loaded", lambda image, module, function: None)
    fn = Launched()
    monkeypatch.setattr(call_, "_function", lambda module, function: fn)
    monkeypatch.setattr(call_, "target_options", lambda device: {})
    types = {"x": "*fp32", "out": "*bf16", "M": "i32:16", "eps": "fp32"}
    made = TritonCall("rows", "any", types, {"BM": 64}, warps=2)
    x, out = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)

    def launch(x: torch.Tensor = x, rows: int = 32, eps: float = 1e-5) -> tuple[int, int]:
        before = len(fn.searched), len(fn.launched)
        made.launch((rows,), CUDA, x=x, out=out, eps=eps, M=rows)
        return len(fn.searched) - before[0], len(fn.launched) - before[1]

    assert launch() == (1, 0)
    assert fn.searched[0] == {"x": x, "out": out, "eps": 1e-5, "M": 32, "BM": 64, "num_warps": 2, "num_stages": 3}
    assert launch(rows=48, eps=1e-6) == (0, 1)  # the same kernel, in the order of its arguments
    grid, given = fn.launched[0]
    assert grid == (48, 1, 1)
    assert given[0] is x
    assert given[1] is out
    assert given[2:] == (48, 64, 1e-6)
    assert launch(rows=33) == (1, 0)  # no multiple of 16
    assert launch(rows=1) == (1, 0)  # a constant
    assert launch(x=torch.zeros(65)[1:]) == (1, 0)  # not aligned
    assert launch(x=torch.zeros(64, dtype=torch.int32)) == (1, 0)
    assert launch() == (0, 1)
    assert launch(rows=0) == (0, 0)


def test_launches_are_counted_by_the_binary_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of calls that nobody keeps; and another kernel behind the same call is none that Triton compiled for it."""
    fn = Launched()
    monkeypatch.setattr(call_, "_function", lambda module, function: fn)
    monkeypatch.setattr(call_, "target_options", lambda device: {})
    monkeypatch.setattr(call_, "_compiled", {})
    types = {"x": "*fp32", "out": "*fp32", "M": "i32:16", "eps": "fp32"}
    kept, x = TritonCall("rows", "any", types, {"BM": 64}, part=PACKING), torch.zeros(64)
    now, counts = state(), Counts()
    now.sink = counts
    try:
        for _ in range(3):
            kept.launch((32,), CUDA, x=x, out=x, eps=0.0, M=32)
        (loaded,) = kept.compiled.values()
        right = module_hash(b"build 1")
        assert {(i.name, i.module, part): n for (i, part), n in counts.items()} == {("any", right, PACKING): 3}
        assert loaded_modules[loaded.kernel.module] == loaded_functions[loaded.kernel.function] == right
        (declared,) = declared_calls([kept])
        assert declared.modules == {right}
        planted = Kernel(fn, b"another build")
        (key,) = kept.compiled
        kept.compiled[key] = Loaded.of(planted, PACKING)
        counts.clear()
        kept.launch((32,), CUDA, x=x, out=x, eps=0.0, M=32)
        ((image, _),) = counts
        assert isinstance(image, KernelImage)
        assert image.module == module_hash(b"another build")
        assert image.module not in declared_calls([replace(kept, warps=8)])[0].modules
    finally:
        now.sink = None
    assert Loaded.of(planted, PACKING) is Loaded.of(planted, PACKING), "hashed once"
