#!/usr/bin/env bash
# Checks the format of C++, CUDA, Python and Markdown files; --fix formats them instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=(--dry-run --Werror)
ruff=(format --check)
documents=() pictures=(--check)
[ "${1:-}" = --fix ] && mode=(-i) && ruff=(format) && documents=(--fix) pictures=()
clang_format=$(command -v clang-format-14 || command -v clang-format)
git ls-files -co --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh' '*.inc' | xargs "$clang_format" "${mode[@]}"
python=build/venv-tests/bin/python
[ -x "$python" ] || python=python3
"$python" -m ruff "${ruff[@]}" --config client/python/pyproject.toml client/python
"$python" -m ruff "${ruff[@]}" --config client/adapters/pyproject.toml client/adapters
"$python" -m ruff "${ruff[@]}" --config kernels/torch_ops/python/pyproject.toml kernels/torch_ops/python
"$python" -m ruff "${ruff[@]}" --config .ci/ruff.toml tests deploy .ci proto
"$python" .ci/check_documents.py "${documents[@]}"
"$python" .ci/draw_pictures.py "${pictures[@]}"
echo "format: ok"
