#!/usr/bin/env bash
# Runs every GPU test from binaries built elsewhere (pack.sh), on a machine with a GPU, and fails if any
# test failed or was skipped.
#   bash tests/gpu/run.sh [DIR]    DIR holds *_gpu_test and lib/; build/gpu by default
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/libraries.sh
directory=${1:-build/gpu}

LD_LIBRARY_PATH=$(library_path "$directory/lib")
export LD_LIBRARY_PATH

shopt -s nullglob
tests=("$directory"/*_gpu_test)
if [ ${#tests[@]} -eq 0 ]; then
  echo "no *_gpu_test in $directory: run tests/gpu/pack.sh where the build is" >&2
  exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
bad=0
for test in "${tests[@]}"; do
  started=$SECONDS
  "$test" --gtest_brief=1 >"$log" 2>&1
  status=$?
  skipped=$(grep -c '^\[  SKIPPED \]' "$log")
  if [ "$status" -ne 0 ] || [ "$skipped" -ne 0 ]; then
    bad=1
    grep -v ' info ' "$log" | tail -n 60
  fi
  grep -hE '^(GPU |\[  PASSED  \]|\[  FAILED  \].*tests?,)' "$log" | sed 's/^/  /'
  echo "$(basename "$test"): exit $status, skipped $skipped, $((SECONDS - started)) s"
done
[ "$bad" -eq 0 ] && echo "All GPU tests passed." || echo "Some GPU tests failed or were skipped."
exit "$bad"
