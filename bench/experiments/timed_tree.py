"""One side of `two_trees.py`, in a process that imports halfbyte from another checkout.

Imports nothing of the workshop and of halfbyte only what it times. Knows two names of a few functions, because an older
checkout may have been made before they were renamed.
"""

from __future__ import annotations

import json
import sys
import time

DECODE = ((1, 2048), (8, 128), (32, 128), (64, 128))  # rows, context
PROMPTS = (512, 2048, 8192)


def answer(model_name: str, preset: str) -> None:
    """In one checkout: loads, then answers every line with one JSON object of microseconds."""
    import torch

    from halfbyte import gates

    try:
        from halfbyte.lab.measure import device_timing as timing
        from halfbyte.model.load import load_model, resolve_model
    except ImportError:  # before the rooms were folders
        from halfbyte.model.ready import load as load_model
        from halfbyte.model.ready import resolve as resolve_model

        from halfbyte.lab import speed as timing
    capture = getattr(timing, "capture_decode", None) or timing._decoding
    with torch.inference_mode():
        model = load_model(resolve_model(model_name), gates.PRESETS[preset].gates, device="cuda")
        print("ready", flush=True)
        for line in sys.stdin:
            seed = int(line)
            times: dict[str, float] = {}
            for rows, context in DECODE:
                graph, begin = capture(model, timing.fill(model, rows, context + 192), context)
                begin(seed)
                graph.replay()
                times[f"tg128 @ d{context}, c={rows}"] = timing.device_us(graph.replay, 127)
                del graph, begin
            for n in PROMPTS:
                cache = timing.fill(model, 1, n)
                runs = []
                for again in range(3):
                    step = timing.prefill_step(model, cache, timing.random_tokens(model, n, seed + again), 0)
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    int(model.forward(step)[0].argmax())
                    runs.append(time.perf_counter() - start)
                times[f"pp{n}"] = 1e6 * min(runs)
            print(json.dumps(times), flush=True)
