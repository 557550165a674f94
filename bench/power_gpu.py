"""The experts' product of a batch for a whole second: how fast it starts, how fast it stays, and at what power.

    python bench/power_gpu.py --rows 8,32,64 --out receipt.json

A GPU that reaches its power limit lowers its clocks, a fraction of a second into a run, and bandwidth falls with them:
a median over milliseconds does not show it. Layers of true shapes with distinct random weights in turn, experts chosen
evenly; outputs are compared with float32 first, and one that is wrong is not timed. Power is the difference of NVML's
energy counter over the second half. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import torch  # noqa: E402
from batch_gpu import Case  # noqa: E402

from halfbyte.kernels.cuda import batch  # noqa: E402
from halfbyte.lab import environment, receipts  # noqa: E402

EACH = 20  # graphs between two looks at the clock


class Meter:
    """NVML's energy counter and clock of the first GPU."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        assert self.nvml.nvmlInit_v2() == 0, "NVML does not start"
        assert self.nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device)) == 0, "NVML sees no GPU"

    def joules(self) -> float:
        v = ctypes.c_ulonglong()
        assert self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(v)) == 0, "no energy counter"
        return v.value / 1e3

    def mhz(self) -> int:
        v = ctypes.c_uint()
        assert self.nvml.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(v)) == 0, "no clock"
        return v.value


def run(cases: list[Case], rows: int, seconds: float, meter: Meter) -> dict[str, Any]:
    check = cases[0].check(rows)
    if not check["right"]:
        return {"rows": rows, "right": False, "check": check}
    room, gpu, experts = cases[0].layer.room, batch.gpu(), cases[0].config.experts
    room.h.copy_(torch.randn(room.h.shape, device="cuda"))
    chosen = [torch.rand((rows, experts), device="cuda").topk(room.shape.top_k).indices.int() for _ in cases]
    used = torch.zeros((len(cases), 2 + room.done.numel()), dtype=torch.int32, device="cuda")
    rooms = []
    for mine, ids in zip(used, chosen):
        rooms.append(copy.copy(room))
        rooms[-1].tickets, rooms[-1].done, rooms[-1].ids = mine[:2], mine[2:], ids

    def work() -> None:
        used.zero_()
        for case, place in zip(cases, rooms):
            case.layer.experts.run(gpu, place, rows)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    torch.cuda.synchronize()
    time.sleep(0.3)
    us, clocks, marks = [], [], []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(EACH):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        us.append(start.elapsed_time(end) * 1e3 / EACH / len(cases))
        clocks.append(meter.mhz())
        marks.append((meter.joules(), time.perf_counter()))
    half = len(us) // 2
    (e0, t0), (e1, t1) = marks[half], marks[-1]
    distinct = statistics.fmean(ids.unique().numel() for ids in chosen)
    size = distinct * (cases[0].w["gate_up"].data[0].nbytes + cases[0].w["down"].data[0].nbytes)
    stays = statistics.fmean(us[half:])
    return {
        "rows": rows, "right": True, "experts": distinct, "first_us": us[1], "stays_us": stays,
        "first_tb_per_s": size / us[1] / 1e6, "stays_tb_per_s": size / stays / 1e6, "watts": (e1 - e0) / (t1 - t0),
        "mhz": {"least": min(clocks), "mean": statistics.fmean(clocks), "most": max(clocks)}, "us": us,
        "errors": check["errors"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="120b")
    parser.add_argument("--rows", default="8,32,64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    held: dict[str, torch.Tensor] = {}
    cases = [Case(args.model, held) for _ in range(args.layers)]
    result: dict[str, Any] = {
        "bench": "power_gpu", "schema": 1, "environment": environment.collect(), "argv": sys.argv[1:], "rows": [],
        "measured": receipts.hashes(receipts.sources_of([batch.FOLDER / "batch_layer.py"])), "model": args.model,
    }  # fmt: skip
    meter = Meter()
    for rows in map(int, args.rows.split(",")):
        found = run(cases, rows, args.seconds, meter)
        result["rows"].append(found)
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in found.items() if k != "us"}, flush=True)
    text = json.dumps(result, default=str)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(not all(row["right"] for row in result["rows"]))


if __name__ == "__main__":
    main()
