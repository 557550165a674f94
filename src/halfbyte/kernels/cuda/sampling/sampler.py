"""Tokens drawn on a GPU (sample.cu): the highest logit in one launch, a draw in one more, or in two more where top-k,
top-p or min-p cut the distribution.

The draw is `halfbyte.engine.sampling.race`'s, number for number: the same keys give the same tokens, but for
ties within the rounding of a logarithm. Greedy rows are left as they are. Allocates nothing in a step,
waits for nothing. Refuses vocabularies whose sums would not fit in 32 bits.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.kernels.launch import Kernel, Program, compile_program, nvrtc_available

SOURCE = Path(__file__).parent / "sample.cu"
THREADS = {"sample_argmax": 256, "sample_race": 256, "sample_cutoffs": 1024}
SHARED = {"sample_argmax": 256, "sample_race": 256, "sample_cutoffs": 74_176}  # as sample.cu has it
VOCAB_MAX = (1 << 18) - 1
BLOCKS, LEAST = 512, 1024  # blocks of a race over all rows; tokens a block should have at least
EDGE_BLOCKS, EDGE_PARTS, EDGE_LEAST = 64, 16, 8192  # the same for edges; at most so many blocks to a row
BINS = 3 * 2048
_P, _I = ctypes.c_void_p, ctypes.c_int


class DrawArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("logits", "settings", "keys", "cutoffs", "best", "tickets", "bins", "results")),
        ("stride", ctypes.c_longlong),
        *((name, _I) for name in ("vocab", "parts", "cutoff_parts", "filtered")),
    ]


class Machine(Protocol):
    def run(self, entry: str, grid: int, args: DrawArgs) -> None: ...


def program(entry: str) -> Program:
    return Program(SOURCE, entry)


class Gpu:
    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        cubin = compile_program(program("sample_race"), f"sm_{major}{minor}a")  # holds all
        self._kernels = {entry: Kernel(cubin, entry, SHARED[entry]) for entry in THREADS}

    def run(self, entry: str, grid: int, args: DrawArgs) -> None:
        self._kernels[entry].launch(grid, THREADS[entry], args)


class CudaSampler:
    """`rows`: the most that are drawn at once."""

    name = "cuda.draw"
    edge_least = EDGE_LEAST  # tokens to a block, at least, where several count a row

    def __init__(self, machine: Machine, rows: int, vocab: int, device: torch.device) -> None:
        if vocab > VOCAB_MAX:
            raise PlanError(f"the CUDA sampler {_too_many(vocab)}.")
        self.machine = machine
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tickets = torch.zeros(rows, dtype=torch.int32, device=device)
        self._edges = torch.empty(rows, dtype=torch.float32, device=device)
        self._bins = torch.zeros((EDGE_BLOCKS // 2, BINS), dtype=torch.int32, device=device)  # of rows that are shared

    def argmax(self, logits: Tensor, results: Tensor) -> None:
        """Place and bits of the highest logit of each row, into `results` int32 [L, 2]: NaN is highest, of equals the
        lower token."""
        logits = logits.float()
        args = self._args(logits, results)
        self.machine.run("sample_argmax", logits.shape[0] * args.parts, args)

    def sample(self, logits: Tensor, settings: Tensor, keys: Tensor, results: Tensor, *, filtered: bool) -> None:
        """`results` int32 [L, 2]: tokens of the rows that are sampled are replaced; the second word, the bits of the
        row's highest logit, is read. `filtered`: some row has top-k, top-p or min-p."""
        rows, vocab = logits.shape
        logits = logits.float()
        for given, dtype in ((settings, torch.float32), (keys, torch.int64)):
            assert given.is_contiguous()
            assert given.dtype == dtype
            assert given.shape[0] == rows
        args = self._args(logits, results)
        args.settings, args.keys, args.filtered = settings.data_ptr(), keys.data_ptr(), int(filtered)
        if filtered:
            args.cutoff_parts = max(1, min(EDGE_BLOCKS // rows, EDGE_PARTS, -(-vocab // self.edge_least)))
            self.machine.run("sample_cutoffs", rows * args.cutoff_parts, args)
        self.machine.run("sample_race", rows * args.parts, args)

    def _args(self, logits: Tensor, results: Tensor) -> DrawArgs:
        rows, vocab = logits.shape
        assert rows <= self._best.shape[0], "more rows than this was made for"
        assert logits.stride(1) == 1
        assert results.is_contiguous()
        assert results.dtype == torch.int32
        assert results.shape == (rows, 2)
        return DrawArgs(
            logits=logits.data_ptr(), cutoffs=self._edges.data_ptr(), best=self._best.data_ptr(),
            tickets=self._tickets.data_ptr(), bins=self._bins.data_ptr(), results=results.data_ptr(),
            stride=logits.stride(0), vocab=vocab, parts=max(1, min(BLOCKS // rows, -(-vocab // LEAST))),
        )  # fmt: skip


def _too_many(vocab: int) -> str:
    return f"draws from at most {VOCAB_MAX} tokens, not {vocab}"


def refuse(vocab: int) -> str | None:
    return _too_many(vocab) if vocab > VOCAB_MAX else nvrtc_available()


@functools.cache
def gpu() -> Gpu:
    return Gpu()


def make(rows: int, vocab: int, device: torch.device) -> CudaSampler:
    return CudaSampler(gpu(), rows, vocab, device)
