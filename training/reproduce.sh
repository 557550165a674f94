#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the network, the draft model beside it, then the EAGLE-3 head.
# About nine minutes on one H200. usage: training/reproduce.sh OUT [SEED]
# Files in OUT: weights-N.safetensors (bf16 parent), draft-weights.safetensors, eagle3.safetensors, logs.tgz.
# With OUT/weights-0.safetensors already there, stage main is skipped and with OUT/draft-weights.safetensors the draft.
# Then, on any machine: python training/release.py OUT
set -uo pipefail
out=$1 seed=${2:-0}
work=$(mktemp -d)
export PYTHONPATH=src:training PYTHONUNBUFFERED=1
train() { python3 training/train.py --seed "$seed" "$@"; }
mkdir -p "$work/main" "$work/draft"

if [ -f "$out/draft-weights.safetensors" ]; then
  cp "$out/draft-weights.safetensors" "$work/draft/weights-0.safetensors"
else
  train --stage draft --steps 1000 --workers 4 --per-task 10 --out "$work/draft" >"$work/draft.txt" 2>&1 &
fi
if [ -f "$out/weights-0.safetensors" ]; then
  cp "$out"/weights-*.safetensors "$work/main"
else
  train --stage main --steps 3400 --workers 9 --per-task 20 --out "$work/main"
fi
wait
train --stage more --steps "${MORE_STEPS:-1500}" --workers 13 --per-task 100 --ablations --weights "$work/main" --out "$work/more"
cp "$work"/more/weights-*.safetensors "$out"
cp "$work/draft/weights-0.safetensors" "$out/draft-weights.safetensors"
train --stage eagle --steps 800 --own 12288 --per-task 20 --weights "$work/more" --draft-weights "$work/draft" --out "$work/eagle"
cp "$work/eagle/eagle3.safetensors" "$out"
tar czf "$out/logs.tgz" -C "$work" $(cd "$work" && ls */*.json*)
ls -la "$out"
