#!/usr/bin/env bash
# Every GPU receipt again, from the sources as they are, on one CUDA machine: correctness first, then figures.
# usage: bench/receipts.sh OUT [PART...]     parts: tests memcheck decode protocol batch prefill engine other profile (all, in this order)
# Some fifteen minutes on an H200. A part that fails says so and costs the others nothing; logs and JSON are in OUT.
# The embedded model's answers on this machine's CPU (bench/engine_gpu.py --answers FILE) take minutes: make them anywhere with
# the same weights and name them in ANSWERS.
set -uo pipefail
[ $# -ge 1 ] || { sed -n 2,6p "$0" >&2; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd) day=$(date +%Y%m%d)
shift
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
: >"$out/failed"
"$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || { echo "this needs a CUDA GPU and a torch that sees it (PYTHON names another interpreter)." >&2; exit 2; }
wanted=" ${*:-tests memcheck decode protocol batch prefill engine other profile} "

# run NAME SECONDS COMMAND...: one log, one line about it
run() {
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  timeout -s INT -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null
  local status=$?
  [ $status -eq 0 ] || echo "$name" >>"$out/failed"
  printf '%-18s %s after %d s: %s\n' "$name" "$([ $status -eq 0 ] && echo done || echo "FAILED ($status)")" $((SECONDS - began)) \
    "$(grep -v '^{"' "$out/$name.log" | tail -1 | cut -c1-150)"
}
part() { [[ $wanted == *" $1 "* ]]; }
py() { local name=$1 limit=$2 && shift 2 && run "$name" "$limit" "$python" "$@"; }

if part tests; then
  # Most of their time is compilers: as many processes as cores (pytest-xdist), one thread each.
  "$python" -c "import xdist" 2>/dev/null && spread="-n $(nproc) --dist worksteal" || spread=
  OMP_NUM_THREADS=1 py tests 300 -m pytest -v --tb=short -p no:cacheprovider -p no:benchmark $spread -m gpu tests
fi
if part memcheck; then
  py memcheck 420 bench/memcheck_gpu.py --out "$out/memcheck-$day.json"
  run memcheck-steps 60 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$python" bench/decode_stress.py --small --steps 4
fi
if part decode; then
  py decode 120 -m bench.kernels.decode --models 120b,20b --formats mxfp4,q8,checkpoint --contexts 512,2048,8192 --rows 1,2,4 --row-contexts 2048 --out "$out" --name "decode-gpu-$day"
  py decode-32k 40 -m bench.kernels.decode --models 120b --contexts 32768 --no-trace --out "$out" --name "decode-gpu-$day-32k"
  py stress 40 bench/decode_stress.py --steps 10000
  py instructions 20 -m bench.experiments.instructions --out "$out/instructions-gpu-$day.json"
fi
if part protocol; then  # correctness, tg32 and tg128 by depth, 1 to 64 streams, prompts, TTFT through the engine; then every phase alone
  py protocol 240 bench/gpu.py --full --models 120b --require-native --out "$out/gpu-$day-full.json"
  py sustain 60 bench/gpu.py --no-agree --models 120b --depths "" --concurrency 1,8,32,64 --pp "" --sustain 3 --out "$out/gpu-$day-sustain.json"
  py phases 60 bench/gpu.py --phases --models 120b --no-agree --depths "" --concurrency "" --pp "" --require-native --out "$out/gpu-$day-phases.json"
fi
if part batch; then
  py batch-parts 30 -m bench.kernels.batch --rows 8,32,64 --save "$out/batch-gpu-$day.json"
fi
if part prefill; then
  py prefill 90 bench/gpu.py --models 120b --depths "" --concurrency "" --pp 512,2048,8192 --activation auto --activation long=fp8 --out "$out/gpu-$day-prefill.json"
  py prefill-parts 40 -m bench.kernels.prefill_products --tokens 512,2048,8192 --save "$out/prefill-gpu-$day.json"
  py prefill-parts-fp8 30 -m bench.kernels.prefill_products --fp8 --tokens 2048,4096,8192 --save "$out/prefill-gpu-$day-fp8.json"
  py flash 30 -m bench.kernels.flash_attention --json "$out/flash-gpu-$day.json"
fi
if part engine; then
  if [ -n "${ANSWERS:-}" ]; then py eval 120 bench/engine_gpu.py --eval --answers "$ANSWERS" --jobs 12 --out "$out/engine-$day-eval.json"; else echo "eval               left out: name the CPU's answers in ANSWERS"; fi
  py engine 60 bench/engine_gpu.py --speed random:120b --sampled --count 160 --out "$out/engine-$day-speed.json"
  py verify 120 bench/verify_gpu.py --out "$out/verify-gpu-$day.json"
  py draw 30 -m bench.kernels.sampling --out "$out/draw-gpu-$day.json"
fi
if part other; then
  py triton 120 -m bench.kernels.triton_phases --json "$out/triton-gpu-$day.json"
  py sync 40 -m bench.kernels.sm12x --save "$out/sync-gpu-$day.json"
  py rehearse 40 -m bench.experiments.rehearsal --gpu gb10,pro6000 --save "$out/rehearse-gpu-$day.json"
  py rehearse-20b 30 -m bench.experiments.rehearsal --gpu rtx5090 --model 20b --formats mxfp4 --save "$out/rehearse-gpu-$day-20b.json"
  py load 120 bench/load.py --models 120b --presets exact --written 4 --out "$out/load-$day-120b.json"
fi
if part profile; then
  py profile 90 bench/profile.py --models 120b --presets fast,exact --batches 1,8,32 --pp 2048 --out "$out/profile-$day.json"
fi
[ ! -s "$out/failed" ] || { echo "failed: $(tr '\n' ' ' <"$out/failed")"; exit 1; }
