#!/bin/sh
# What a container of halfbyte does first: look at the machine, say which kernels will run, and end early where they cannot.
#
#   entrypoint serve [MODEL] [FLAGS]     doctor, selection, server; the model stands right behind `serve`
#   entrypoint COMMAND ...               any other command of halfbyte, as it is
#
# CONTAINER_DOCTOR: refuse (an error of the doctor's ends it; the default), warn (it is only printed), off.
# CONTAINER_SEED: a folder whose files are put into the caches where they are missing; the image sets it.
set -eu

seed_caches() {
  # A volume hides the image's own folder, so kernels that were compiled ahead are copied into it.
  if [ -n "${CONTAINER_SEED:-}" ] && [ -d "$CONTAINER_SEED" ]; then
    (cd "$CONTAINER_SEED" && find . -type f) | while IFS= read -r file; do
      target="${CONTAINER_CACHE:-/var/cache/halfbyte}/$file"
      if [ ! -e "$target" ]; then
        mkdir -p "$(dirname "$target")"
        cp "$CONTAINER_SEED/$file" "$target.new.$$"
        mv "$target.new.$$" "$target"
      fi
    done
  fi
}

seed_caches
if [ "${1:-serve}" != serve ]; then
  exec halfbyte "$@"
fi
[ $# -gt 0 ] && shift

model=
port=
gates=
case "${1:-}" in
  "" | -*) ;;
  *) model=$1 ;;
esac

# Of the server's flags, `explain` knows the gates and the engine: those change what is selected. The doctor asks for the
# port: another one may be taken.
all=$#
while [ "$all" -gt 0 ]; do
  word=$1
  shift
  all=$((all - 1))
  set -- "$@" "$word"
  case "$word" in
    --moe-kernel | --linear-kernel | --activation | --layers | --mxfp4-layers | --tile | --attention | --sinks | --kv-dtype | --speculate | --cpu-instructions | --threads | --experts-in-host | --preset | --engine)
      gates="$gates $word ${1:-}"
      ;;
    --moe-kernel=* | --linear-kernel=* | --activation=* | --layers=* | --mxfp4-layers=* | --tile=* | --attention=* | --sinks=* | --kv-dtype=* | --speculate=* | --cpu-instructions=* | --threads=* | --experts-in-host=* | --preset=* | --engine=* | --enforce-eager | --deterministic)
      gates="$gates $word"
      ;;
    --port) port=${1:-} ;;
    --port=*) port=${word#--port=} ;;
  esac
done

doctor() {
  halfbyte doctor ${model:+"$model"} ${port:+--port "$port"} >&2
}

case "${CONTAINER_DOCTOR:-refuse}" in
  off) ;;
  warn) doctor || echo "entrypoint: the doctor found an error; CONTAINER_DOCTOR=warn goes on" >&2 ;;
  refuse)
    doctor || {
      echo "entrypoint: the doctor found an error, so nothing is served; CONTAINER_DOCTOR=warn serves all the same" >&2
      exit 1
    }
    ;;
  *)
    echo "entrypoint: CONTAINER_DOCTOR is '$CONTAINER_DOCTOR'; use refuse, warn or off" >&2
    exit 2
    ;;
esac

# Values of gates have no blanks, so the words may be split where they stand.
# shellcheck disable=SC2086
halfbyte explain ${model:+"$model"} ${gates:-} >&2
exec halfbyte serve "$@"
