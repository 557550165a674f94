"""From safetensors on a RAM disk to an engine that answers: seconds cold and warm, and GPU memory at its peak.

    python -m bench run start --set models=120b --set presets=exact,fast

Writes a checkpoint of the true shape (random, drawn on the GPU, OpenAI's layout and shards) once, then starts a fresh
process per case: `cold` with an empty kernel cache, `warm` with the cache that the cold one left. The clock runs from
the start of the process (imports included) to the end of the first answer. Afterwards weights are drawn again and
compared with what was loaded, bit for bit. `written=N` writes N layers; the others have places of their own in the
files with nothing in them, which read as zeros: every layer is still read, laid out and kept, but the RAM disk holds
less, and a hole is read a little faster than bytes are. `layers=N` loads fewer, and the
time of all is scaled up from the time spent on weights, and says so. Peak memory is what the driver reports in use at
most, the context included, beyond weights and KV.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.measurement import Row, Run, child_command, last_line, measurement, option
from halfbyte.gates import child_environment
from halfbyte.lab.result import Cell, Check, Result, figure

LIMITS = {"warm": 30.0, "cold": 90.0}  # seconds, 120b
EXTRA_GIB = 2.0
GIB = 1 << 30
PIECE, WRITERS = 32 << 20, 16
# What a start goes through; kernels only add the time to compile them, which their own receipts are not about.
LOADING = (
    "model/load.py", "model/checkpoint.py", "model/safetensors_io.py", "model/weight_file.py", "model/upload.py",
    "model/weights.py", "formats/layouts.py", "formats/tile16.py", "formats/blocks.py",
    "engine/build.py",
)  # fmt: skip
SHARD = 5_000_000_000


# ---- the checkpoint -------------------------------------------------------------------------------------------------


def config_of(model: str, layers: int) -> Any:
    from halfbyte.model.config import NAMED

    config = NAMED[model]
    return replace(config, layers=layers, layer_kinds=config.layer_kinds[:layers])


def checkpoint_bytes(config: Any) -> int:
    from halfbyte.model.synthetic import SyntheticSource
    from halfbyte.model.weights import roles

    source = SyntheticSource(config, 0)
    return sum(source.nbytes(layer, role) for layer, role in roles(config))


def write(config: Any, folder: Path, written: int, device: str = "cuda") -> None:
    """The folder that `safetensors_writer.write_folder` would write, by many threads at once; layers from `written` on
    are holes in the files."""
    import torch

    from halfbyte.model import safetensors_writer as st
    from halfbyte.model.safetensors_io import INDEX
    from halfbyte.model.synthetic import SyntheticSource
    from halfbyte.model.weights import split_parts

    source = SyntheticSource(config, 0, device)
    shards: list[list[Any]] = [[]]
    size = 0
    for p in st.output_tensors(source):
        if shards[-1] and size + p.nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(p)
        size += p.nbytes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(st.folder_config(source)), encoding="utf-8")
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    headers, weight_map = [], {}
    for name, shard in zip(names, shards):
        items: dict[str, Any] = {}
        offset = 0
        for p in shard:
            items[p.name] = {
                "dtype": st.DTYPE_NAMES[p.dtype],
                "shape": list(p.shape),
                "data_offsets": [offset, offset + p.nbytes],
            }
            weight_map[p.name] = name
            offset += p.nbytes
        raw = json.dumps(items, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        headers.append(len(raw).to_bytes(8, "little") + raw)
    index = {"metadata": {"total_size": checkpoint_bytes(config)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    free = deque(torch.empty(PIECE, dtype=torch.uint8, pin_memory=device == "cuda") for _ in range(WRITERS + 2))
    flying: deque[tuple[Future[None], Any]] = deque()

    def put(fd: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    def land() -> None:
        future, buffer = flying.popleft()
        future.result()
        free.append(buffer)

    cached: tuple[Any, Any] = (None, None)
    with ThreadPoolExecutor(WRITERS) as pool:
        for name, shard, header in zip(names, shards, headers):
            fd = os.open(folder / name, os.O_CREAT | os.O_WRONLY, 0o644)
            put(fd, memoryview(header), 0)
            offset = len(header)
            os.ftruncate(fd, len(header) + sum(p.nbytes for p in shard))
            for p in shard:
                if p.layer is not None and p.layer >= written:
                    offset += p.nbytes
                    continue
                if cached[0] != (p.layer, p.role):
                    cached = (None, None)
                    cached = (p.layer, p.role), split_parts(config, p.role, source.parts(p.layer, p.role))
                flat = p.cut(cached[1][p.part]).contiguous().view(-1).view(torch.uint8)
                for at in range(0, flat.numel(), PIECE):
                    if not free:
                        land()
                    buffer, part = free.popleft(), flat[at : at + PIECE]
                    buffer[: part.numel()].copy_(part)
                    view = memoryview(buffer.numpy().data)[: part.numel()]
                    flying.append((pool.submit(put, fd, view, offset + at), buffer))
                offset += p.nbytes
            while flying:
                land()
            os.close(fd)


# ---- one case, in a process of its own ------------------------------------------------------------------------------


class Watch(threading.Thread):
    """The least free memory the driver ever reported."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.least, self.total, self.on = 1 << 62, 0, True

    def run(self) -> None:
        import torch

        while self.on:
            free, self.total = torch.cuda.mem_get_info()
            self.least = min(self.least, free)
            time.sleep(0.005)

    @property
    def used(self) -> int:
        return self.total - self.least


