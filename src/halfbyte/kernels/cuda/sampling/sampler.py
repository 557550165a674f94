"""Tokens sampled on a GPU (sample.cu): the highest logit in one launch, a sample in one more, or in two more where
a filter (top-n-sigma, top-k, top-p, min-p) cuts the distribution.

The sample is that of `halfbyte.engine.sampling.race`, number for number: the same keys give the same tokens, but for
ties within the rounding of a logarithm. Greedy rows are left as they are. Allocates nothing in a step, waits for
nothing. Refuses vocabularies whose sums would not fit in 32 bits.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.device.host import INT, LONG, POINTER, KernelMachine, fields, gpu, options, pointer
from halfbyte.kernels.launch import Build, Program, find_prebuilt, nvrtc_available
from halfbyte.ops.sampling_settings import COLUMNS
from halfbyte.plan.launches import SAMPLING

SOURCE = Path(__file__).parent / "sample.cu"
THREADS = {"sample_argmax": 256, "sample_race": 256, "sample_cutoffs": 1024}
SHARED = {"sample_argmax": 256, "sample_race": 256, "sample_cutoffs": 74_176}  # as sample.cu has it
VOCAB_MAX = (1 << 18) - 1
BLOCKS, LEAST = 512, 1024  # blocks of a race over all rows; tokens a block should have at least
CUTOFF_BLOCKS, CUTOFF_PARTS, CUTOFF_LEAST = 64, 16, 8192  # the same for cutoffs; at most so many blocks to a row
BINS = 3 * 2048
# -DHB_TOP_K=1 …: the column of each setting in a row, and how many there are.
OPTIONS = options({"COLUMNS": len(COLUMNS)} | {name.upper(): at for at, name in enumerate(COLUMNS)})
BUILDS = {  # all in one cubin
    entry: Build(
        f"sampler {entry}", Program(SOURCE, entry, OPTIONS), threads, SHARED[entry], early=False, part=SAMPLING
    )
    for entry, threads in THREADS.items()
}


class SampleArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "logits", "settings", "keys", "cutoffs", "best", "tickets", "bins", "results"),
        ("stride", LONG),
        *fields(INT, "vocab", "parts", "cutoff_parts", "filtered", "barred"),
    ]


class CudaSampler:
    """`rows`: the most that are sampled at once."""

    name = "cuda.sampler"
    cutoff_least = CUTOFF_LEAST  # tokens to a block, at least, where several count a row

    def __init__(self, machine: KernelMachine, rows: int, vocab: int, device: torch.device) -> None:
        if vocab > VOCAB_MAX:
            raise PlanError(f"the CUDA sampler {_too_many(vocab)}.")
        self.machine = machine
        for build in BUILDS.values():
            machine.load(build)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tickets = torch.zeros(rows, dtype=torch.int32, device=device)
        self._cutoffs = torch.empty(rows, dtype=torch.float32, device=device)
        self._bins = torch.zeros((CUTOFF_BLOCKS // 2, BINS), dtype=torch.int32, device=device)  # of shared rows

    def argmax(self, logits: Tensor, results: Tensor, *, barred: bool = False) -> None:
        """Place and bits of the highest logit of each row, into `results` int32 [L, 2]: what is no number is highest
        and counts as NaN, of equals the lower token. `barred`: tokens that may not be chosen are -infinity."""
        logits = logits.float()
        args = self._args(logits, results)
        args.barred = int(barred)
        self.machine.run(BUILDS["sample_argmax"], logits.shape[0] * args.parts, args)

    def sample(self, logits: Tensor, settings: Tensor, keys: Tensor, results: Tensor, *, filtered: bool) -> None:
        """`results` int32 [L, 2]: tokens of the rows that are sampled are replaced; the second word, the bits of the
        row's highest logit, is read. `filtered`: some row has a filter."""
        rows, vocab = logits.shape
        logits = logits.float()
        for inputs, dtype in ((settings, torch.float32), (keys, torch.int64)):
            assert inputs.is_contiguous()
            assert inputs.dtype == dtype
            assert inputs.shape[0] == rows
        assert settings.shape == (rows, len(COLUMNS))
        args = self._args(logits, results)
        args.settings, args.keys, args.filtered = settings.data_ptr(), keys.data_ptr(), int(filtered)
        if filtered:
            args.cutoff_parts = max(1, min(CUTOFF_BLOCKS // rows, CUTOFF_PARTS, -(-vocab // self.cutoff_least)))
            self.machine.run(BUILDS["sample_cutoffs"], rows * args.cutoff_parts, args)
        self.machine.run(BUILDS["sample_race"], rows * args.parts, args)

    def _args(self, logits: Tensor, results: Tensor) -> SampleArgs:
        rows, vocab = logits.shape
        assert rows <= self._best.shape[0], "more rows than this was made for"
        assert logits.stride(1) == 1
        assert results.is_contiguous()
        assert results.dtype == torch.int32
        assert results.shape == (rows, 2)
        return SampleArgs(
            logits=pointer(logits),
            cutoffs=pointer(self._cutoffs),
            best=pointer(self._best),
            tickets=pointer(self._tickets),
            bins=pointer(self._bins),
            results=pointer(results),
            stride=logits.stride(0),
            vocab=vocab,
            parts=max(1, min(BLOCKS // rows, -(-vocab // LEAST))),
        )


def _too_many(vocab: int) -> str:
    return f"samples from at most {VOCAB_MAX} tokens, not {vocab}"


def refuse(vocab: int) -> str | None:
    if vocab > VOCAB_MAX:
        return _too_many(vocab)
    shipped = torch.cuda.is_available() and all(find_prebuilt(b.program, gpu().arch) for b in BUILDS.values())
    return None if shipped else nvrtc_available()


def make(rows: int, vocab: int, device: torch.device) -> CudaSampler:
    return CudaSampler(gpu(), rows, vocab, device)
