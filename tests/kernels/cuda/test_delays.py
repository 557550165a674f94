"""Whoever hands something over may be late: the same bits, and no wait is given up. A wait that cannot end is.

Delays stand in front of every word that goes into a mailbox, behind every word that comes out of one, and at every
barrier and counter (HB_DELAYS). In the emulator with few blocks; on a GPU with as many as an H200, a GB10 and less
have, the GPU idle or its memory busy with something else.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.kernels.cuda.decode.shape import build_of
from halfbyte.kernels.cuda.device.host import CudaMachine, KernelMachine, check_resident, given_up, gpu
from halfbyte.kernels.launch import Build, Program
from tests.kernels.cuda.batch.test_products import check_layer, make_layer
from tests.kernels.cuda.decode.decode_models import Case, small
from tests.kernels.cuda.emulator import Emulator

DELAYS = "-DHB_DELAYS=4000"  # nanoseconds at most
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BLOCKS = [pytest.param(n, marks=needs_gpu) for n in (132, 48, 20)]


def with_delays(build: Build) -> Program:
    return replace(build.program, options=(*build.program.options, DELAYS))


class LateGpu(CudaMachine):
    """A GPU of so many multiprocessors, where hand-overs are late."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = min(blocks, self.blocks)

    def program(self, build: Build) -> Program:
        return with_delays(build)


class LateEmulator(Emulator):
    def program(self, build: Build) -> Program:
        return with_delays(build)


POSITIONS = [650, 3, 131, 70]


def logits_of(machine: KernelMachine, device: str, steps: int = 1, rows: int = 4) -> Tensor:
    case = Case(small(rows), machine, 4, 12, device)
    seen = []
    for i in range(steps):
        case.step.tokens.copy_(torch.tensor([9, 100, 200, 300][:rows], dtype=torch.int32))
        case.step.positions.copy_(torch.tensor([p + i for p in POSITIONS[:rows]], dtype=torch.int32))
        case.step.run(rows)
        seen.append(case.step.logits.cpu().clone())
    return torch.stack(seen)


@pytest.mark.exact
def test_late_hand_overs_leave_the_same_bits() -> None:
    want = logits_of(Emulator(4), "cpu", rows=2)
    assert torch.equal(logits_of(LateEmulator(5, seed=3), "cpu", rows=2), want)


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize("blocks", [2, 7, 20])
def test_late_hand_overs_of_more_rows_and_blocks(blocks: int) -> None:
    want = logits_of(Emulator(4), "cpu", 2)
    for seed in range(3):
        assert torch.equal(logits_of(LateEmulator(blocks, seed), "cpu", 2), want)


def test_a_late_batch() -> None:
    """Groups of down begin when their gate_up is stored, however late that is."""
    layer, w = make_layer(128, 128, 32, 4, "mxfp4", LateEmulator(3, seed=5))
    check_layer(layer, w, 11, 0.0)


@pytest.mark.exact
@pytest.mark.parametrize("blocks", BLOCKS)
def test_late_hand_overs_on_a_gpu(blocks: int) -> None:
    want = logits_of(gpu(), "cuda", 50)
    for _ in range(4):
        assert torch.equal(logits_of(LateGpu(blocks), "cuda", 50), want)
    torch.cuda.synchronize()
    assert given_up(gpu().failure) is None


@pytest.mark.parametrize("blocks", BLOCKS)
def test_a_late_batch_on_a_gpu(blocks: int) -> None:
    layer, w = make_layer(2880, 2880, 32, 4, "mxfp4", LateGpu(blocks), "cuda")
    for rows in (3, 20, 64):
        check_layer(layer, w, rows, 0.0)


@pytest.mark.exact
@pytest.mark.parametrize("late", [pytest.param(late, marks=needs_gpu) for late in (False, True)])
def test_beside_a_hog_of_bandwidth(late: bool) -> None:
    """Copies of gigabytes on another stream, all the time: slower, and the same bits."""
    want = logits_of(gpu(), "cuda", 20)
    hog = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    other, stream = torch.empty_like(hog), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            for _ in range(50):
                other.copy_(hog)
        assert torch.equal(logits_of(LateGpu(132) if late else gpu(), "cuda", 20), want)
    torch.cuda.synchronize()


def test_a_kernel_whose_blocks_wait_for_each_other_must_fit() -> None:
    build = build_of(small(1))
    check_resident(build, 1)
    with pytest.raises(PlanError, match=r"decode_step rows=1 needs a block of \d+ threads .* no room for one"):
        check_resident(build, 0)


def test_a_wait_that_was_given_up_says_where() -> None:
    failure = torch.zeros(2, dtype=torch.int32)
    assert given_up(failure) is None
    failure[0], failure[1] = 0x400, 131 << 16 | 77
    assert given_up(failure) == "wait 0x400 was given up in block 131, thread 77"


@pytest.mark.parametrize("machine", ["", pytest.param("gpu", marks=needs_gpu)])
def test_mps_is_refused_with_a_sentence(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.kernels.cuda.device import host

    monkeypatch.setattr(host, "shared_by_mps", lambda: True)
    if not machine:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("P", (), {"multi_processor_count": 132}))
    with pytest.raises(PlanError, match=r"MPS.*nvidia-cuda-mps-control"):
        CudaMachine()
