"""Every receipt again, from the sources as they are: correctness first, then figures; without a GPU what needs none.

    python -m halfbyte.lab.remeasure bench/results [PART...] [--answers FILE]

or `halfbyte receipts --run`. Can be ended and begun again: a part whose receipt is current is skipped. A part that
fails says so and costs the others nothing; its log lies beside its receipt. Needs a checkout, because the kernels'
scripts and the tests are not installed. The embedded model's answers on a CPU take minutes; make them anywhere with the
same weights (`python -m halfbyte.lab.levels.embedded --answers FILE`) and name them. Measures nothing itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from halfbyte.errors import UsageError
from halfbyte.gates import child_environment
from halfbyte.lab import environment, receipts

ROOT = receipts.PACKAGE.parents[1]
BENCH = ("-m", "halfbyte.lab.bench", "random:120b", "--preset", "fast")


@dataclass(frozen=True)
class Part:
    """One process: what follows `python`, the seconds it may take; `--out FILE` is added where it writes a receipt."""

    name: str
    seconds: float
    arguments: tuple[str, ...]
    receipt: bool = True
    needs_answers: bool = False
    gpu: bool = True
    package: str = ""  # one that is not ours to install


PARTS = (
    Part("gpu-tests", 400, ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", "gpu", "tests"), False),
    Part("sanitizer", 420, ("-m", "halfbyte.lab.levels.sanitizer")),
    Part("memcheck", 420, ("-m", "halfbyte.lab.levels.sanitizer", "--tools", "memcheck", "--tests", "tests/kernels")),
    Part("stress", 60, ("-m", "halfbyte.lab.levels.stress", "--steps", "10000")),
    Part("embedded", 150, ("-m", "halfbyte.lab.levels.embedded", "--eval", "--jobs", "12"), needs_answers=True),
    Part("logits", 90, ("-m", "halfbyte.lab.levels.teacher_forced")),
    Part("verification", 120, ("-m", "halfbyte.lab.levels.verification")),
    Part("decode-kernel", 200, ("-m", "bench.kernels.decode", "--models", "120b,20b", "--formats",
         "mxfp4,q8,checkpoint", "--contexts", "512,2048,8192,32768", "--rows", "1,2,4", "--row-contexts", "2048")),
    Part("engine", 240, (*BENCH, "--pp", "512,2048,8192", "--tg", "128", "--depth", "0", "--require-native")),
    Part("engine-depths", 240, (*BENCH, "--pp", "2048", "--tg", "128", "--depth", "512,2048,8192,32768")),
    Part("engine-streams", 240, (*BENCH, "--pp", "", "--tg", "128", "--depth", "128", "--concurrency", "1,8,32,64")),
    Part("engine-fp8", 150, (*BENCH, "--activation", "long=fp8", "--pp", "512,2048,8192", "--tg", "")),
    Part("served", 300, (*BENCH, "--pp", "2048", "--tg", "128", "--depth", "2048", "--concurrency", "1,8", "--served")),
    Part("first-minute", 240, ("-m", "halfbyte.lab.measure.serving", "random:120b", "--preset", "fast",
         "--first-minute", "60")),
    Part("serving", 240, ("-m", "halfbyte.lab.measure.serving", "random:120b", "--preset", "fast", "--streams",
         "1,8,32,64")),
    Part("graph", 150, (*BENCH, "--graph", "--pp", "2048", "--tg", "128", "--depth", "128,2048", "--concurrency",
         "1,8,32,64", "--no-check")),
    Part("engine-steps", 120, ("-m", "halfbyte.lab.measure.engine_steps", "random:120b", "--sampled")),
    Part("mixed-steps", 120, ("-m", "halfbyte.lab.measure.mixed_steps", "random:120b")),
    Part("sustained", 90, (*BENCH, "--pp", "", "--tg", "", "--depth", "128", "--concurrency", "1,8,32,64", "--sustain",
         "3", "--no-check")),
    Part("phases", 120, (*BENCH, "--pp", "", "--tg", "", "--depth", "2048", "--phases", "1,8,64,320,2048",
         "--no-check")),
    Part("batch-kernels", 60, ("-m", "bench.kernels.batch", "--rows", "8,32,64")),
    Part("prefill-kernels", 60, ("-m", "bench.kernels.prefill_products", "--tokens", "512,2048,8192")),
    Part("prefill-kernels-fp8", 60, ("-m", "bench.kernels.prefill_products", "--fp8", "--tokens", "2048,4096,8192")),
    Part("flash-attention", 60, ("-m", "bench.kernels.flash_attention",)),
    Part("sampling", 60, ("-m", "bench.kernels.sampling",)),
    Part("triton", 150, ("-m", "bench.kernels.triton_phases",)),
    Part("sm12x", 60, ("-m", "bench.kernels.sm12x",)),
    Part("instructions", 30, ("-m", "bench.experiments.instructions",)),
    Part("rehearsal", 60, ("-m", "bench.experiments.rehearsal", "--gpu", "gb10,pro6000")),
    Part("rehearsal-20b", 60, ("-m", "bench.experiments.rehearsal", "--gpu", "rtx5090", "--model", "20b")),
    Part("start", 180, ("-m", "halfbyte.lab.measure.load", "--models", "120b", "--presets", "exact", "--written", "4")),
    Part("profile", 120, ("-m", "halfbyte.lab.measure.profile", "--models", "120b", "--presets", "fast,exact",
         "--batches", "1,8,32", "--pp", "2048")),
    Part("inside-vllm", 1800, ("-m", "bench.vllm.compare", "120b"), package="vllm"),
    Part("host", 120, ("-m", "halfbyte.lab.measure.host"), gpu=False),
    Part("server", 120, ("-m", "halfbyte.lab.measure.server"), gpu=False),
    Part("user-path", 900, ("-m", "halfbyte.lab.measure.user_path"), gpu=False),
    Part("llamacpp", 7200, ("-m", "halfbyte.lab.peers.compare", "--through", "plan,engine,http"), gpu=False),
    Part("speculation", 900, ("-m", "halfbyte.lab.measure.speculation", "--as", "120b", "--problems", "6", "--tokens",
         "60"), gpu=False),
    Part("eval-cpu", 3600, ("-c", "from halfbyte.cli import main; main()", "eval", "--seed", "31415", "--per-task",
         "40", "--device", "cpu"), gpu=False),
)  # fmt: skip
BY_NAME = {part.name: part for part in PARTS}


def is_current(part: Part, folder: Path) -> bool:
    """A part without a receipt leaves the hash of the kernels that it passed with."""
    if part.receipt:
        path = folder / f"{part.name}.json"
        return path.is_file() and receipts.read(path).state == "current"
    path = folder / f"{part.name}.passed"
    return path.is_file() and path.read_text(encoding="utf-8") == environment.source_hash()


def run_parts(
    folder: Path, names: Sequence[str] = (), answers: Path | None = None, report: Callable[[str], None] = print
) -> list[str]:
    """Runs what is not current; returns the parts that failed."""
    if unknown := sorted(set(names) - set(BY_NAME)):
        raise UsageError(f"there is no part {', '.join(unknown)}; there are {', '.join(BY_NAME)}.")
    if not (ROOT / "bench" / "kernels").is_dir():
        raise UsageError("this measures a checkout: bench/kernels is not beside the package.")
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for part in [BY_NAME[n] for n in names] if names else PARTS:
        if is_current(part, folder):
            report(f"{part.name:20} is current")
        elif part.gpu and not torch.cuda.is_available():
            report(f"{part.name:20} left out: it needs a CUDA GPU, and torch sees none")
        elif part.package and importlib.util.find_spec(part.package) is None:
            report(f"{part.name:20} left out: it needs the package {part.package}, which is not installed here")
        elif part.needs_answers and answers is None:
            report(f"{part.name:20} left out: --answers names the CPU's")
        elif not _run(part, folder, answers, report):
            failed.append(part.name)
    return failed


def _run(part: Part, folder: Path, answers: Path | None, report: Callable[[str], None]) -> bool:
    command = [sys.executable, *part.arguments]
    if part.name == "gpu-tests" and importlib.util.find_spec("xdist"):  # most of their time is compilers
        command += ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
    if part.receipt:
        command += ["--out", str((folder / f"{part.name}.json").resolve())]
    if part.needs_answers:
        command += ["--answers", str(answers)]
    environ = child_environment(PYTHONUNBUFFERED="1")
    if part.gpu:  # many processes at once; what computes on a CPU has all of its cores, as a user's has
        environ["OMP_NUM_THREADS"] = "1"
    paths = [str(ROOT / "src"), *filter(None, [environ.get("PYTHONPATH")])]  # where packages lie in a folder, that too
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    log = folder / f"{part.name}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            status = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
    if status == 0 and not part.receipt:
        (folder / f"{part.name}.passed").write_text(environment.source_hash(), encoding="utf-8")
    lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line and not line.startswith("{")]
    outcome = "done" if status == 0 else f"FAILED ({status})"
    last = lines[-1][:120] if lines else ""
    report(f"{part.name:20} {outcome} after {time.monotonic() - began:.0f} s: {last}")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", help=", ".join(BY_NAME))
    parser.add_argument("--answers", type=Path)
    args = parser.parse_args()
    try:
        failed = run_parts(args.folder, args.parts, args.answers, lambda text: print(text, flush=True))
    except UsageError as e:
        print(e, file=sys.stderr)
        return 2
    print(f"failed: {', '.join(failed)}" if failed else "no part failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
