"""Loading under a hard limit: what fits is loaded, what does not is refused with its numbers before it is allocated.

The need is the account's own: weights, KV cache, workspace, the engine's process, reserve, and what the server's
process has already. As in `serve`, one process asks and another one loads, both in the group.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfbyte.lab.peers.shared_weights import model_named, write
from halfbyte.memory import GIB, MIB
from halfbyte.model import load, synthetic
from halfbyte.model.config import ModelConfig
from tests.limited_memory import LimitedGroup, limited_group

# About 60 MB: next to the processes' own, but what is asked is whether all of it adds up.
CONFIG = ModelConfig(
    layers=1, hidden=768, intermediate=768, experts=48, top_k=4, heads=12, kv_heads=2, head_dim=64, vocab=8192,
    eos_tokens=(1,), pad_token=2,
)  # fmt: skip
OPTIONS = {"max_context": 256, "max_seqs": 2, "reserve_gib": 0.125, "page_size": 16}

PROBE = """
import asyncio, json, sys
from halfbyte.engine import sizing
from halfbyte.engine.options import EngineOptions
from halfbyte.engine.process import EngineProcess
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.errors import NotEnoughMemoryError
from halfbyte.model import load
from halfbyte.model.gpt_oss import arch_of
from halfbyte.memory import cgroup_limits, read_memory

async def answer(options):
    source = await EngineProcess.start(options)
    request = Request([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
    tokens = [token async for delta in source.stream(request) for token in delta.tokens]
    await source.close()
    return tokens

act, model, more = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = EngineOptions(model=model, device="cpu", **more)
name = load.resolve_model(model)
memory, config = read_memory("cpu"), load.config_of(name)
weights = load.weight_bytes(name, options.gates)
try:
    account = sizing.check_start(config, options, memory, arch_of("cpu"), weights)  # as `serve` does
    if act == "account":
        spec = sizing.choose(config, options.gates, arch_of("cpu"), sizing.CHECKPOINT_FORMATS, options.page_size).spec
        page = sizing.page_bytes(config, spec)
        kv = sizing.page_limits(config, options, memory, page).least * page
        limit, left = next(cgroup_limits())
        need = limit - left + weights + account.workspace + account.reserve + kv
        print(json.dumps({"need": need, "weights": weights}))
    else:
        print(json.dumps({"tokens": asyncio.run(answer(options))}))
except NotEnoughMemoryError as e:
    print(json.dumps({"refused": str(e)}))
"""


def probe(group: LimitedGroup, act: str, model: Path, options: dict[str, object]) -> dict[str, object]:
    code, out, err = group.run([sys.executable, "-c", PROBE, act, str(model), json.dumps(options)])
    assert code == 0, f"exit status {code}: {err[-2000:]}"
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model"
    synthetic.write_safetensors(CONFIG, 3, path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((load.EMBEDDED / name).read_bytes())
    return path


@pytest.fixture
def group() -> Iterator[LimitedGroup]:
    with limited_group() as made:
        yield made


def uncache(path: Path) -> None:
    """So that whoever reads it next is the one whom its pages are charged to."""
    for file in path.iterdir() if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def check(group: LimitedGroup, model: Path, options: dict[str, object]) -> None:
    group.limit(1 << 40)
    account = probe(group, "account", model, options)
    base = group.peak  # interpreter, torch, headers: what every start takes
    need = int(account["need"])  # type: ignore[call-overload]
    weights = int(account["weights"])  # type: ignore[call-overload]
    uncache(model)

    with limited_group() as wide:
        wide.limit(need * 110 // 100)
        assert len(probe(wide, "run", model, options)["tokens"]) == 4  # type: ignore[arg-type]
        print(f"need {need / MIB:.0f} MiB: with 10 % more it answered, peak {wide.peak / MIB:.0f} MiB")
        assert wide.peak > base + weights // 2, "nothing was loaded here, so nothing was shown"
    with limited_group() as narrow:
        narrow.limit(need * 95 // 100)
        refusal = str(probe(narrow, "run", model, options)["refused"])
        print(f"with 5 % less: peak {narrow.peak / MIB:.0f} MiB; {refusal}")
        assert re.match(r"not enough memory: weights [\d.]+ GiB \+ KV cache [\d.]+ GiB .* GiB short; ", refusal)
        assert "free in the cgroup" in refusal
        assert narrow.peak < base + weights // 4, "it was refused after it had begun"


def test_a_limit_just_above_the_need_and_one_just_below(group: LimitedGroup, model: Path) -> None:
    check(group, model, OPTIONS)


@pytest.mark.slow
def test_the_same_with_the_shape_of_20b(group: LimitedGroup) -> None:
    """12 GB of weights, which are written first where they are not there: minutes."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 15 * GIB and available() < 15 * GIB:
        pytest.skip(f"only {available() / GIB:.1f} GiB are available, and 15 are needed")
    check(group, write(model_named("20b-q8")), {"max_context": 4096, "max_seqs": 1, "reserve_gib": 0.5})


def available() -> int:
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1])  # type: ignore[index]
