"""What `compare.py` rows as a receipt of the one schema: a cell for label variant and figure, with its ratio.

A plugin's figure is held against the best of the shipped variants that were run. A variant without figures is refused
with its reason. Starts nothing and times nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.kernels.cuda.decode.layers_phase import AllLayers
from halfbyte.lab import receipts
from halfbyte.lab.result import Cell, Check, Result, figure

LAYERS = ("cuda.embed", "cuda.batch_layer_fused", "cuda.batch_norm_lm_head", "cuda.prefill_layer")
# Of tg128 @ 2048, over the best shipped; elsewhere no less than that.
TARGETS = {"plugin-mxfp4": 1.5, "plugin-checkpoint": 1.25}
SINGLE = "tg128 @ 2048"
BASELINE = "plugin-baseline"


def shape_of(name: str) -> tuple[str, dict[str, int]]:
    """(kind, shape) of a figure: `pp2048`, `tg128 @ 2048`, `tg128 c8`."""
    kind, *rest = name.split()
    if kind.startswith("pp"):
        return "prompt", {"pp": int(kind[2:])}
    if rest[0] == "@":
        return "decode", {"tg": int(kind[2:]), "depth": int(rest[1])}
    return "decode", {"tg": int(kind[2:]), "depth": 128, "concurrency": int(rest[0][1:])}


def held_against(results: Mapping[str, Mapping[str, Any]], variant: str) -> dict[str, float]:
    """The best that vLLM's own kernels did: as shipped, or with the plugin beside them that runs nothing; that one is
    held against the kernel that vLLM takes by itself, on an H200 Triton's."""
    default = ("shipped",) if "figures" in results.get("shipped", {}) else ("shipped-triton",)
    best: dict[str, float] = {}
    for name, result in results.items():
        if name in default if variant == BASELINE else name.startswith("shipped") or name == BASELINE:
            for label, value in result.get("figures", {}).items():
                best[label] = max(best.get(label, 0.0), value)
    return best


def results_of(
    model: str, version: str, variants: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]],
    agreement: Mapping[str, Any],
) -> list[Result]:  # fmt: skip
    rows = []
    for name, result in results.items():
        best = held_against(results, name)
        options = variants[name][0] or {}
        gates = dict(options.get("gates", {}))
        engine = f"vllm {version}"
        detail: dict[str, Any] = {"variant": name, "start_seconds": result.get("start_seconds")}
        if name in agreement:
            detail["greedy_tokens"] = agreement[name]
        detail |= {key: result[key] for key in ("host", "step_us") if key in result}
        report = result.get("report") or {}
        if report:
            detail |= {"unit": report["unit"], "why": report["why"], "plan": report["plan"]}
        if "figures" not in result:
            cell = Cell("decode", model, gates=gates, path=name, engine=engine)
            rows.append(Result(cell, refused=result.get("reason", "no figures")[-400:], detail=detail))
            continue
        for label in result["figures"]:
            kind, shape = shape_of(label)
            cell = Cell(kind, model, gates=gates, path=name, shape=shape, engine=engine)
            values = [figures[label] for figures in result.get("rounds", [result["figures"]]) if label in figures]
            figures = [figure("speed", "tok/s", values)]
            targets: tuple[Check, ...] = ()
            if name.startswith("plugin") and best.get(label):
                ratio = result["figures"][label] / best[label]
                figures.append(figure("ratio", "ratio", ratio))
                bound = TARGETS.get(name, 0.98 if name == BASELINE else 1.0) if label == SINGLE else 0.98
                targets = (Check("over vLLM's best", ratio >= bound, round(ratio, 3), bound),)
            checks = (Check("what ran is what was chosen", not report["differences"]),) if report else ()
            rows.append(Result(cell, tuple(figures), checks, targets, report.get("record") if report else None, detail))
            report, detail = {}, {"variant": name}  # once is enough
    return rows


def sources() -> dict[str, str]:
    """File -> hash, for every source file behind the figures."""
    plugin = receipts.PACKAGE / "vllm_plugin"
    files = [*plugin.glob("*.py"), Path(__file__).with_name("child.py")]
    return receipts.measured([AllLayers(), *LAYERS]) | receipts.hashes(files)
