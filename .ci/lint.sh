#!/usr/bin/env bash
# Lints shell and Python files, and lints C++ host files by clang-tidy with the compile commands of build/release.
#   .ci/lint.sh            checks every file; clang-tidy skips files that are cached as clean (.ci/clang_tidy.py)
#   .ci/lint.sh --changed  limits clang-tidy to files that differ from the parent of HEAD or are not committed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=build/venv-tests/bin/python
[ -x "$python" ] || { echo "lint.sh: error: no $python; run bash tests/run.sh, which creates it" >&2; exit 1; }
for package in client/python:logprobd client/adapters:logprobd_adapters kernels/torch_ops/python:logprobd_ops; do
  folder=${package%%:*}
  "$python" -m ruff check --config "$folder/pyproject.toml" "$folder"
  (cd "$folder" && "$OLDPWD/$python" -m mypy "${package##*:}")
done
"$python" -m ruff check --config .ci/ruff.toml tests deploy .ci proto
python3 proto/generate.py --check
git ls-files '*.sh' | xargs -n1 bash -n
if git grep -nE '^(<{7}|>{7}) '; then
  echo "lint.sh: error: the lines above are markers of an unresolved merge" >&2
  exit 1
fi

files=()
if [ "${1:-}" = --changed ]; then
  mapfile -t files < <({ git diff --name-only HEAD~1 2>/dev/null || true; git diff --name-only; } | sort -u |
    grep -E '^(kernels|server|client)/.*\.cc$' || true)
  [ ${#files[@]} -gt 0 ] || { echo "lint: ok"; exit 0; }
fi
python3 .ci/clang_tidy.py "${files[@]}"
echo "lint: ok"
