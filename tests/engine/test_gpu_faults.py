"""An engine's process on a GPU that fails or is shared: a kernel that traps, a second engine, a hog of bandwidth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte import gates
from halfbyte.engine.batch import Batch
from halfbyte.engine.build import core_for
from halfbyte.engine.engine import EngineCore
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import Request, SamplingParams, SourceInfo
from halfbyte.engine.runner import StepHandle
from halfbyte.errors import EngineDiedError
from halfbyte.model import load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BUILD = "test_gpu_faults:build"
TRAP = 77  # a token
STOP = """
extern "C" __global__ void stop(unsigned* failure) {
  failure[0] = 0x999u; failure[1] = 3u << 16 | 7u;
  __threadfence_system();
  asm volatile("trap;");
}
"""


def build(settings: dict[str, Any], report: Callable[[str], None]) -> tuple[EngineCore, SourceInfo]:
    """Runs in the engine's process: the embedded model in the kernels' shape; some tokens are fatal."""
    from bench.padded_model import load_padded

    g = gates.parse({}, env={}, preset="fast")
    options = EngineOptions(gates=g, max_context=1024, kv_gib=0.25, reserve_gib=0.0)
    core, info, _ = core_for(load_padded(g, "cuda"), load.tokenizer_of(load.resolve_model(None)), options)
    launch = core.runner.launch

    def fatal(batch: Batch) -> StepHandle:
        if TRAP in batch.tokens.tolist():
            _stop(Path(settings["folder"]))
        return launch(batch)

    core.runner.launch = fatal  # type: ignore[method-assign]
    return core, info


def _stop(folder: Path) -> None:
    import ctypes

    from halfbyte.kernels.cuda.device.host import gpu
    from halfbyte.kernels.launch import Kernel, Program, compile_program

    class Args(ctypes.Structure):
        _fields_ = [("failure", ctypes.c_void_p)]

    source = folder / "stop.cu"
    source.write_text(STOP, encoding="utf-8")
    Kernel(compile_program(Program(source, "stop"), gpu().arch, cache=folder), "stop", 0).launch(
        1, 1, Args(gpu().failure.data_ptr())
    )


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


async def opened(folder: Path) -> EngineProcess:
    source = EngineProcess(BUILD, {"folder": str(folder)}, restarts=2, first_pause=0.05)
    await source.open()
    return source


async def tokens_of(source: EngineProcess, prompt: list[int], n: int = 48) -> list[int]:
    out: list[int] = []
    async for delta in source.stream(Request(prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True))):
        assert delta.finish != "error", delta.error
        out += delta.tokens
    return out


async def test_a_trap_ends_the_process_and_the_next_one_serves(tmp_path: Path) -> None:
    source = await opened(tmp_path)
    try:
        want, first = await tokens_of(source, [5, 6, 7]), source.pid
        neighbour = asyncio.create_task(tokens_of(source, [9, 8], 900))
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        with pytest.raises(EngineDiedError, match=r"GPU failed.*wait 0x999 was given up in block 3, thread 7"):
            await tokens_of(source, [TRAP])
        with pytest.raises(EngineDiedError, match="GPU failed"):
            await neighbour
        assert time.monotonic() - begin < 30, "at the first failed step"
        while not source.ready:
            assert not source.health().gone
            await asyncio.sleep(0.1)
        assert source.pid != first
        assert await tokens_of(source, [5, 6, 7]) == want
    finally:
        await source.close()


async def test_two_engines_on_one_gpu(tmp_path: Path) -> None:
    """Time slices: slower, and the same tokens; nobody gives a wait up."""
    prompts = [[5 + i, 6, 7] for i in range(12)]
    one, other = await opened(tmp_path), await opened(tmp_path)
    try:
        want = [await tokens_of(one, p) for p in prompts]
        for _ in range(3):
            both = await asyncio.gather(*(tokens_of(s, p) for s in (one, other) for p in prompts))
            alone = await asyncio.gather(*(tokens_of(s, prompts[0], 200) for s in (one, other)))
            assert alone[0] == alone[1]
            for got, expected in zip(both, want * 2):
                assert len(got) == len(expected)
        assert [await tokens_of(other, p) for p in prompts] == want
    finally:
        await one.close()
        await other.close()


async def test_beside_a_hog_of_bandwidth(tmp_path: Path) -> None:
    source = await opened(tmp_path)
    try:
        want = await tokens_of(source, [5, 6, 7])
        hog = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(hog)
        for _ in range(5):
            for _ in range(200):
                other.copy_(hog)
            assert await tokens_of(source, [5, 6, 7]) == want
        torch.cuda.synchronize()
    finally:
        await source.close()
