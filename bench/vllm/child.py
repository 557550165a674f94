"""One variant of `bench/vllm/compare.py`, in a process of its own: vLLM on random weights, timed, probed or profiled.

The result is written anew after every figure, so that a process that is ended leaves what it has. Weights are random by
their names alone (`spread.py`): variants that hold the same numbers are asked the same questions.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.vllm import host, spread

PROBES = (20, 300, 2048)  # lengths of prompts
PROBED = 24  # tokens


def start(case: dict[str, Any]) -> tuple[Any, float]:
    from vllm import LLM

    spread.register()
    arguments = dict(case["arguments"])
    if case["options"] is not None:
        arguments["additional_config"] = {"halfbyte": case["options"]}
    began = time.time()
    llm = LLM(
        model=case["folder"], load_format="dummy", skip_tokenizer_init=True, max_model_len=34816,
        max_num_batched_tokens=8192, gpu_memory_utilization=0.9, enable_prefix_caching=False, max_num_seqs=64, seed=0,
        **arguments,
    )  # fmt: skip
    return llm, round(time.time() - began, 1)


def generate(llm: Any, prompts: list[list[int]], tokens: int, **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, **sampling)
    outputs: list[Any] = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
    return outputs


def probe(llm: Any) -> dict[str, Any]:
    """Greedy tokens of a few prompts, alone and together, with the best five of every token."""
    rng = random.Random(1)
    prompts = [[rng.randrange(200000) for _ in range(n)] for n in PROBES]
    alone = [generate(llm, [p], PROBED, temperature=0.0, logprobs=5)[0] for p in prompts]
    together = generate(llm, prompts * 3, PROBED, temperature=0.0)

    def best(entry: Any) -> list[list[float]]:
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
        return [[token, round(value.logprob, 5)] for token, value in ranked]

    return {
        "tokens": [list(o.outputs[0].token_ids) for o in alone],
        "best": [[best(entry) for entry in o.outputs[0].logprobs] for o in alone],
        "together": [list(o.outputs[0].token_ids) for o in together[:3]],
        "read_again": [read_again(llm, list(p), list(o.outputs[0].token_ids)) for p, o in zip(prompts, alone)],
    }


def read_again(llm: Any, prompt: list[int], tokens: list[int]) -> list[list[float]]:
    """The log-probability of each token when a prompt's kernels read all of them: what decoding wrote into the pages
    and read from them must agree with it."""
    if len(prompt) > 400:
        return []
    output = generate(llm, [prompt + tokens], 1, temperature=0.0, prompt_logprobs=1)[0]
    logprobs = output.prompt_logprobs[len(prompt) :]
    return [[token, round(entry[token].logprob, 5)] for token, entry in zip(tokens, logprobs)]


def profile(llm: Any, streams: int) -> list[str]:
    """The kernels of 32 decode steps, by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    rng = random.Random(2)
    prompts = [[rng.randrange(200000) for _ in range(2048 if streams == 1 else 128)] for _ in range(streams)]
    generate(llm, prompts, 4, temperature=1.0)
    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        generate(llm, prompts, 33, temperature=1.0)
    kernels = [e for e in seen.key_averages() if e.device_time_total > 0 and e.self_device_time_total > 0]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return [
        f"{e.self_device_time_total / 32:9.1f} us a step {e.count / 32:7.1f} times  {e.key[:110]}" for e in kernels[:28]
    ]


class VllmTiming:
    def __init__(self, llm: Any) -> None:
        self.llm, self.rng = llm, random.Random(0)

    def run(self, prompt: int, generated: int, streams: int) -> float:
        prompts = [[self.rng.randrange(200000) for _ in range(prompt)] for _ in range(streams)]
        before = time.perf_counter()
        generate(self.llm, prompts, generated, temperature=1.0)
        return time.perf_counter() - before

    def figure(self, name: str) -> float:
        kind, *rest = name.split()
        if kind.startswith("pp"):
            prompt = int(kind[2:])
            for _ in range(3):  # kernels that are tuned or compiled when they meet a shape, on the way to their pace
                self.run(prompt, 1, 1)
            return round(prompt / median(self.run(prompt, 1, 1) for _ in range(7)), 1)
        if rest[0] == "@":  # one stream behind a prompt
            prompt = int(rest[1])
            self.run(prompt, 8, 1)
            first, full = (median(self.run(prompt, n, 1) for _ in range(3)) for n in (1, 129))
            return round(128 / (full - first), 2)
        streams = int(rest[0][1:])
        self.run(128, 8, streams)
        first, full = (min(self.run(128, n, streams) for _ in range(2)) for n in (1, 129))
        return round(streams * 128 / (full - first), 1)


def run_variant(asked_at: str, result_at: str) -> None:
    case = json.loads(Path(asked_at).read_text(encoding="utf-8"))
    result: dict[str, Any] = {"figures": {}}

    def write(**more: Any) -> None:
        if case["options"] is not None:
            from halfbyte.vllm_plugin import compat

            here = compat.active()
            result["report"] = None if here is None else here.report()
        result.update(more)
        part = Path(f"{result_at}.part")
        part.write_text(json.dumps(result), encoding="utf-8")
        part.replace(result_at)

    llm, seconds = start(case)
    write(start_seconds=seconds)
    write(host=host.facts())
    if case["probe"]:
        write(probe=probe(llm))
    timing = VllmTiming(llm)
    for name in case["figures"]:
        result["figures"][name] = timing.figure(name)
        write()
    if "tg128 @ 2048" in case["figures"]:
        with host.CallTimes().over() as watch:
            timing.run(2048, 129, 1)
        write(step_us=watch.medians())
    if case["profile"]:
        write(profile={str(streams): profile(llm, streams) for streams in (1, 8)})
