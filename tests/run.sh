#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, and prints a summary last.
#   bash tests/run.sh            everything
#   bash tests/run.sh --quick    no installation; only what CTest and pytest label as unit tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=false
case "${1:-}" in
  --quick) quick=true ;;
  "") ;;
  *) echo "usage: bash tests/run.sh [--quick]" >&2; exit 2 ;;
esac

step_logs=build/tests-logs step_count=3
$quick && step_count=1
source deploy/packages.sh
source deploy/steps.sh

export CCACHE_DIR=${CCACHE_DIR:-$PWD/build/ccache}
jobs=$(nproc)

python_environment() {
  local stamp=build/venv-tests/.requirements wanted
  wanted=$(sha256sum tests/requirements.txt client/python/pyproject.toml)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
  /usr/bin/python3 -m venv build/venv-tests
  local -a install=(build/venv-tests/bin/python -m pip install --quiet --disable-pip-version-check)
  "${install[@]}" -r tests/requirements.txt
  "${install[@]}" --editable ./client/python
  printf '%s' "$wanted" >"$stamp"
}

build() {
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then bash deploy/fetch_cutlass.sh; fi
  # The tests' Torch, against which the operator for PyTorch is built.
  local torch
  torch=$(build/venv-tests/bin/python -c 'import torch; print(torch.utils.cmake_prefix_path)')
  # One architecture: GPU code is slow to build, and no GPU test runs here.
  cmake --preset release -DTorch_DIR="$torch/Torch" -DLOGPROBD_TESTS=ON -DLOGPROBD_BENCHMARKS=ON -DLOGPROBD_CUDA=AUTO \
    -DCMAKE_CUDA_ARCHITECTURES=90
  rm -f build/release/.quickstart  # quickstart.sh's note of how it configured this tree
  cmake --build build/release -j "$jobs"
}

if ! $quick; then
  packages=("${build_packages[@]}" "${run_packages[@]}" "${test_packages[@]}")
  prepare_install "${packages[@]}"
  step "installing distribution packages" install_packages "${packages[@]}"
  step "installing Python packages" python_environment
fi
step "building everything (Release)" build

# Both suites run to their end whatever the first one says: a summary names all that is broken.
export TEST_BINARIES=$PWD/build/release/bin
ctest_log=build/tests-logs/ctest.log pytest_log=build/tests-logs/pytest.log
operator_log=build/tests-logs/pytest_operator.log operator_tests=tests/unit/kernels/torch_ops
ctest_options=(--test-dir build/release --no-tests=error --output-on-failure -j "$jobs" -LE gpu)
pytest_options=(-q tests --ignore "$operator_tests")
if $quick; then
  ctest_options+=(-L unit)
  pytest_options=(-q tests/unit --ignore "$operator_tests")
fi
set +e
ctest "${ctest_options[@]}" 2>&1 | tee "$ctest_log" |
  grep -vE '^ *(Start|[0-9]+/[0-9]+ Test.*(Passed|Skipped))'
ctest_status=${PIPESTATUS[0]}
build/venv-tests/bin/python -m pytest "${pytest_options[@]}" 2>&1 | tee "$pytest_log"
pytest_status=${PIPESTATUS[0]}
# In a process of its own: after all other tests, gRPC's threads among them, torch's autograd ended it once.
build/venv-tests/bin/python -m pytest -q "$operator_tests" 2>&1 | tee "$operator_log"
operator_status=${PIPESTATUS[0]}
set -e
status=0
[ "$ctest_status" -eq 0 ] && [ "$pytest_status" -eq 0 ] && [ "$operator_status" -eq 0 ] || status=1

echo
echo "Summary ($(date -u +%FT%TZ), $((SECONDS / 60)) min $((SECONDS % 60)) s)"
{ grep -E '^[0-9]+% tests passed' "$ctest_log" || echo "did not finish"; } | sed 's/^/  C++     /'
# A skipped test proves nothing, so it is counted where the passed ones are.
skipped=$(grep -cE '^ *[0-9]+/[0-9]+ Test.*[*]{3}Skipped' "$ctest_log" || true)
[ "$skipped" -eq 0 ] || echo "          $skipped skipped: see $ctest_log"
tail -n 1 "$pytest_log" | sed 's/^/  Python  /'
tail -n 1 "$operator_log" | sed 's/^/  Torch   /'
echo "  GPU     not run here: see tests/gpu/README.md"
[ "$status" -eq 0 ] && echo "All tests passed." || echo "Some tests failed: logs in build/tests-logs."
exit "$status"
