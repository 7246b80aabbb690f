#!/usr/bin/env bash
# Runs a command with what pack_service.sh packed, on a machine with a GPU.
#   bash tests/gpu/run_service.sh ARCHIVE COMMAND...
# In the command, @BIN@ stands for the folder of the binaries:
#   bash tests/gpu/run_service.sh build/service.tar.xz \
#     python3 tests/bench/e2e_bench.py --bin-dir @BIN@ --commit ID --out service.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/libraries.sh
[ $# -ge 2 ] || { echo "usage: bash tests/gpu/run_service.sh ARCHIVE COMMAND..." >&2; exit 2; }
archive=$1
shift

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
# Python has xz where there is no such command.
python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])' "$archive" "$unpacked"
# For the binaries alone: Python has libraries of the same names of its own.
libraries=$(library_path "$unpacked/lib")
mkdir "$unpacked/run"
for binary in "$unpacked"/bin/*; do
  case $binary in *.so) cp "$binary" "$unpacked/run"; continue ;; esac
  wrapper=$unpacked/run/$(basename "$binary")
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$binary" >"$wrapper"
  chmod +x "$wrapper"
done
"${@//@BIN@/$unpacked/run}"
