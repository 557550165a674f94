"""The CPU kernels' C interface over torch tensors, and random small models that the reference runs, too."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import MXTensor, rows16
from halfbyte.gates import Gates, PerRegime
from halfbyte.kernels.cpu.library import LayerStruct, MatrixStruct, ModelStruct
from halfbyte.kernels.cpu.library import StepStruct as RawStep
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.weights import LayerWeights, Weights, format_of
from halfbyte.plan.step import Step

FORMATS = {"f32": 0, "f16": 1, "bf16": 2, "q8": 3, "mxfp4": 4, "fp8": 5}
POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def aligned(t: Tensor) -> Tensor:
    """The same bytes at an address that is a multiple of 64."""
    flat = t.contiguous().view(torch.uint8).flatten()
    room = torch.empty(flat.numel() + 64, dtype=torch.uint8)
    start = -room.data_ptr() % 64
    return room[start : start + flat.numel()].copy_(flat)


@dataclass
class Result:
    logits: Tensor
    best: list[int]
    best_logit: list[float]
    taps: Tensor


class Native:
    """A model behind the C interface. Keeps every tensor whose address it has given away."""

    def __init__(
        self, library: ctypes.CDLL, reference: GptOss, *, threads: int = 1, most_rows: int = 64, int8: bool = True,
        cores: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.library, self.reference, self._kept = library, reference, []
        self.raw = self._model(reference, int8)
        self.pool = library.hb_pool_create(threads, None if cores is None else (INT * threads)(*cores))
        error = ctypes.create_string_buffer(400)
        made = library.hb_create(ctypes.byref(self.raw), POINTER(self.pool), most_rows, error, LONG(400))
        assert made, error.value.decode()
        self.instance = made

    def close(self) -> None:
        self.library.hb_destroy(POINTER(self.instance))
        self.library.hb_pool_destroy(POINTER(self.pool))

    def __enter__(self) -> Native:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self, t: Tensor | None) -> int | None:
        if t is None:
            return None
        self._kept.append(t)
        return t.data_ptr()

    def _floats(self, t: Tensor) -> int | None:
        return self.keep(t.float().contiguous())

    def _matrix(self, w: Any) -> MatrixStruct:
        rows, cols = w.shape[-2:]
        data = rows16.pack(w).data if isinstance(w, MXTensor) else rows16.pack_dense(w)
        return MatrixStruct(FORMATS[format_of(w)], 0, rows, cols, self.keep(aligned(data)))

    def _model(self, model: GptOss, int8: bool) -> ModelStruct:
        c, s, w = model.config, model.spec, model.weights
        sinks = "sinks" in s.features_of(("attention",))
        layers = (LayerStruct * c.layers)()
        for i, layer in enumerate(w.layers):
            for role in (
                "attn_norm",
                "mlp_norm",
                "qkv_bias",
                "o_bias",
                "router",
                "router_bias",
                "gate_up_bias",
                "down_bias",
            ):
                setattr(layers[i], role, self._floats(getattr(layer, role)))
            for role in ("qkv", "o", "gate_up", "down"):
                setattr(layers[i], role, self._matrix(getattr(layer, role)))
            layers[i].sinks = self._floats(layer.sinks) if sinks else None
            layers[i].sliding = int(c.layer_kinds[i] == "sliding")
            layers[i].kind_index = c.kind_index(i)
        inverse, temperature = model.binding(None).rope
        return ModelStruct(
            1, c.layers, c.hidden, c.intermediate, c.experts, c.top_k, c.heads, c.kv_heads, c.head_dim, c.vocab,
            c.window, s.page_size, c.layers_per_page, FORMATS[s.kv_dtype], FORMATS[format_of(w.embed)], int(int8),
            c.norm_eps, c.swiglu_limit, c.swiglu_alpha, self._floats(inverse), temperature,
            self.keep(w.embed.contiguous()), layers, self._floats(w.final_norm), self._matrix(w.lm_head),
        )  # fmt: skip

    def run(self, step: Step, pool: Tensor, *, taps: Sequence[int] = (), logits: bool = True) -> Result:
        code, sentence, result = self.attempt(step, pool, taps=taps, logits=logits)
        assert code == 0, sentence
        return result

    def attempt(
        self, step: Step, pool: Tensor, *, taps: Sequence[int] = (), logits: bool = True
    ) -> tuple[int, str, Result]:
        c, count = self.reference.config, step.logit_rows.shape[0]
        ints = {
            name: getattr(step, name).int().contiguous()
            for name in ("tokens", "positions", "query_start", "kv_lens", "row_sequence", "logit_rows")
        }
        tables = {kind: t.int().contiguous() for kind, t in step.block_tables.items()}
        out = torch.full((count, c.vocab), 7.0)
        best, best_logit = torch.full((count,), -7, dtype=torch.int32), torch.zeros(count)
        tap_layers, tapped = torch.tensor(taps, dtype=torch.int32), torch.zeros((len(taps), step.rows, c.hidden))
        raw = RawStep(
            step.rows, step.sequences, count, step.max_kv_len,
            *(ints[n].data_ptr() for n in ("tokens", "positions", "query_start", "kv_lens", "row_sequence")),
            tables["sliding"].data_ptr(), tables["full"].data_ptr(), tables["full"].shape[1],
            ints["logit_rows"].data_ptr(), pool.data_ptr(), pool.shape[0], out.data_ptr() if logits else None,
            best.data_ptr(), best_logit.data_ptr(), tap_layers.data_ptr(), len(taps), tapped.data_ptr(),
        )  # fmt: skip
        error = ctypes.create_string_buffer(400)
        code = self.library.hb_run(POINTER(self.instance), ctypes.byref(raw), error, LONG(400))
        return code, error.value.decode(), Result(out, best.tolist(), best_logit.tolist(), tapped)


# ---- random models ---------------------------------------------------------------------------------------------------


def random_weights(
    config: ModelConfig, kinds: Mapping[str, str], seed: int, router_bias: Tensor | None = None
) -> Weights:
    """Any sizes, any formats: a network that neither dies out nor explodes."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=gen) * std + mean).bfloat16().float()

    def matrix(role: str, *shape: int, gain: float = 1.0) -> Any:
        values = torch.randn(shape, generator=gen) * gain / shape[-1] ** 0.5
        kind = kinds.get(role, "bf16")
        if kind in ("q8", "mxfp4"):
            return formats.quantize(values, kind)
        return values.to({"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind])

    c = config
    layers = [
        LayerWeights(
            attn_norm=normal(c.hidden, std=0.1, mean=1.0), qkv=matrix("qkv", c.qkv_dim, c.hidden, gain=1.25),
            qkv_bias=normal(c.qkv_dim, std=0.1), sinks=normal(c.heads, std=1.5, mean=1.0),
            o=matrix("o", c.hidden, c.q_dim), o_bias=normal(c.hidden, std=0.05),
            mlp_norm=normal(c.hidden, std=0.1, mean=1.0), router=normal(c.experts, c.hidden, std=1.5 / c.hidden**0.5),
            router_bias=normal(c.experts, std=0.1) if router_bias is None else router_bias,
            gate_up=matrix("gate_up", c.experts, 2 * c.intermediate, c.hidden, gain=2.0),
            gate_up_bias=normal(c.experts, 2 * c.intermediate, std=0.1),
            down=matrix("down", c.experts, c.hidden, c.intermediate, gain=0.3),
            down_bias=normal(c.experts, c.hidden, std=0.02),
        )
        for _ in range(c.layers)
    ]  # fmt: skip
    embed = normal(c.vocab, c.hidden).to(
        {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kinds.get("embed", "bf16")]
    )
    return Weights(
        c, embed, layers, normal(c.hidden, std=0.1, mean=1.0), matrix("lm_head", c.vocab, c.hidden, gain=2.0)
    )


def reference_model(
    weights: Weights, *, activation: str = "int8", kv_dtype: str = "bf16", sinks: str = "auto", page_size: int = 64
) -> GptOss:
    plain = PerRegime("reference", "reference", "reference")
    gates = Gates(
        moe_kernel=plain,
        linear_kernel=plain,
        attention="reference",
        activation=activation,
        kv_dtype=kv_dtype,
        sinks=sinks,
    )
    return GptOss(weights, gates, page_size=page_size)


def make_step(
    parts: Sequence[tuple[Sequence[int], int]], pages: Mapping[str, Tensor], logit_rows: Sequence[int] | None = None
) -> Step:
    """`parts`: of each sequence its tokens in this step and where they begin; `pages`: kind -> [S, blocks]."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32)

    starts = [0]
    for tokens, _ in parts:
        starts.append(starts[-1] + len(tokens))
    lens = [at + len(tokens) for tokens, at in parts]
    rows = starts[-1]
    return Step(
        tokens=ints([t for tokens, _ in parts for t in tokens]),
        positions=ints([at + i for tokens, at in parts for i in range(len(tokens))]),
        query_start=ints(starts), kv_lens=ints(lens),
        row_sequence=ints([s for s, (tokens, _) in enumerate(parts) for _ in tokens]),
        block_tables=dict(pages), logit_rows=ints(range(rows) if logit_rows is None else logit_rows),
        max_kv_len=max(lens),
    )  # fmt: skip
