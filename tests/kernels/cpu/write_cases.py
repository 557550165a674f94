"""Writes reference cases for the replay program: models, steps, the reference's logits and a bound, one file each.

    python -m tests.kernels.cpu.write_cases FOLDER

The bounds are those of test_step.py: 1e-6 a layer in the exact form; with rounded activations what the rounding costs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.formats import MXTensor, rows16
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.weights import Weights, format_of
from halfbyte.plan.step import Step
from tests.kernels.cpu.native import FORMATS, random_weights, reference_model
from tests.kernels.cpu.step_cases import QUANTISED, RAGGED, SHAPES, SMALL, steps

EXACT = {"activation": "auto", "kv_dtype": "auto"}
LONG = SMALL.with_(layer_kinds=("full", "sliding"), window=300)


def write(path: Path, model: GptOss, made: list[Step], pages: int, worst: float, mean: float) -> None:
    records = _model_records(model)
    records["pool"] = torch.tensor([pages])
    records["bound"] = torch.tensor([worst, mean], dtype=torch.float32)
    model.allocate_kv(pages)
    for i, step in enumerate(made):
        for name in ("tokens", "positions", "query_start", "kv_lens", "row_sequence", "logit_rows"):
            records[f"step.{i}.{name}"] = getattr(step, name).int()
        for kind, table in step.block_tables.items():
            records[f"step.{i}.{kind}"] = table.int()
        records[f"step.{i}.logits"] = model.forward(step)
    with path.open("wb") as file:
        file.write(b"HBCASE1\n")
        for name, tensor in records.items():
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            file.write(len(name).to_bytes(8, "little") + name.encode() + len(data).to_bytes(8, "little") + data)


def _model_records(model: GptOss) -> dict[str, Tensor]:
    c, s, w = model.config, model.spec, model.weights
    inverse, temperature = model.binding(None).rope
    sizes = [
        1, c.layers, c.hidden, c.intermediate, c.experts, c.top_k, c.heads, c.kv_heads, c.head_dim, c.vocab, c.window,
        s.page_size, c.layers_per_page, FORMATS[s.kv_dtype], FORMATS[format_of(w.embed)], int(s.activation == "int8"),
    ]  # fmt: skip
    records = {
        "model.sizes": torch.tensor(sizes, dtype=torch.int32),
        "model.numbers": torch.tensor([c.norm_eps, c.swiglu_limit, c.swiglu_alpha, temperature], dtype=torch.float32),
        "rope_inverse": inverse.float(), "embed": w.embed, "final_norm": w.final_norm.float(),
    }  # fmt: skip

    def matrix(name: str, m: Tensor | MXTensor) -> None:
        records[f"{name}.shape"] = torch.tensor([FORMATS[format_of(m)], *m.shape[-2:]])
        records[name] = rows16.pack(m).data if isinstance(m, MXTensor) else rows16.pack_dense(m)

    matrix("lm_head", w.lm_head)
    for i, layer in enumerate(w.layers):
        records[f"layer.{i}.kind"] = torch.tensor([c.layer_kinds[i] == "sliding", c.kind_index(i)], dtype=torch.int32)
        for role, value in vars(layer).items():
            if role in ("qkv", "o", "gate_up", "down"):
                matrix(f"layer.{i}.{role}", value)
            elif role != "sinks" or "sinks" in s.features_of(("attention",)):
                records[f"layer.{i}.{role}"] = value.float()
    return records


def _cost(weights: Weights, made: list[Step], pages: int) -> Tensor:
    out = []
    for gates in ({}, EXACT):
        model = reference_model(weights, **gates)
        model.allocate_kv(pages)
        out.append(torch.cat([model.forward(step) for step in made]))
    return (out[0] - out[1]).norm(dim=-1) / out[1].norm(dim=-1)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in SHAPES.items():
        made, pages = steps(config, RAGGED)
        file = name.replace(",", "").replace(" ", "-")
        for kinds, kind in (({}, "dense"), (QUANTISED, "blocks")):
            bound = 1e-6 * (config.layers + 1)
            model = reference_model(random_weights(config, kinds, 1), **EXACT)
            write(folder / f"{file}-{kind}-f32.case", model, made, pages, bound, bound)
        for kv_dtype in ("bf16", "fp8"):
            weights = random_weights(config, QUANTISED, 2)
            cost = _cost(weights, made, pages)
            model = reference_model(weights, kv_dtype=kv_dtype)
            write(
                folder / f"{file}-int8-{kv_dtype}.case", model, made, pages, 2 * float(cost.max()), float(cost.mean())
            )
    made, pages = steps(LONG, [(1200, 700), (1, 1), (3, 1)])
    model = reference_model(random_weights(LONG, {}, 1), **EXACT)
    write(folder / "long-f32.case", model, made, pages, 3e-6, 3e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
