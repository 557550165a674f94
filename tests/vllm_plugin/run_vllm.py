"""A model in vLLM, in a process of its own: prints the tokens of a few prompts and what ran, as JSON in a line.

    python run_vllm.py '{"model": …, "gates": {…} or null, "arguments": {…}, "prompts": [[…]], "tokens": 24}'

Gates null: vLLM without a word about halfbyte. "unit": how much of a step is ours.
"""

from __future__ import annotations

import json
import os
import sys


def main(asked: dict) -> None:  # type: ignore[type-arg]
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["VLLM_PLUGINS"] = asked.get("plugins", "halfbyte")
    from vllm import LLM, SamplingParams

    arguments = {"max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True, "seed": 0} | asked["arguments"]
    if asked["gates"] is not None:
        arguments["additional_config"] = {"halfbyte": {"gates": asked["gates"], "unit": asked.get("unit", "auto")}}
    llm = LLM(model=asked["model"], skip_tokenizer_init=True, **arguments)
    params = SamplingParams(temperature=0, max_tokens=asked["tokens"], detokenize=False, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in asked["prompts"]], params, use_tqdm=False)
    report, ranks = None, []
    if "halfbyte" in os.environ["VLLM_PLUGINS"]:
        from halfbyte.vllm_plugin import compat

        here = compat.active()
        report = None if here is None else here.report()
        ranks = llm.collective_rpc("halfbyte_report")  # as the route of vLLM's own server asks
    print(json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "report": report, "ranks": ranks}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
