#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the network, the draft model beside it, then the EAGLE-3 head.
# About eleven minutes on one H200. usage: [FROM=models] training/reproduce.sh OUT [SEED]
# FROM: start from the shipped FROM/tiny and FROM/tiny-draft, so that only stages more and eagle run (seven minutes).
# Files in OUT: weights-N.safetensors (bf16 parent), draft-weights.safetensors, eagle3.safetensors, logs.tgz.
# Then, on any machine: python training/release.py OUT
set -uo pipefail
out=$1 seed=${2:-0}
work=$(mktemp -d)
export PYTHONPATH=src:training PYTHONUNBUFFERED=1
train() { python3 training/train.py --seed "$seed" "$@"; }

if [ -n "${FROM:-}" ]; then
  main=$FROM/tiny draft=$FROM/tiny-draft
else
  main=$work/main draft=$work/draft
  train --stage draft --steps 1000 --workers 4 --per-task 10 --out "$draft" >"$work/draft.txt" 2>&1 &
  train --stage main --steps 3400 --workers 9 --per-task 20 --out "$main"
  wait
  cp "$draft/weights-0.safetensors" "$out/draft-weights.safetensors"
fi
train --stage more --steps "${MORE_STEPS:-3000}" --workers 13 --per-task 100 --ablations --weights "$main" --out "$work/more"
cp "$work"/more/weights-*.safetensors "$out"
train --stage eagle --steps 800 --own 12288 --per-task 20 --weights "$work/more" --draft-weights "$draft" --out "$work/eagle"
cp "$work/eagle/eagle3.safetensors" "$out"
tar czf "$out/logs.tgz" -C "$work" $(cd "$work" && ls */*.json*)
ls -la "$out"
