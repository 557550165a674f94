#!/bin/sh
# Ask the registries which digest each base image has today, and write it into the Dockerfiles and compose files here.
# Needs docker with buildx, and a network. Prints what changed; `git diff` shows it, `git commit` keeps it.
set -eu
cd "$(dirname "$0")"
files="Dockerfile Dockerfile.dev compose.production.yaml"
# shellcheck disable=SC2086
grep -hoE '(IMAGE=|image: )[a-z0-9./-]+:[A-Za-z0-9._-]+(@sha256:[0-9a-f]{64})?' $files | sed -E 's/^(IMAGE=|image: )//' | sort -u |
  while IFS= read -r old; do
    name=${old%@*}
    case "$name" in halfbyte*) continue ;; esac
    digest=$(docker buildx imagetools inspect "$name" --format '{{.Manifest.Digest}}')
    case "$digest" in
      sha256:*) ;;
      *)
        echo "pin-bases: no digest for $name" >&2
        exit 1
        ;;
    esac
    if [ "$old" != "$name@$digest" ]; then
      echo "$name  $digest"
      # shellcheck disable=SC2086
      sed -i -E "s|(IMAGE=\|image: )$name(@sha256:[0-9a-f]{64})?\$|\1$name@$digest|" $files
    fi
  done
