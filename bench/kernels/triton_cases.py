"""What bench.kernels.triton_phases checks and times: every Triton phase at gpt-oss-120b's shapes, and other tiles.

Names cases only; nothing here runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Trial:
    phase: str
    rows: int
    past: int = 0  # tokens in the cache before, per sequence
    sequences: int = 1
    kind: str = "full"
    spec: dict[str, Any] = field(default_factory=dict)
    bound: float = 5e-3
    work: str = ""  # bytes or flops: what the ceiling is made of
    quick: bool = False
    tune: dict[str, int] = field(default_factory=dict)  # what --sweep tries in place of the chosen tile

    @property
    def name(self) -> str:
        extra = " ".join([*map(str, self.spec.values()), *(f"{k}={v}" for k, v in self.tune.items())])
        suffix = f" {self.kind} d{self.past}" if "attention" in self.phase else ""
        return f"{self.phase} R={self.rows}{suffix}{' ' + extra if extra else ''}"


def cases() -> list[Trial]:
    c = [
        Trial("triton.embed", 2048, bound=0.0), Trial("triton.attn_norm", 1), Trial("triton.attn_norm", 2048),
        Trial("triton.final_norm", 64), Trial("triton.rope_kv_write", 8, 2040), Trial("triton.rope_kv_write", 2048),
        Trial("triton.rope_kv_write", 8, 8190, spec={"kv": "fp8"}),
        Trial("triton.mlp_norm_router", 1), Trial("triton.mlp_norm_router", 64), Trial("triton.mlp_norm_router", 2048),
    ]  # fmt: skip
    for past in (2047, 8191, 32767):
        c.append(Trial("triton.attention_split", 1, past, work="bytes", quick=past == 2047))
    c += [
        Trial("triton.attention_split", 1, 8191, kind="sliding", work="bytes"),
        Trial("triton.attention_split", 1, 8191, spec={"kv": "fp8"}, work="bytes"),
        Trial("triton.attention_split", 64, 2047, sequences=64, work="bytes"),
        Trial("triton.attention_split", 5, 2044, work="bytes"),
        Trial("triton.attention_flash", 2048, work="flops", quick=True),
        Trial("triton.attention_flash", 2048, kind="sliding", work="flops"),
        Trial("triton.attention_flash", 8192, work="flops"),
        Trial("triton.attention_flash", 2048, 30720, work="flops"),
        Trial("triton.attention_flash", 2048, spec={"kv": "fp8"}, work="flops"),
        Trial("triton.attention_flash", 999, 77, sequences=9, work="flops"),
    ]
    for dense in ("bf16", "q8", "mxfp4"):
        for rows in (1, 64, 2048):
            c.append(
                Trial("triton.qkv", rows, spec={"dense": dense}, bound=1e-5, work="bytes" if rows < 65 else "flops")
            )
    c += [
        Trial("triton.o", 1, spec={"dense": "bf16"}, bound=1e-5, work="bytes"),
        Trial("triton.o", 2048, spec={"dense": "bf16"}, bound=1e-5, work="flops"),
        Trial("triton.qkv", 64, spec={"dense": "mxfp4", "activation": "mxfp8"}, bound=1e-5, work="bytes"),
        Trial("triton.qkv", 64, spec={"dense": "mxfp4", "activation": "mxfp4"}, bound=1e-5, work="bytes"),
        Trial("triton.qkv", 64, spec={"dense": "mxfp4", "activation": "fp8"}, bound=1e-5, work="bytes"),
        Trial("triton.lm_head", 1, spec={"dense": "bf16"}, bound=1e-5, work="bytes"),
        Trial("triton.lm_head", 1, spec={"dense": "mxfp4"}, bound=1e-5, work="bytes"),
    ]
    for rows in (1, 4, 8, 32, 64, 320, 2048, 8192):
        c.append(Trial("triton.moe", rows, bound=1e-3, work="bytes" if rows < 65 else "flops", quick=rows in (1, 2048)))
    for activation, bound in (("fp8", 3e-3), ("mxfp8", 4e-3), ("mxfp4", 2e-2)):
        for rows in (1, 320):
            c.append(Trial("triton.moe", rows, spec={"activation": activation}, bound=bound, work="bytes"))
    for tile in ("64x128", "128x128"):
        c.append(Trial("triton.moe", 2048, spec={"tile": tile}, bound=1e-3, work="flops"))
    return c


def sweep() -> list[Trial]:
    """Tiles beside the chosen ones."""
    out: list[Trial] = []
    for rows, bound in ((1, 1e-3), (64, 1e-3)):
        for bn, bk, stages in ((32, 64, 4), (64, 64, 6), (64, 128, 4), (128, 128, 3), (32, 128, 4)):
            tune = {"bm": 16, "bn": bn, "bk": bk, "warps": 4, "stages": stages}
            out.append(Trial("triton.moe", rows, bound=bound, work="bytes", tune=tune))
    for bm, bn, bk, warps, stages in (
        (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 256, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3),
        (128, 256, 64, 8, 3),
    ):  # fmt: skip
        tune = {"bm": bm, "bn": bn, "bk": bk, "warps": warps, "stages": stages}
        out.append(Trial("triton.moe", 2048, bound=1e-3, work="flops", tune=tune))
    for dense in ("bf16", "mxfp4"):
        for bn, bk, stages in ((16, 128, 5), (32, 128, 4), (32, 64, 6)):
            tune = {"bm": 16, "bn": bn, "bk": bk, "warps": 4, "stages": stages}
            out.append(Trial("triton.qkv", 1, spec={"dense": dense}, bound=1e-5, work="bytes", tune=tune))
    for bm, bn, warps, stages in ((128, 128, 8, 4), (128, 256, 8, 3)):
        tune = {"bm": bm, "bn": bn, "bk": 64, "warps": warps, "stages": stages}
        out.append(Trial("triton.qkv", 2048, spec={"dense": "bf16"}, bound=1e-5, work="flops", tune=tune))
    for bm, warps, stages in ((64, 4, 2), (64, 4, 4), (128, 8, 3)):
        tune = {"bm": bm, "warps": warps, "stages": stages}
        out.append(Trial("triton.attention_flash", 8192, work="flops", tune=tune))
    for warps, stages in ((2, 3), (4, 2), (4, 4)):
        out.append(Trial("triton.attention_split", 1, 8191, work="bytes", tune={"warps": warps, "stages": stages}))
    return out
