"""A call that is kept launches the kernel Triton found for it, and asks again for arguments of another kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfbyte.kernels.triton import call as call_
from halfbyte.kernels.triton.call import Call

CUDA = torch.device("cuda", 0)


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

    def __init__(self, of: Launched) -> None:
        self.of = of
        self.module = self.function = 1_000_000 + len(of.searched)  # the driver's handles
        self.asm = {"cubin": b"binary %d" % self.module}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.of.launched.append((grid, args))


def test_a_kernel_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_, "_loaded", {})
    monkeypatch.setattr(call_, "remember_loaded", lambda image, module, function: None)
    fn = Launched()
    monkeypatch.setattr(call_, "_function", lambda module, function: fn)
    monkeypatch.setattr(call_, "target_options", lambda device: {})
    types = {"x": "*fp32", "out": "*bf16", "M": "i32:16", "eps": "fp32"}
    made = Call("rows", "any", types, {"BM": 64}, warps=2)
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
