"""A plugin of vLLM that refills its dummy weights, so that tokens differ in the experts they choose.

With vLLM's own dummy values every token is sent to the same experts, and batches look two to three times too fast. A
general plugin is loaded by every process of vLLM's; this one fills the weights as they stand in a checkpoint, before
vLLM packs them for its kernels. `entry_point` makes a folder for PYTHONPATH by which vLLM finds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NAME = "halfbyte_spread"  # for VLLM_PLUGINS
PACKAGE = "halfbyte_spread-1.dist-info"


def register() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from bench.vllm.compare import spread_vllm

    plain = DummyModelLoader.load_weights
    if getattr(plain, "spreads", False):  # vLLM may ask twice
        return

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        plain(self, model, model_config)
        spread_vllm(model)
        print("Using spread weights: tokens differ in their experts", flush=True)

    load_weights.spreads = True  # type: ignore[attr-defined]
    DummyModelLoader.load_weights = load_weights  # type: ignore[method-assign]


def entry_point(folder: Path) -> Path:
    """A package with nothing but the entry point."""
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: halfbyte_spread\nVersion: 1\n", encoding="utf-8")
    points = f"[vllm.general_plugins]\n{NAME} = bench.vllm.spread:register\n"
    (package / "entry_points.txt").write_text(points, encoding="utf-8")
    return folder
