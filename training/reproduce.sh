#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the network, the draft model beside it, then the EAGLE-3 head.
# About six minutes on one H200. usage: training/reproduce.sh OUT [SEED] [STEPS]
# Files in OUT: weights-N.safetensors (bf16 parent), draft-weights.safetensors, eagle3.safetensors, logs.tgz.
# Then, on any machine: python training/release.py OUT
set -uo pipefail
out=$1 seed=${2:-0} steps=${3:-3600}
work=$(mktemp -d)
export PYTHONPATH=src:training PYTHONUNBUFFERED=1
train() { python3 training/train.py --seed "$seed" "$@"; }

train --stage draft --steps 1000 --workers 4 --per-task 10 --out "$work/draft" >"$work/draft.txt" 2>&1 &
draft=$!
train --stage main --steps "$steps" --workers 9 --per-task 100 --ablations --out "$work/main"
cp "$work"/main/weights-*.safetensors "$out"
wait $draft
cp "$work/draft/weights-0.safetensors" "$out/draft-weights.safetensors"
train --stage eagle --steps 800 --own 12288 --per-task 20 --weights "$work/main" --draft-weights "$work/draft" --out "$work/eagle"
cp "$work/eagle/eagle3.safetensors" "$out"
tail -n 25 "$work/draft.txt"
tar czf "$out/logs.tgz" -C "$work" $(cd "$work" && ls draft.txt */*.json*)
ls -la "$out"