def write_checkpoint(model: str, layers: int, folder: str, written: int, began: float) -> dict[str, float]:
    imported = time.time() - began
    write(config_of(model, layers), Path(folder), written)
    return {"seconds": time.time() - began, "imports": imported}


def case(folder: str, preset: str, name: str, written: int, kv_gib: float, began: float) -> dict[str, Any]:
    """`name` is cold or warm; what a cold start loaded is compared with what was written."""
    marks = {"python": time.time() - began}
    import torch

    torch.set_grad_enabled(False)
    free, total = torch.cuda.mem_get_info()  # makes the context
    watch = Watch()
    watch.start()
    from halfbyte import gates as gates_
    from halfbyte.engine.build import core_for
    from halfbyte.engine.options import EngineOptions
    from halfbyte.lab import receipts
    from halfbyte.lab.measure.engine_timing import CoreClient
    from halfbyte.model import load

    marks["imports"] = time.time() - began
    gates = gates_.PRESETS[preset].gates
    model_name = load.resolve_model(folder)
    model = load.load_model(model_name, gates, device="cuda", allow_nan=True)  # holes read as zeros
    torch.cuda.synchronize()
    marks["weights"] = time.time() - began
    load_used = watch.used
    options = EngineOptions(model=folder, gates=gates, device="cuda", kv_gib=kv_gib, max_context=32768, max_seqs=16)
    core, info, _ = core_for(model, load.tokenizer_of(model_name), options)
    marks["engine"] = time.time() - began
    g = torch.Generator().manual_seed(1)
    prompt = torch.randint(0, model.config.vocab, (300,), generator=g).tolist()
    CoreClient(core).complete([prompt], 8)
    torch.cuda.synchronize()
    marks["answer"] = time.time() - began
    watch.on = False
    watch.join()
    kv = model.kv_pool().nbytes
    weights = model.weights.nbytes
    cached = torch.cuda.memory_reserved()
    core.close()
    return {
        "preset": preset, "case": name, "ready_s": marks["answer"], "at_s": marks,
        "weights_s": marks["weights"] - marks["imports"], "weights_bytes": weights, "kv_bytes": kv,
        "peak_used_bytes": watch.used, "peak_while_loading_bytes": load_used, "reserved_bytes": cached,
        "context_bytes": total - free, "extra_gib": (watch.used - weights - kv) / GIB,
        "gb_per_s": checkpoint_bytes(model.config) / 1e9 / (marks["weights"] - marks["imports"]),
        "plan": info.details["plan"], "equal": equal(model, written) if name == "cold" else None,
        "measured": receipts.hashes(receipts.PACKAGE / source for source in LOADING),
    }  # fmt: skip


