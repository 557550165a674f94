"""A prompt's row has the same bits however many rows a step has, and whichever tile is cut for them: --deterministic
reads every prompt with these products. In the emulator, whose order of additions is the source's; no GPU was asked.
"""

from __future__ import annotations

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import layouts, tile16
from halfbyte.kernels.cuda.device.host import Workspace
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Dense, Mxfp8Dense
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.kernels.cuda.prefill.sync import SyncDense, SyncExperts
from tests.kernels.cuda.emulator import Emulator

ROWS, FEW = 70, 3  # more than one tile of 64, and fewer than any


def workspace() -> Workspace:
    return Workspace(Emulator(5), {}, torch.device("cpu"))


def matrix(form: str, shape: tuple[int, ...], seed: int):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    if form == "bf16":
        return tile16.pack_dense(w.bfloat16())
    return layouts.convert(formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8"), "tile16")


@pytest.mark.parametrize(
    ("kind", "form"),
    [(Dense, "mxfp4"), (Dense, "q8"), (Dense, "bf16"), (SyncDense, "mxfp4"), (SyncDense, "bf16"), (Mxfp8Dense, "mxfp4"),
     pytest.param(SyncDense, "q8", marks=pytest.mark.slow), pytest.param(Mxfp4Dense, "mxfp4", marks=pytest.mark.slow)],
)  # fmt: skip
def test_projections(kind: type[Dense], form: str) -> None:
    weights, norm = matrix(form, (192, 320), 1), torch.rand(320).bfloat16()
    x = torch.randn((ROWS, 320), generator=torch.Generator().manual_seed(2))

    def run(rows: torch.Tensor, tile: str | None = None) -> torch.Tensor:
        return kind(workspace(), weights, None, "qkv", tile).run(rows, norm=norm, eps=1e-5)

    together = run(x)
    assert torch.equal(run(x[:FEW]), together[:FEW])
    assert torch.equal(run(x[-1:]), together[-1:])
    for tile in kind.tiles:
        assert torch.equal(run(x[:FEW], tile), together[:FEW]), tile


@pytest.mark.parametrize("kind", [GroupedExperts, SyncExperts])
def test_experts(kind: type[GroupedExperts]) -> None:
    experts, hidden, inner = 4, 128, 192
    g = torch.Generator().manual_seed(3)
    gate_up, down = matrix("mxfp4", (experts, 2 * inner, hidden), 4), matrix("mxfp4", (experts, hidden, inner), 5)
    biases = [torch.randn((experts, n), generator=g).bfloat16() for n in (2 * inner, hidden)]
    shares, ids = torch.randn((ROWS, experts), generator=g).softmax(-1).topk(2)
    h, x = (torch.randn((ROWS, hidden), generator=g) for _ in range(2))

    def run(rows: slice, tile: str | None = None) -> torch.Tensor:
        layer = kind(workspace(), gate_up, biases[0], down, biases[1], limit=7.0, alpha=1.702, tile=tile)
        return layer.run(
            h[rows].bfloat16(), ids[rows].int().contiguous(), shares[rows].contiguous(), x[rows].contiguous()
        )

    together = run(slice(ROWS))
    assert torch.equal(run(slice(ROWS - 1, ROWS)), together[ROWS - 1 :])
    for tile in kind.tiles:
        assert torch.equal(run(slice(FEW), tile), together[:FEW]), tile
