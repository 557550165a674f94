#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the network with the draft model beside it, more of it, the EAGLE-3 head, and an
# evaluation on problems that nothing saw. Twelve minutes or so on one H200; a stage that is done is not run again.
#
# usage: [FROM=models] [MORE_STEPS=1900] training/reproduce.sh OUT [SEED]
#        EDITION=2 [FROM=models/tiny] [SECONDS_OF_TRAINING=430] [RATES=1] [STAGES=FOLDER] training/reproduce.sh OUT [SEED]
#        EDITION=2 DO=speculation [FROM=models/tiny] [SMALL=models] training/reproduce.sh OUT [SEED]
# FROM: go on from the shipped FROM/tiny, tiny-draft and tiny-eagle3, with stages more and eagle alone.
# EDITION=2: the second edition, conversations with names of the day, from the weights in the folder FROM: shipped ones, or the
# OUT of an earlier run with another SEED. It trains for so many seconds, saving every minute, and evaluates for a minute or so.
# DO=speculation: nothing but an EAGLE-3 head for the weights in FROM, 100 seconds, with the draft model beside it, going on
# from tiny-eagle3 and tiny-draft in SMALL; three minutes or so. DO="network speculation" does both, one after the other.
# STAGES: where stages keep what is not a result; OUT/stages by default.
# MICRO=1: a network so small that a CPU trains it in a minute or two. It learns nothing; it shows that the script runs.
#
# Files in OUT: weights-N.safetensors (bf16 parent), draft-weights.safetensors, eagle3.safetensors, logs.tgz; stages/ can be
# deleted. Then, on any machine: python training/release.py OUT
set -euo pipefail
out=$1 seed=${2:-0}
work=${STAGES:-$out/stages}
mkdir -p "$out" "$work"
export PYTHONPATH=src:training${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

stage() { # NAME ARGUMENTS...
  local name=$1
  shift
  if [ -e "$work/$name/done" ]; then
    echo "$name is done"
    return
  fi
  mkdir -p "$work/$name"
  ${limit:+timeout "$limit"} "${PYTHON:-python3}" training/train.py --seed "$seed" --out "$work/$name" "$@" || return
  touch "$work/$name/done"
}

accepted() { # ARGUMENTS of acceptance.py...
  if [ -e "$work/accepted/acceptance.json" ]; then
    echo "accepted is done"
    return
  fi
  mkdir -p "$work/accepted"
  ${limit:+timeout "$limit"} "${PYTHON:-python3}" training/acceptance.py --out "$work/accepted/acceptance.json" "$@"
}

if [ "${EDITION:-1}" = 2 ]; then
  from=${FROM:-models/tiny} small=${SMALL:-models} failed=0
  second=(--seconds "${SECONDS_OF_TRAINING:-430}" --steps 20000 --workers 9 --rates "${RATES:-1}")
  judged=(--edition 2 --held-out 4242 --per-task 30 --conversations 300)
  eagle=(--edition 2 --seconds "${SECONDS_OF_EAGLE:-100}" --steps 20000 --own 12288 --workers 5 --head "$small/tiny-eagle3")
  draft=(--edition 2 --seconds "${SECONDS_OF_DRAFT:-88}" --steps 20000 --workers 8 --weights "$small/tiny-draft")
  accepted=(--conversations 100)
  if [ -n "${MICRO:-}" ]; then
    from=${FROM:-$work/begin}
    second=(--micro --steps "$MICRO" --workers 1)
    judged+=(--micro --per-task 1 --conversations 2)
    eagle=(--edition 2 --micro --seconds 20 --steps "$MICRO" --own 16 --workers 1)
    draft=(--edition 2 --micro --seconds 20 --steps "$MICRO" --workers 1 --weights "$small/tiny-draft")
    accepted=(--micro --conversations 2)
    [ -n "${FROM:-}" ] || stage begin --stage main --micro --steps "$MICRO" --workers 1 --per-task 0
  fi
  for what in ${DO:-network}; do
    case $what in
      network)
        # Weights and log straight into OUT, every minute: a run that is cut leaves the last ones.
        stage second --stage second "${second[@]}" --weights "$from" --per-task 0 --conversations 0 --out "$out"
        from=$out limit=100
        stage judged --stage evaluate "${judged[@]}" --weights "$from" >"$out/second.txt" 2>&1 || failed=$?
        limit=
        if [ -e "$work/judged/second.json" ]; then gzip -c "$work/judged/second.json" >"$out/second.json.gz"; fi
        ;;
      speculation)
        # The draft model's compilation takes a third of its time. Both are done when the longer one is.
        stage draft --stage draft "${draft[@]}" --per-task 0 >"$out/draft.txt" 2>&1 &
        beside=$!
        stage eagle --stage eagle "${eagle[@]}" --weights "$from"
        cp "$work/eagle/eagle3.safetensors" "$out"
        wait "$beside"
        cp "$work/draft/weights-0.safetensors" "$out/draft-weights.safetensors"
        limit=120
        accepted "${accepted[@]}" --target "$from" --head "$work/eagle" --draft "$work/draft" || failed=$?
        limit=
        if [ -e "$work/accepted/acceptance.json" ]; then cp "$work/accepted/acceptance.json" "$out"; fi
        cp "$work/eagle/log.jsonl" "$out/eagle-log.jsonl"
        cp "$work/draft/log.jsonl" "$out/draft-log.jsonl"
        ;;
      *) echo "DO names network and speculation, not $what" >&2; exit 2 ;;
    esac
  done
  ls -la "$out"
  exit "$failed"
fi

main=(--steps 3400 --workers 9 --per-task 20)
draft=(--steps 1000 --workers 4 --per-task 10)
more=(--steps "${MORE_STEPS:-3000}" --workers 13 --per-task 100 --ablations)
eagle=(--steps 800 --own 12288)
accepted=(--per-task 20)
unseen=(--per-task 300 --held-out 4242)
if [ -n "${FROM:-}" ]; then
  eagle=(--steps 600 --own 8192 --head "$FROM/tiny-eagle3")
fi
if [ -n "${MICRO:-}" ]; then
  small=(--micro --steps "$MICRO" --workers 1)
  main+=("${small[@]}" --per-task 0) draft+=("${small[@]}" --per-task 0)
  more+=("${small[@]}" --per-task 1) eagle+=("${small[@]}" --own 16) accepted=(--micro --per-task 1) unseen+=(--micro --per-task 1)
fi

if [ -n "${FROM:-}" ]; then
  before=$FROM/tiny small_one=$FROM/tiny-draft
else
  before=$work/main small_one=$work/draft
  stage draft --stage draft "${draft[@]}" >"$work/draft.txt" 2>&1 &
  beside=$!
  stage main --stage main "${main[@]}"
  wait "$beside"
  cp "$small_one/weights-0.safetensors" "$out/draft-weights.safetensors"
fi
stage more --stage more "${more[@]}" --weights "$before"
cp "$work"/more/weights-*.safetensors "$out"
stage eagle --stage eagle "${eagle[@]}" --weights "$work/more"
cp "$work/eagle/eagle3.safetensors" "$out"
accepted --edition 1 "${accepted[@]}" --target "$work/more" --head "$work/eagle" --draft "$small_one"
stage unseen --stage evaluate "${unseen[@]}" --weights "$work/more"
tar czf "$out/logs.tgz" -C "$work" $(cd "$work" && ls */*.json*)
ls -la "$out"
