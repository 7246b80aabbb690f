#!/usr/bin/env bash
# Lints: shell and Python wholly, C++ host files by clang-tidy with the compile commands of build/release.
#   .ci/lint.sh            every file but kernels/torch_ops: Torch's headers take a minute a file
#   .ci/lint.sh --changed  all C++ files that differ from the parent of HEAD or are not committed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=build/venv-tests/bin/python
[ -x "$python" ] || { echo "lint.sh: error: run bash tests/run.sh first (it makes $python)" >&2; exit 1; }
"$python" -m ruff check --config client/python/pyproject.toml client/python
"$python" -m ruff check --config .ci/ruff.toml tests deploy .ci
(cd client/python && "$OLDPWD/$python" -m mypy logprobd)
"$python" -m ruff check --config kernels/torch_ops/python/pyproject.toml kernels/torch_ops/python
(cd kernels/torch_ops/python && "$OLDPWD/$python" -m mypy logprobd_ops)
git ls-files '*.sh' | xargs -n1 bash -n

files() { git ls-files 'kernels/*.cc' 'server/*.cc' 'client/*.cc'; }
if [ "${1:-}" = --changed ]; then
  changed=$({ git diff --name-only HEAD~1 2>/dev/null || true; git diff --name-only; } | sort -u)
  list=$(files | grep -Fxf <(printf '%s\n' "$changed") || true)
else
  list=$(files | grep -v '^kernels/torch_ops/')
fi
clang_tidy=$(command -v clang-tidy-14 || command -v clang-tidy)
# Files that this configuration does not compile (the CUDA engine without CUDA) have no command.
list=$(for f in $list; do
  if grep -q "/$f\"" build/release/compile_commands.json; then echo "$f"; fi
done)
[ -z "$list" ] || printf '%s\n' $list | xargs -P "$(nproc)" -n 4 "$clang_tidy" -p build/release --quiet
echo "lint: ok"
