#!/bin/sh
# The development container: sources are mounted, so what is installed from them is gone when the container is made anew.
# Each mounted source that Python does not find in its place is installed again, editable, without touching torch.
set -eu
for name in flashinfer vllm halfbyte; do
  source=/workspace/$name
  if [ ! -e "$source/pyproject.toml" ]; then
    continue
  fi
  where=$(cd / && python3 -c "import importlib.util as u; s = u.find_spec('$name'); print((s and s.origin) or '')" || true)
  case "$where" in
    "$source"/*)
      echo "dev: $name runs from $where"
      continue
      ;;
  esac
  echo "dev: $name would be imported from ${where:-nowhere}, not from $source; installing the mounted one"
  if [ "$name" = vllm ]; then
    (cd "$source" && python3 use_existing_torch.py && uv pip install --system -r requirements/build.txt)
  fi
  uv pip install --system --no-build-isolation --no-deps --editable "$source"
done
# An error of the doctor's is printed and left to the person at the keyboard.
halfbyte doctor || true
exec "$@"