def equal(model: Any, written: int, device: str = "cuda") -> bool:
    """What was loaded against the same tensors drawn again, wherever the preset keeps the checkpoint's numbers."""
    import torch

    from halfbyte import formats
    from halfbyte.formats.tensor import MXTensor
    from halfbyte.model.synthetic import SyntheticSource

    source = SyntheticSource(model.config, 0, device)
    last = model.config.layers - 1
    tensors = [(None, "embed"), (None, "final_norm")]
    tensors += [(i, r) for i in {0, last // 2, last} for r in ("gate_up", "down", "qkv_bias", "router", "sinks")]
    for layer, role in tensors:
        loaded = getattr(model.weights if layer is None else model.weights.layers[layer], role)
        if layer is not None and layer >= written:  # a hole
            if bool((formats.dequantize(loaded) if isinstance(loaded, MXTensor) else loaded).any()):
                return False
            continue
        drawn = source.make(layer, role)
        if isinstance(loaded, MXTensor):
            assert isinstance(drawn, MXTensor)
            if not torch.equal(loaded.data, formats.convert(drawn, loaded.layout).data):
                return False
        elif not isinstance(drawn, torch.Tensor) or not torch.equal(loaded, drawn):
            return False
    return True


# ---- all cases ------------------------------------------------------------------------------------------------------


def run_child(command: list[str], caches: Path, limit: float) -> Any:
    environ = child_environment() | {
        "HALFBYTE_CACHE_DIR": str(caches / "halfbyte"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=limit, check=False)
    if done.returncode:
        return {"failed": f"exit code {done.returncode}", "output": done.stdout[-2000:]}
    return last_line(done.stdout)


def scaled(row: dict[str, Any], layers: int, total: int) -> float:
    """Seconds for every layer: what was spent on weights grows with them, the rest does not."""
    return float(row["ready_s"] + row["weights_s"] * (total / layers - 1))


def result_of(row: dict[str, Any], model: str, preset: str, case: str, layers: int, total: int) -> Result:
    """One start; fewer layers than the model has are scaled up, and the cell says how many were loaded."""
    shape = {"kernel_cache": "empty" if case == "cold" else "filled", "layers": layers}
    cell = Cell("start", model, preset, path="engine", shape=shape)
    if "failed" in row:
        return Result(cell, refused=row["failed"], detail=row)
    checks = () if row["equal"] is None else (Check("weights bit for bit as they were written", row["equal"]),)
    seconds = scaled(row, layers, total)
    figures = (
        figure("ready", "s", seconds), figure("weights", "s", row["weights_s"]),
        figure("extra_memory", "GiB", max(0.0, row["extra_gib"])),
    )  # fmt: skip
    targets = (
        Check(f"ready within {LIMITS[case]:g} s", seconds <= LIMITS[case], seconds, LIMITS[case]),
        Check("memory beyond weights and KV", row["extra_gib"] <= EXTRA_GIB, row["extra_gib"], EXTRA_GIB),
    )
    return Result(cell, figures if all(c.ok for c in checks) else (), checks, targets, detail=row)


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("120b",)
    presets: tuple[str, ...] = ("exact",)
    folder: Path = option(Path("/dev/shm/halfbyte-load"), "a RAM disk")
    layers: int | None = option(None, "load fewer than the model has; empty: all")
    written: int | None = option(4, "layers that are written, the others are holes; empty: as many as fit")
    kv_gib: float = 16.0
    limit: float = option(150.0, "seconds a case may take")
    keep: bool = option(False, "leave the checkpoint there")


@measurement(
    "start", needs=("gpu",), seconds=180,
    rows=(
        Row("from safetensors to the first answer, kernels cached / not", "start", "ready", path="engine", model="120b",
            over="kernel_cache", values=("filled", "empty")),
        Row("GPU memory at its peak beyond weights and KV", "start", "extra_memory", path="engine", model="120b",
            over="kernel_cache", values=("filled",)),
    ),
)  # fmt: skip
def start(run: Run, options: Options) -> None:
    from halfbyte.model.config import NAMED

    for model in options.models:
        folder = options.folder / model
        shutil.rmtree(folder, ignore_errors=True)
        options.folder.mkdir(parents=True, exist_ok=True)
        total = NAMED[model].layers
        layers = options.layers or total
        free = shutil.disk_usage(options.folder).free
        written = min(options.written or layers, layers)
        while written > 2 and checkpoint_bytes(config_of(model, written)) > free - GIB // 2:
            written -= 2
        size = checkpoint_bytes(config_of(model, layers))
        on_disk = checkpoint_bytes(config_of(model, written)) / 1e9
        print(
            f"{model}: {layers} of {total} layers, {size / 1e9:.1f} GB; {written} of them written, "
            f"{on_disk:.1f} GB in {folder} ({free / 1e9:.1f} free)",
            flush=True,
        )
        command = child_command(write_checkpoint, model, layers, folder, written, time.time())
        outcome = run_child(command, options.folder, options.limit)
        print(f"{model}: written {outcome}", flush=True)
        if "failed" in outcome:
            cell = Cell("start", model, path="engine")
            run.add(Result(cell, refused=f"the checkpoint was not written: {outcome['failed']}", detail=outcome))
            continue
        for preset in options.presets:
            caches = options.folder / f"caches-{preset}"
            shutil.rmtree(caches, ignore_errors=True)
            for name in ("cold", "warm"):
                command = child_command(case, folder, preset, name, written, options.kv_gib, time.time())
                row = run_child(command, caches, options.limit)
                run.sources |= row.pop("measured", {})
                run.add(result_of(row, model, preset, name, layers, total))
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
