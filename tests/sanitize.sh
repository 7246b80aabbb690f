#!/usr/bin/env bash
# Builds with sanitizers, runs the tests that can run with them, and prints how many did.
#   bash tests/sanitize.sh         address, undefined behaviour and leaks, then threads
#   bash tests/sanitize.sh asan    the first alone
#   bash tests/sanitize.sh tsan    the second alone
# The result is written to build/sanitize/result.json. tests/sanitizers/README.md says what is left out and why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case "${1:-}" in
  "") presets=(asan tsan) ;;
  asan | tsan) presets=("$1") ;;
  *) echo "usage: bash tests/sanitize.sh [asan | tsan]" >&2; exit 2 ;;
esac
results=$PWD/build/sanitize
python=$PWD/build/venv-tests/bin/python
[ -x "$python" ] || { echo "sanitize.sh: error: no $python; run bash tests/run.sh --install" >&2; exit 1; }

# run PRESET OPTIONS: builds, and runs the C++ tests.
run() {
  local preset=$1 options=$2
  rm -rf "$results/$preset"*
  mkdir -p "$results/$preset-reports"
  cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset" -j "$(nproc)"
  # A report ends the process, and is also kept in a file, since tests do not look at each exit status.
  options+=:halt_on_error=1:log_path=$results/$preset-reports/report
  export ASAN_OPTIONS=$options UBSAN_OPTIONS=$options:print_stacktrace=1 TSAN_OPTIONS=$options
  ctest --preset "$preset" --output-junit "$results/$preset-unit.xml" -j "$(nproc)" || true
}

# run_integration PRESET: runs the integration tests with the built server.
run_integration() {
  local -a excluded
  mapfile -t excluded < <(grep '^-' tests/sanitizers/excluded.txt)
  TEST_BINARIES=$PWD/build/$1/bin "$python" -m pytest -q tests/integration "${excluded[@]}" --timeout 600 \
    --junit-xml "$results/$1-integration.xml" || true
}

for preset in "${presets[@]}"; do
  case $preset in
    # Tests preload libraries in front of the sanitizer's, and ask for more memory than there is.
    asan) run asan verify_asan_link_order=0:allocator_may_return_null=1:quarantine_size_mb=16; run_integration asan ;;
    # Debian's gRPC is not built for the thread sanitizer, so neither is what uses it.
    tsan) run tsan history_size=4:suppressions="$PWD/tests/sanitizers/tsan_suppressions.txt" ;;
  esac
done
python3 tests/sanitizers/result.py "$results" "${presets[@]}"
