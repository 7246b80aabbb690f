#!/usr/bin/env bash
# Runs a command with the binaries that pack.sh packed, on a machine with a GPU.
#   bash tests/gpu/run.sh ARCHIVE COMMAND...
# In the command, @BIN@ stands for the folder of the binaries:
#   bash tests/gpu/run.sh build/gpu.tar.xz python3 tests/gpu/gate.py --bin-dir @BIN@
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ $# -ge 2 ] || { echo "usage: bash tests/gpu/run.sh ARCHIVE COMMAND..." >&2; exit 2; }
archive=$1
shift

# The packed libraries, then cuBLASLt and NCCL of the toolkit or of a PyTorch wheel.
library_path() {
  local libraries=$1:/usr/local/cuda/lib64 folder
  for folder in $(python3 - <<'PYTHON' 2>/dev/null
import glob, os, site, sys
for base in {*site.getsitepackages(), *sys.path}:
    for path in glob.glob(os.path.join(base, "nvidia", "*", "lib")):
        print(path)
PYTHON
  ); do libraries+=:$folder; done
  echo "$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
# Python unpacks xz archives where the command is missing.
python3 -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="data")' "$archive" "$unpacked"
# Each binary gets the library path through a wrapper of its own: Python has libraries of the same names.
libraries=$(library_path "$unpacked/lib")
mkdir "$unpacked/run"
for binary in "$unpacked"/bin/*; do
  case $binary in *.so | *.so.* | */COMMIT) cp "$binary" "$unpacked/run"; continue ;; esac
  wrapper=$unpacked/run/$(basename "$binary")
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$@"\n' "$libraries" "$binary" >"$wrapper"
  chmod +x "$wrapper"
done
"${@//@BIN@/$unpacked/run}"
