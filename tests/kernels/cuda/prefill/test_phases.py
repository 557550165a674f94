"""The grouped phases: what they refuse and why, when a plan takes them, and on a GPU their results."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import layouts
from halfbyte.gates import Gates, Layers
from halfbyte.kernels.cuda.prefill.phases import PHASES
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, choose, formats_after, spec_of
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Spec
from halfbyte.plan.step import Step

ALL = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"))
BY_NAME = {p.name: p for p in PHASES}


def spec(gates: Gates = ALL, arch: str = "sm90", **changes: object) -> Spec:
    base = spec_of(NAMED["120b"], gates, ARCHES[arch], formats_after(NAMED["120b"], gates, CHECKPOINT_FORMATS))
    return replace(base, **changes)  # type: ignore[arg-type]


def test_takes_the_true_shapes_in_tile16() -> None:
    for phase in PHASES:
        assert phase.refuse(spec(), ARCHES["sm90"], ALL) is None, phase.name
        assert set(phase.layouts(spec()).values()) == {"tile16"}
        assert not spec().features_of(phase.covers) - phase.knows


@pytest.mark.parametrize(
    ("name", "arch", "changes", "reason"),
    [
        ("cuda.grouped_moe", "sm100", {}, "sm90"),
        ("cuda.grouped_moe", "sm90", {"activation": "mxfp8"}, "bf16 activations"),
        ("cuda.grouped_moe", "sm90", {"intermediate": 2912}, "multiples of 64"),
        ("cuda.grouped_moe", "sm90", {"top_k": 9}, "up to 8"),
        ("cuda.grouped_moe", "sm90", {"experts": 1024}, "up to 512"),
        ("cuda.grouped_moe", "sm90", {"tile": "128x128"}, "--tile"),
        ("cuda.grouped_o", "sm90", {"hidden": 2881}, "multiples"),
        ("cuda.grouped_norm_lm_head", "sm90", {"vocab": 201089}, "multiples"),
    ],
)
def test_refusals(name: str, arch: str, changes: dict[str, object], reason: str) -> None:
    refusal = BY_NAME[name].refuse(spec(**changes), ARCHES[arch], ALL)
    assert refusal is not None
    assert reason in refusal


def test_a_plan_takes_them_beside_the_decode_step() -> None:
    for dense in ("mxfp4", "q8", "checkpoint"):
        gates = Gates(layers=Layers("mxfp4", dense, dense, dense))
        choice = choose(NAMED["120b"], gates, ARCHES["sm90"])
        chosen, selection = choice.chosen, choice.selection
        assert {p.name for p in chosen["decode"]} == {"cuda.decode_step"}
        assert {"cuda.prefill_layer", "cuda.grouped_norm_lm_head"} <= set(selection.chosen["prefill"]), dense
        assert {selection.layouts[r] for r in ("qkv", "o", "gate_up", "down", "lm_head")} == {"tile16"}


def test_refuses_weights_it_cannot_read() -> None:
    exact = Gates()
    for phase in PHASES:
        assert phase.refuse(spec(exact), ARCHES["sm90"], exact) is None, phase.name
    half = spec(exact, formats=CHECKPOINT_FORMATS | {"qkv": "f16"})
    refusal = BY_NAME["cuda.grouped_norm_qkv"].refuse(half, ARCHES["sm90"], exact)
    assert refusal == "multiplies mxfp4 or q8 or bf16 weights, and qkv is f16"


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def weights(shape: tuple[int, ...], seed: int, kind: str = "mxfp4") -> tuple[formats.MXTensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    plain = formats.quantize(torch.randn(shape, generator=g) / shape[-1] ** 0.5, "q8" if kind == "q8" else "mxfp4")
    return layouts.convert(plain, "tile16").to("cuda"), formats.dequantize(plain, torch.float32)


def close(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    got = got.cpu()
    assert torch.isfinite(got).all()
    assert ((got.double() - want.double()).norm() / want.double().norm()).item() <= bound


def binding(s: Spec, w: SimpleNamespace) -> Binding:
    return Binding(s, w, "full", 0, (torch.zeros(32), 1.0), lambda: torch.zeros(0))


def a_step(rows: int) -> Step:
    none = torch.zeros(0, dtype=torch.int32, device="cuda")
    wanted = torch.arange(rows - 1, -1, -2, dtype=torch.int32, device="cuda")
    return Step(torch.zeros(rows, dtype=torch.int32), none, none, none, none, {}, wanted, 0)


SMALL = {"hidden": 192, "intermediate": 320, "experts": 8, "heads": 8, "kv_heads": 1, "vocab": 640}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 9, 64, 65, 100, 700])
def test_experts_on_a_gpu(rows: int) -> None:
    s = spec(**SMALL)
    g = torch.Generator().manual_seed(rows)
    gate_up, gate_up_dense = weights((8, 640, 192), 1)
    down, down_dense = weights((8, 192, 320), 2)
    gate_up_bias, down_bias = torch.randn((8, 640), generator=g), torch.randn((8, 192), generator=g).bfloat16()
    w = SimpleNamespace(gate_up=gate_up, down=down, gate_up_bias=gate_up_bias.cuda(), down_bias=down_bias.cuda())
    h, x = torch.randn((rows, 192), generator=g).bfloat16(), torch.randn((rows, 192), generator=g)
    top, ids = torch.randn((rows, 8), generator=g).topk(4)
    acts = Activations(h=h.cuda(), x=x.cuda(), topk_ids=ids.int().cuda(), topk_weights=top.softmax(-1).cuda())
    launch = BY_NAME["cuda.grouped_moe"].bind(binding(s, w))
    launch(a_step(rows), acts)

    def project(dense: torch.Tensor, bias: torch.Tensor, e: int, y: torch.Tensor) -> torch.Tensor:
        return round_activation(y, "bf16") @ dense[e].T + bias[e].float()

    want = moe(
        h.float(), ids, top.softmax(-1), lambda e, y: project(gate_up_dense, gate_up_bias, e, y),
        lambda e, y: project(down_dense, down_bias, e, y), s.swiglu_limit, s.swiglu_alpha,
    )  # fmt: skip
    close(acts.x.cpu() - x, want, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mxfp4", "q8"])
@pytest.mark.parametrize("rows", [1, 40, 65, 300])
def test_projections_on_a_gpu_and_in_a_graph(rows: int, kind: str) -> None:
    s = spec(**SMALL)
    g = torch.Generator().manual_seed(rows)
    qkv, qkv_dense = weights((640, 192), 3, kind)
    o, o_dense = weights((192, 512), 4, kind)
    head, head_dense = weights((640, 192), 5, kind)
    norm = torch.rand(192, generator=g).bfloat16()
    qkv_bias, o_bias = torch.randn(640, generator=g).bfloat16(), torch.randn(192, generator=g)
    w = SimpleNamespace(
        qkv=qkv, o=o, lm_head=head, attn_norm=norm.cuda(), final_norm=norm.cuda(), qkv_bias=qkv_bias.cuda(),
        o_bias=o_bias.cuda(),
    )  # fmt: skip
    x, attn = torch.randn((rows, 192), generator=g), torch.randn((rows, 512), generator=g).bfloat16()
    acts = Activations(x=x.cuda(), attn=attn.cuda())
    b, step = binding(s, w), a_step(rows)
    run = [BY_NAME[n].bind(b) for n in ("cuda.grouped_norm_qkv", "cuda.grouped_norm_lm_head", "cuda.grouped_o")]
    h = round_activation(rms_norm(x, norm, s.norm_eps), "bf16")

    def check(outputs: Activations) -> None:
        got = torch.cat([t.flatten(1) for t in (outputs.q, outputs.k, outputs.v)], 1)
        close(got, h @ qkv_dense.T + qkv_bias.float(), 2e-3)
        close(outputs.logits, (h @ head_dense.T)[step.logit_rows.cpu().long()], 2e-3)
        close(outputs.x, x + attn.float() @ o_dense.T + o_bias, 3e-4 if kind == "q8" else 1e-5)

    eager = acts.copy()
    for launch in run:
        launch(step, eager)
    check(eager)
    graph, captured = torch.cuda.CUDAGraph(), acts.copy()
    with torch.cuda.graph(graph):
        for launch in run:
            launch(step, captured)
    graph.replay()
    torch.cuda.synchronize()
    check(captured)
    assert all(torch.equal(getattr(captured, n), getattr(eager, n)) for n in ("q", "logits", "x"))
