#!/bin/sh
# Installs halfbyte from the folder that this file is in, and from nothing else: no network is asked.
# sh install.sh [FOLDER]    the folder is made; default: ~/halfbyte. PYTHON names another interpreter than python3.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-"$HOME/halfbyte"}
cd "$here"
echo "checking every file of the bundle"
sha256sum --quiet --check SHA256SUMS
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/pip" install --quiet --disable-pip-version-check --no-index --find-links wheels --requirement requirement.txt
"$target/bin/halfbyte" --version
echo "installed in $target; next: $target/bin/halfbyte doctor"
for model in models/*; do
  if [ -e "$model" ]; then
    echo "$target/bin/halfbyte serve $here/$model"
  fi
done
