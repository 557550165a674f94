"""vLLM as shipped against vLLM with our plugin in it, on gpt-oss shapes with random weights and spread routing.

    python -m bench run inside-vllm --set only=plugin-mxfp4,shipped --set "figures=tg128 @ 2048,pp8192"

One process a variant (`child.py`), on one GPU that is held throughout. Each figure of the plugin's is held against the
best of the shipped backends for that figure. A variant whose record shows another kernel than the chosen one, or one
that did not start, has no figures and a reason; one that ran out of time keeps those it has. `probe=yes` asks every
variant for greedy tokens of the same weights and says where they leave those of the first variant, and by how little.
Nothing here needs a checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from bench.measurement import Column, Row, Run, SideBySide, child_command, measurement, option
from bench.vllm import child
from bench.vllm.receipt import held_against, results_of, sources
from halfbyte.errors import UsageError

LAYERS = {"120b": (36, 128), "20b": (24, 32)}
# Name -> (our part of vLLM's --additional-config, or None for vLLM alone; arguments of vLLM's LLM).
VARIANTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "shipped": (None, {}),
    "shipped-marlin": (None, {"moe_backend": "marlin"}),
    "shipped-triton": (None, {"moe_backend": "triton"}),
    "plugin-baseline": ({"gates": {"moe_kernel": "vllm", "linear_kernel": "vllm"}}, {}),
    "plugin-checkpoint": ({"gates": {}}, {}),
    "plugin-mxfp4": ({"gates": {"layers": "all"}}, {}),
    "plugin-checkpoint-operations": ({"gates": {}, "unit": "operations"}, {}),
    "plugin-mxfp4-operations": ({"gates": {"layers": "all"}, "unit": "operations"}, {}),
}
FIGURES = ("tg128 @ 2048", "tg128 c8", "tg128 c32", "tg128 c64", "pp2048", "pp8192")
SIZES = (1, 2, 4, 8, 16, 32, 64)  # of CUDA graphs: what the figures meet, so that a start is short


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


def measure(name: str, folder: Path, options: Options) -> dict[str, Any]:
    gates, arguments = VARIANTS[name]
    plugins = "" if gates is None else "halfbyte"
    env = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": plugins, "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip
    arguments = {"compilation_config": {"cudagraph_capture_sizes": list(SIZES)}} | arguments
    if options.eager:
        arguments = arguments | {"enforce_eager": True}
    question, answer = folder / f"{name}.asked.json", folder / f"{name}.json"
    body = {
        "folder": str(folder), "options": gates, "arguments": arguments, "figures": options.figures,
        "probe": options.probe, "profile": options.profile,
    }  # fmt: skip
    question.write_text(json.dumps(body), encoding="utf-8")
    command = child_command(child.run_variant, question, answer)
    reason = ""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=options.seconds)
        if done.returncode:
            reason = (done.stdout + done.stderr)[-6000:]
    except subprocess.TimeoutExpired as e:
        output = b"".join(text if isinstance(text, bytes) else b"" for text in (e.stdout, e.stderr))
        reason = f"took longer than {options.seconds:.0f} s; it said: {output.decode(errors='replace')[-3000:]}"
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if reason:
        result["reason"] = reason
    report = result.get("report")
    if gates is not None and result.get("figures") is not None and (report is None or report["differences"]):
        why = "the plugin was not active" if report is None else "; ".join(report["differences"])
        figures = result.pop("figures")  # of another kernel than the chosen one: no figures
        return result | {"reason": why, "refused": figures}
    return result


def joined(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Each figure's median over all rounds, and its value in every one. A round without figures does not count."""
    if before is None or "figures" not in before:
        return now if "figures" not in now else now | {"rounds": [now["figures"]]}
    if "figures" not in now:
        return before | {"reason": now.get("reason", "")}
    rounds = [*before["rounds"], now["figures"]]
    names = dict.fromkeys(figure for figures in rounds for figure in figures)
    samples = {name: [figures[name] for figures in rounds if name in figures] for name in names}
    return before | {"rounds": rounds, "figures": {name: round(median(values), 2) for name, values in samples.items()}}


