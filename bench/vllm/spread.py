"""A plugin of vLLM that refills its dummy weights, so that tokens differ in the experts they choose.

With vLLM's own dummy values every token is sent to the same experts, and batches look two to three times too fast. A
general plugin is loaded by every process of vLLM's; this one fills the weights as they stand in a checkpoint, before
vLLM packs them for its kernels. `entry_point` makes a folder for PYTHONPATH by which vLLM finds it.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

NAME = "halfbyte_spread"  # for VLLM_PLUGINS
PACKAGE = "halfbyte_spread-1.dist-info"


def register() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    if getattr(DummyModelLoader.load_weights, "spreads", False):  # vLLM may ask twice
        return

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        fill(model, model_config.hf_config)
        print("Using spread weights: tokens differ in their experts", flush=True)

    load_weights.spreads = True  # type: ignore[attr-defined]
    DummyModelLoader.load_weights = load_weights  # type: ignore[method-assign]


def fill(model: Any, config: Any) -> None:
    """Random numbers that behave: wide enough that tokens differ in the experts they choose, and by names alone."""
    import torch

    experts, inner, hidden = config.num_local_experts, config.intermediate_size, config.hidden_size
    routing = {
        "w13_weight": (experts, 2 * inner, hidden // 2), "w13_weight_scale": (experts, 2 * inner, hidden // 32),
        "w2_weight": (experts, hidden, inner // 2), "w2_weight_scale": (experts, hidden, inner // 32),
        "w13_bias": (experts, 2 * inner), "w2_bias": (experts, hidden),
    }  # fmt: skip
    for name, p in model.named_parameters():
        if not p.numel():
            continue
        size = tuple(p.shape)
        if p.dtype == torch.uint8 or name.endswith("_bias"):  # of experts: a kernel may want rows beyond the model's
            size = routing.get(name.rpartition(".")[2], size)
        seed = torch.Generator(device=p.device).manual_seed(zlib.crc32(name.encode()))
        x = torch.empty(size, dtype=p.dtype, device=p.device)
        if p.dtype == torch.uint8:
            x.random_(112, 120, generator=seed) if "scale" in name else x.random_(0, 256, generator=seed)
        elif "norm" in name:
            x.fill_(1.0)
        elif "embed" in name or "sinks" in name:
            x.normal_(0, 1, generator=seed)
        else:
            x.normal_(0, 0.05 if "router" in name else 0.02, generator=seed)
        if size != tuple(p.shape):
            p.data.zero_()
        p.data[tuple(slice(n) for n in size)].copy_(x)


def entry_point(folder: Path) -> Path:
    """A package with nothing but the entry point."""
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbyte_spread\nVersion: 1\n", encoding="utf-8")
    points = f"[vllm.general_plugins]\n{NAME} = bench.vllm.spread:register\n"
    (package / "entry_points.txt").write_text(points, encoding="utf-8")
    return folder
