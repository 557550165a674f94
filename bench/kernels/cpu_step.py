"""One step of the CPU kernels alone, on made-up weights of a shape: no engine, no tokenizer, no file.

    python -m bench run cpu-step --set threads=2 --set rows=1 --set depth=64
    python -m bench run cpu-step --set shape=20b --set layers=3 --set rows=256

`tiny` is the embedded model's shape, `20b` gpt-oss-20b's with as many layers as are asked for. Figures are of the
steps of some seconds; `read` counts the bytes of weights that a step of one row reads.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.measurement import Run, measurement, option
from halfbyte.errors import UsageError
from halfbyte.formats import rows16
from halfbyte.kernels.cpu.library import (
    FORMATS,
    Instance,
    LayerStruct,
    MatrixStruct,
    ModelStruct,
    StepStruct,
    open_library,
)
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.config import ModelConfig

SHAPES = {
    "tiny": ModelConfig(
        layers=8, hidden=256, intermediate=192, experts=16, top_k=4, heads=8, kv_heads=2, head_dim=64, vocab=2048
    ),
    "20b": ModelConfig(
        layers=24, hidden=2880, intermediate=2880, experts=32, top_k=4, heads=64, kv_heads=8, head_dim=64, vocab=201088
    ),
}
PAGE, TOKENS = 64, 1024


class RandomModel:
    """Weights that are numbers of a sensible size, and whatever else a step points to."""

    def __init__(self, config: ModelConfig, dense: str, seed: int = 1) -> None:
        self.config, self.dense, self.buffers = config, dense, list[object]()
        self.gen = torch.Generator().manual_seed(seed)
        c = config
        self.layers = (LayerStruct * c.layers)(*(self._layer(i) for i in range(c.layers)))
        embed = torch.randn((TOKENS, c.hidden), generator=self.gen).bfloat16()  # tokens past it are never asked for
        self.model = ModelStruct(
            1, c.layers, c.hidden, c.intermediate, c.experts, c.top_k, c.heads, c.kv_heads, c.head_dim, c.vocab,
            c.window, PAGE, c.layers_per_page, FORMATS["bf16"], FORMATS["bf16"], 1, c.norm_eps, c.swiglu_limit,
            c.swiglu_alpha, self.keep(150000.0 ** (-torch.arange(c.head_dim // 2) / (c.head_dim // 2))), 1.1,
            self.keep(embed), self.layers, self._numbers(c.hidden, mean=1.0), self._matrix(dense, c.vocab, c.hidden),
        )  # fmt: skip

    def keep(self, t: Tensor) -> int:
        self.buffers.append(t)
        return t.data_ptr()

    def ints(self, values: Tensor) -> int:
        return self.keep(values.int().contiguous())

    def _numbers(self, *shape: int, std: float = 0.1, mean: float = 0.0) -> int:
        return self.keep(torch.randn(shape, generator=self.gen) * std + mean)

    def _matrix(self, kind: str, rows: int, cols: int, stack: int = 1) -> MatrixStruct:
        tiles, size, groups = stack * -(-rows // 16), rows16.tile_bytes(kind, cols), -(-cols // 32)
        room = torch.empty(tiles * size + 64, dtype=torch.uint8)
        start = -room.data_ptr() % 64
        data = room[start : start + tiles * size].view(tiles, size)
        data[0] = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.gen)
        if kind == "mxfp4":
            data[0, groups * 256 :] = 120  # scales of 1/128
        elif kind == "q8":
            data[0, groups * 512 :].view(torch.float16)[:] = 0.0005
        else:
            data[0].view(torch.bfloat16)[:] = torch.randn(size // 2, generator=self.gen) * 0.06
        data[1:] = data[0]
        self.buffers.append(room)
        return MatrixStruct(FORMATS[kind], 0, rows, cols, data.data_ptr())

    def _layer(self, i: int) -> LayerStruct:
        c = self.config
        return LayerStruct(
            self._numbers(c.hidden, mean=1.0), self._matrix(self.dense, c.qkv_dim, c.hidden), self._numbers(c.qkv_dim),
            self._numbers(c.heads), self._matrix(self.dense, c.hidden, c.q_dim), self._numbers(c.hidden),
            self._numbers(c.hidden, mean=1.0), self._numbers(c.experts, c.hidden, std=1.5 / c.hidden**0.5),
            self._numbers(c.experts), self._matrix("mxfp4", 2 * c.intermediate, c.hidden, c.experts),
            self._numbers(c.experts, 2 * c.intermediate), self._matrix("mxfp4", c.hidden, c.intermediate, c.experts),
            self._numbers(c.experts, c.hidden), int(c.layer_kinds[i] == "sliding"), c.kind_index(i),
        )  # fmt: skip

    def step(self, rows: int, depth: int) -> StepStruct:
        """One sequence: `rows` tokens behind `depth`; only the best token of the last is wanted."""
        c, length = self.config, depth + rows
        blocks = -(-length // PAGE)
        pages = torch.arange(1, 1 + 2 * blocks)
        pool = torch.randn((1 + 2 * blocks, c.layers_per_page, 2, c.kv_heads, PAGE, c.head_dim)).bfloat16()
        return StepStruct(
            rows, 1, 1, length, self.ints(torch.randint(0, TOKENS, (rows,), generator=self.gen)),
            self.ints(torch.arange(depth, length)), self.ints(torch.tensor([0, rows])),
            self.ints(torch.tensor([length])), self.ints(torch.zeros(rows)), self.ints(pages[:blocks]),
            self.ints(pages[blocks:]), blocks, self.ints(torch.tensor([rows - 1])), self.keep(pool), pool.shape[0],
            None, self.ints(torch.zeros(1)), self.keep(torch.zeros(1)), None, 0, None, None,
        )  # fmt: skip

    def bytes_of_a_row(self) -> int:
        """Bytes of weights that one token reads."""
        c = self.config
        tile = rows16.tile_bytes
        dense = (c.qkv_dim * tile(self.dense, c.hidden) + c.hidden * tile(self.dense, c.q_dim)) // 16
        expert = (2 * c.intermediate * tile("mxfp4", c.hidden) + c.hidden * tile("mxfp4", c.intermediate)) // 16
        router = 4 * c.experts * c.hidden
        return c.layers * (dense + c.top_k * expert + router) + c.vocab * tile(self.dense, c.hidden) // 16


@dataclass(frozen=True)
class Options:
    shape: str = option("tiny", " or ".join(SHAPES))
    layers: int | None = option(None, "fewer than the shape has")
    dense: str | None = option(None, "bf16, q8 or mxfp4 for qkv, o and head; empty: bf16 for tiny, q8 for 20b")
    instructions: str = "auto"
    threads: int = 2
    rows: int = 1
    depth: int = 0
    seconds: float = 3.0


@measurement("cpu-step", seconds=60, routine=False)
def cpu_step(run: Run, options: Options) -> None:
    if options.shape not in SHAPES:
        raise UsageError(f"there is no shape {options.shape!r}; use {' or '.join(SHAPES)}.")
    config = SHAPES[options.shape]
    if options.layers:
        config = config.with_(layers=options.layers, layer_kinds=())
    model = RandomModel(config, options.dense or ("bf16" if options.shape == "tiny" else "q8"))
    library = open_library(options.instructions)
    pool = library.calls.hb_pool_create(options.threads, None)
    instance, step = Instance(library, model.model, pool, 512), model.step(options.rows, options.depth)
    instance.run(step)
    times, end = [], time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        instance.run(step)
        times.append(time.perf_counter() - start)
    library.calls.hb_pool_destroy(ctypes.c_void_p(pool))
    times.sort()
    median, size = times[len(times) // 2], model.bytes_of_a_row()
    shape = {"layers": config.layers, "dense": model.dense, "threads": options.threads, "rows": options.rows,
             "depth": options.depth}  # fmt: skip
    figures = (
        figure("step", "us", [1e6 * t for t in times]), figure("best_tenth", "us", 1e6 * times[len(times) // 10]),
        figure("speed", "tok/s", options.rows / median), figure("read", "GB/s", size / median / 1e9),
    )  # fmt: skip
    run.sources |= receipts.hashes((receipts.PACKAGE / "kernels" / "cpu").glob("*.[ch]*"))
    cell = Cell("kernel", options.shape, path=library.instructions, shape=shape)
    run.add(Result(cell, figures, detail={"steps": len(times), "bytes_a_token": size}))