def agreement(results: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """How far each variant's greedy tokens are the first one's, and what the first thought of the two at the end."""
    probes = {name: result["probe"] for name, result in results.items() if "probe" in result}
    if not probes:
        return {}
    first, *others = probes
    out: dict[str, list[dict[str, Any]]] = {}
    for name in others:
        out[name] = []
        for mine, reference, best in zip(probes[name]["tokens"], probes[first]["tokens"], probes[first]["best"]):
            equal = next((i for i, (a, b) in enumerate(zip(mine, reference)) if a != b), len(reference))
            row: dict[str, Any] = {"equal": equal, "of": len(reference)}
            if equal < len(reference):
                thought = dict(map(tuple, best[equal]))
                row |= {"best": best[equal][0][1], "ours": thought.get(mine[equal])}
            out[name].append(row)
    return out


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The ratio of every figure of the plugin to the best shipped one."""
    ratios = {}
    for name, result in results.items():
        if name.startswith("plugin") and "figures" in result:
            best = held_against(results, name)
            ratios[name] = {f: round(v / best[f], 3) for f, v in result["figures"].items() if best.get(f)}
    return ratios


def version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Options:
    model: str = option("120b", " or ".join(LAYERS))
    only: tuple[str, ...] = option(tuple(VARIANTS), "variants, by name")
    figures: tuple[str, ...] = option(FIGURES, "some of these, or nothing")
    probe: bool = option(False, "compare greedy tokens, too")
    profile: bool = option(False, "list the kernels of a decode step, too")
    eager: bool = option(False, "without CUDA graphs, for a quick start")
    rounds: int = option(1, "all variants in turn, so often; a figure is the median")
    seconds: float = option(500.0, "for one variant")

    def __post_init__(self) -> None:
        for kind, values, choices in (
            ("model", (self.model,), LAYERS), ("variant", self.only, VARIANTS), ("figure", self.figures, FIGURES)
        ):  # fmt: skip
            if unknown := [v for v in values if v not in choices]:
                raise UsageError(f"there is no {kind} {unknown[0]!r}; there are {', '.join(choices)}.")


def _row(label: str, kind: str, shape: dict[str, Any], over: str = "", values: tuple[Any, ...] = ("",)) -> Row:
    return Row(label, kind, "speed", model="120b", shape=shape, over=over, values=values)


@measurement(
    "inside-vllm", needs=("gpu", "vllm"), seconds=1800,
    side_by_side=(
        SideBySide(
            "inside-vllm",
            (
                Column("vLLM alone, Triton's experts", "vllm", "shipped-triton"),
                Column("Marlin's", "vllm", "shipped-marlin"),
                Column("with the plugin, checkpoint's formats", "vllm", "plugin-checkpoint"),
                Column("every layer MXFP4", "vllm", "plugin-mxfp4"),
            ),
            (
                _row("tg128 @ 2k, one stream", "decode", {"tg": 128, "depth": 2048}),
                _row("tg128, 8 / 32 / 64 streams", "decode", {"tg": 128, "depth": 128}, "concurrency", (8, 32, 64)),
                _row("pp2048 / pp8192", "prompt", {}, "pp", (2048, 8192)),
            ),
        ),
    ),
)  # fmt: skip
def inside_vllm(run: Run, options: Options) -> None:
    results: dict[str, dict[str, Any]] = {}
    run.sources |= sources()
    with tempfile.TemporaryDirectory() as folder:
        config(options.model, Path(folder))
        for name in options.only * options.rounds:
            result = measure(name, Path(folder), options)
            results[name] = joined(results.get(name), result)
            print(name, result.get("start_seconds"), json.dumps(result.get("figures")), result.get("reason", ""))
            run.results = results_of(options.model, version(), VARIANTS, results, agreement(results))
            if run.out is not None:  # after every variant: a run that is stopped keeps what it has
                run.file().write(run.out)
                raw = run.out.with_name(f"{run.out.stem}-raw{run.out.suffix}")
                raw.write_text(json.dumps(results), encoding="utf-8")
    print(json.dumps(ratios(results)), json.dumps(agreement(results)))
