"""vLLM as shipped against vLLM with our plugin in it, on gpt-oss shapes with random weights and spread routing.

    python -m bench.vllm.compare 120b OUT.json [--only plugin-mxfp4,shipped] [--quick]

One process a variant, on one GPU that is held throughout. Each figure of the plugin's is held against the best of the
shipped backends for that figure. A variant whose record shows another kernel than the chosen one, or one that did not
start, has no figures and a reason. Nothing here needs a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS = {"120b": (36, 128), "20b": (24, 32)}
# Name -> (gates of the plugin, or None for vLLM alone; arguments of vLLM's LLM).
VARIANTS: dict[str, tuple[dict[str, str] | None, dict[str, Any]]] = {
    "shipped": (None, {}),
    "shipped-marlin": (None, {"moe_backend": "marlin"}),
    "shipped-triton": (None, {"moe_backend": "triton"}),
    "plugin-baseline": ({"moe_kernel": "vllm", "linear_kernel": "vllm"}, {}),
    "plugin-checkpoint": ({}, {}),
    "plugin-checkpoint-dense": ({"linear_kernel": "cuda"}, {}),
    "plugin-mxfp4": ({"layers": "all"}, {}),
}
TARGETS = {"plugin-mxfp4": 1.5, "plugin-checkpoint": 1.25}  # of tg128 @ 2048, over the best shipped


def config(name: str, folder: Path) -> None:
    layers, experts = LAYERS[name]
    body = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "eos_token_id": 200002, "pad_token_id": 199999, "experts_per_token": 4,
        "num_experts_per_tok": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_hidden_layers": layers, "num_key_value_heads": 8, "num_local_experts": experts,
        "output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "use_cache": True, "vocab_size": 201088, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(body), encoding="utf-8")


# ---- one variant, in a process of its own ----------------------------------------------------------------------------


def spread(weights: Any) -> None:
    """Random numbers that behave: wide enough that tokens differ in the experts they choose."""
    import torch

    from halfbyte.formats import MXTensor

    for weight in weights.values():
        if isinstance(weight, MXTensor):
            weight.data.random_(0, 256)
            weight.scales.random_(112, 120)
        elif isinstance(weight, torch.Tensor) and weight.ndim == 2:
            weight.normal_(0, 0.02)


def spread_vllm(model: Any) -> None:
    """The same for what vLLM holds itself, packed or not."""
    import torch

    for name, p in model.named_parameters():
        if not p.numel():
            continue
        if p.dtype == torch.uint8:
            p.data.random_(112, 120) if "scale" in name else p.data.random_(0, 256)
        elif p.dtype == torch.int32:
            p.data.random_(-(2**31), 2**31 - 1)  # Marlin's packing
        elif not p.is_floating_point() or p.itemsize < 2 or any(w in name for w in ("norm", "sinks", "scale")):
            continue
        elif "embed" in name:
            p.data.normal_(0, 1)
        elif p.dim() >= 2:
            p.data.normal_(0, 0.05 if "router" in name else 0.02)


def child(folder: str, gates: dict[str, str] | None, arguments: dict[str, Any], quick: bool) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    if gates is not None:
        from halfbyte.vllm_plugin.inside import Inside

        bind = Inside.bind

        def bind_spread(self: Inside, operation: str, layer: int | None, **weights: Any) -> Any:
            spread(weights)
            return bind(self, operation, layer, **weights)

        Inside.bind = bind_spread  # type: ignore[method-assign]
        arguments = arguments | {"additional_config": {"halfbyte": {"gates": gates}}}
    began = time.time()
    llm = LLM(
        model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=34816, max_num_batched_tokens=8192,
        gpu_memory_utilization=0.9, enable_prefix_caching=False, max_num_seqs=64, seed=0, **arguments,
    )  # fmt: skip
    start = round(time.time() - began, 1)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    spread_vllm(worker.model_runner.model)
    rng = random.Random(0)

    def run(prompt: int, generated: int, streams: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(200000) for _ in range(prompt)]} for _ in range(streams)]
        params = SamplingParams(max_tokens=generated, ignore_eos=True, temperature=1.0, detokenize=False)
        before = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - before
        assert all(len(o.outputs[0].token_ids) == generated for o in outputs)
        return seconds

    figures: dict[str, float] = {}
    run(2048, 8, 1)
    for prompt in (2048,) if quick else (2048, 8192):
        first = sorted(run(prompt, 1, 1) for _ in range(4))[1]
        figures[f"pp{prompt}"] = round(prompt / first, 1)
        if prompt == 2048:
            whole = sorted(run(prompt, 129, 1) for _ in range(3))[1]
            figures["tg128 @ 2048"] = round(128 / (whole - first), 2)
    for streams in (8,) if quick else (8, 32, 64):
        run(128, 8, streams)
        first, whole = (min(run(128, n, streams) for _ in range(2)) for n in (1, 129))
        figures[f"tg128 c{streams}"] = round(streams * 128 / (whole - first), 1)
    report = None
    if gates is not None:
        from halfbyte.vllm_plugin import compat

        here = compat.active()
        report = None if here is None else here.report()
    return {"figures": figures, "start_seconds": start, "report": report}


# ---- all of them -----------------------------------------------------------------------------------------------------


def measure(name: str, folder: Path, quick: bool, seconds: float) -> dict[str, Any]:
    gates, arguments = VARIANTS[name]
    plugins = "" if gates is None else "halfbyte"
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": plugins, "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    asked = json.dumps([str(folder), gates, arguments, quick])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.vllm.compare", "--child", asked], env=env, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"reason": f"took longer than {seconds:.0f} s"}
    if done.returncode:
        return {"reason": (done.stdout + done.stderr)[-1500:]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    report = result["report"]
    if gates is not None and (report is None or report["differences"]):
        why = "the plugin was not active" if report is None else "; ".join(report["differences"])
        return {"reason": why, "report": report}  # a figure of another kernel is no figure
    return result


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of every figure of the plugin's to the best shipped one."""
    best: dict[str, float] = {}
    for name, result in results.items():
        if name.startswith("shipped"):
            for figure, value in result.get("figures", {}).items():
                best[figure] = max(best.get(figure, 0.0), value)
    return {
        name: {f: round(v / best[f], 3) for f, v in result["figures"].items() if best.get(f)}
        for name, result in results.items()
        if name.startswith("plugin") and "figures" in result
    }


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=LAYERS)
    parser.add_argument("out", nargs="?")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--only", help="variants, by name")
    parser.add_argument("--quick", action="store_true", help="pp2048, tg128 and eight streams only")
    parser.add_argument("--seconds", type=float, default=500, help="for one variant")
    asked = parser.parse_args(words)
    if asked.child:
        print(json.dumps(child(*json.loads(asked.child))))
        return
    if asked.out is None:
        parser.error("name a model and a file for the result")
    chosen = asked.only.split(",") if asked.only else list(VARIANTS)
    unknown = [name for name in chosen if name not in VARIANTS]
    if unknown:
        parser.error(f"there is no variant {unknown[0]}; the variants are {', '.join(VARIANTS)}")
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config(asked.model, Path(folder))
        for name in chosen:
            results[name] = measure(name, Path(folder), asked.quick, asked.seconds)
            print(name, json.dumps(results[name].get("figures") or results[name]["reason"][-300:]), flush=True)
            body = {"model": asked.model, "results": results, "ratios": ratios(results), "targets": TARGETS}
            Path(asked.out).write_text(json.dumps(body, indent=1), encoding="utf-8")
    print(json.dumps(ratios(results)))


if __name__ == "__main__":
    main()
