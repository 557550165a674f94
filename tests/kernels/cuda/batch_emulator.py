"""The batch kernels on a CPU: the same sources, built with g++ over `emulator.h`, one fiber per CUDA thread."""

from __future__ import annotations

import ctypes

from grouped_emulator import build

from halfbyte.kernels.cuda.batch.products import ProductArgs, RowsArgs, RowShape, Variant


class Emulator:
    def __init__(self, blocks: int, seed: int = 0) -> None:
        self.blocks, self.seed = blocks, seed

    def product(self, variant: Variant, args: ProductArgs) -> None:
        self.seed += 1
        build(variant.program()).hb_batch(ctypes.byref(args), self.blocks, self.seed)

    def rows(self, shape: RowShape, entry: str, args: RowsArgs) -> None:
        self.seed += 1
        build(shape.program("rows")).hb_batch_rows(entry.encode(), ctypes.byref(args), args.rows, self.seed)
