"""Measurements that `halfbyte`, pytest or a script of training/ makes: the command, and its rows of README's table."""

from __future__ import annotations

from typing import Any

from bench.measurement import Row, commands

command = commands(__name__)

GPU = ("gpu",)
BENCH = "halfbyte bench random:120b --preset fast"
SERVED = f"{BENCH} --pp 2048 --tg 128 --depth 2048 --concurrency 1,8 --served"
ENGINE: dict[str, Any] = {"path": "engine", "model": "120b", "preset": "fast"}
PROMPTS: dict[str, Any] = {
    "shape": {"depth": 0, "concurrency": 1}, "over": "pp", "values": (512, 2048, 8192), **ENGINE,
}  # fmt: skip
RATIO: dict[str, Any] = {
    "path": "http / engine", "model": "120b", "shape": {"depth": 2048}, "over": "concurrency", "values": (1, 8),
}  # fmt: skip

command("gpu-tests", "python -m pytest -q --tb=short -p no:cacheprovider -m gpu -n auto --dist worksteal tests",
        needs=GPU, seconds=400, receipt=False)  # fmt: skip
command(
    "engine-depths", f"{BENCH} --pp 2048 --tg 128 --depth 512,2048,8192,32768", needs=GPU, seconds=240,
    rows=(Row("decode @ 2k through the engine, every layer MXFP4", "decode", "speed", headline=True,
              shape={"tg": 128, "depth": 2048, "concurrency": 1}, command=f"{BENCH} --tg 128 --depth 2048",
              **ENGINE),),
)  # fmt: skip
command(
    "engine-streams", f"{BENCH} --pp '' --tg 128 --depth 128 --concurrency 1,8,32,64", needs=GPU, seconds=240,
    rows=(Row("engine, total at 8 / 32 / 64 streams of 128 tokens", "decode", "speed", shape={"tg": 128, "depth": 128},
              headline=True, over="concurrency", values=(8, 32, 64),
              command=f"{BENCH} --tg 128 --depth 128 --concurrency 8,32,64", **ENGINE),),
)  # fmt: skip
command(
    "engine", f"{BENCH} --pp 512,2048,8192 --tg 128 --depth 0 --require-native", needs=GPU, seconds=240,
    rows=(Row("engine, pp512 / pp2048 / pp8192", "prompt", "speed", gates={}, command=f"{BENCH} --pp 512,2048,8192",
              headline=True, **PROMPTS),),
)  # fmt: skip
command(
    "engine-fp8", f"{BENCH} --activation long=fp8 --pp 512,2048,8192 --tg ''", needs=GPU, seconds=150,
    rows=(Row("the same, fp8 from 3072 rows on", "prompt", "speed", gates={"activation": "long=fp8"},
              command=f"{BENCH} --activation long=fp8 --pp 512,2048,8192", **PROMPTS),),
)  # fmt: skip
command(
    "served", SERVED, needs=GPU, seconds=300,
    rows=(
        Row("over HTTP, of the engine's own: decode @ 2k, 1 / 8 streams", "served decode", "ratio", **RATIO),
        Row("over HTTP, of the engine's own: pp2048 @ 2k, 1 / 8 streams", "served prompt", "ratio", **RATIO),
    ),
)  # fmt: skip
command("graph", f"{BENCH} --graph --pp 2048 --tg 128 --depth 128,2048 --concurrency 1,8,32,64 --no-check", needs=GPU,
        seconds=150)  # fmt: skip
command("sustained", f"{BENCH} --pp '' --tg '' --depth 128 --concurrency 1,8,32,64 --sustain 3 --no-check", needs=GPU,
        seconds=90)  # fmt: skip
command("phases", f"{BENCH} --pp '' --tg '' --depth 2048 --phases 1,8,64,320,2048 --no-check", needs=GPU, seconds=120)
