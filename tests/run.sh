#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, and prints a summary last.
#   bash tests/run.sh            everything
#   bash tests/run.sh --quick    build and unit tests only, without installation
#   bash tests/run.sh --install  installation only
#   bash tests/run.sh --build    installation and build only
#   bash tests/run.sh --test     tests only, after --build
# With --newer-grpc as the first argument all this is done with the static gRPC that releases have (deploy/newer_grpc), in
# build/newer-grpc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=release
if [ "${1:-}" = --newer-grpc ]; then
  preset=newer-grpc
  shift
fi
installs=true builds=true tests=true quick=false
case "${1:-}" in
  --quick) quick=true installs=false ;;
  --install) builds=false tests=false ;;
  --build) tests=false ;;
  --test) installs=false builds=false ;;
  "") ;;
  *) echo "usage: bash tests/run.sh [--newer-grpc] [--quick | --install | --build | --test]" >&2; exit 2 ;;
esac

step_logs=build/tests-logs step_count=0
$installs && step_count=$((step_count + 2))
$builds && step_count=$((step_count + 1))
source deploy/debian_packages.sh
source deploy/steps.sh
source tests/shared_folder.sh
jobs=$(nproc)

install_environment() {
  /usr/bin/python3 -m venv "$1"
  "$1/bin/python" -m pip install --quiet --disable-pip-version-check -r "$2"
}

# The tests' Python packages, which include Torch; the packages that the operator's drop-in functions replace, which only
# the tests of these functions put on Python's path; and those of the generator of bugs.
python_environment() {
  shared_folder venv-tests venv install_environment tests/requirements.txt
  shared_folder site-originals originals install_alone tests/requirements-originals.txt
  shared_folder site-mutants mutants install_alone tests/mutants/requirements.txt
}

build() {
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then bash deploy/fetch_cutlass.sh; fi
  [ "$preset" = release ] || bash deploy/newer_grpc/make_prefix.sh
  # The operator for PyTorch is built against the tests' Torch.
  local torch
  torch=$(build/venv-tests/bin/python -c 'import torch; print(torch.utils.cmake_prefix_path)')
  # Only one architecture is built, because GPU code is slow to build and no GPU test runs here.
  cmake --preset "$preset" -DTorch_DIR="$torch/Torch" -DLOGPROBD_TESTS=ON -DLOGPROBD_BENCHMARKS=ON -DLOGPROBD_CUDA=AUTO \
    -DCMAKE_CUDA_ARCHITECTURES=90
  rm -f "build/$preset/.quickstart"  # quickstart.sh's note of how it configured this tree
  cmake --build "build/$preset" -j "$jobs"
  ccache --show-stats 2>/dev/null || true
}

if $builds; then rm -f "$step_logs/timings"; fi
# timed NAME COMMAND...: runs the command and appends its time to the log of timings. Without "|| ..." a command that
# fails ends the script; "$@" must not stand in such a list itself, or errors inside functions would be ignored.
timed() {
  local name=$1 started=$SECONDS status
  shift
  "$@"
  status=$?
  printf '%6d s  %s\n' $((SECONDS - started)) "$name" >>"$step_logs/timings"
  return "$status"
}

if $installs; then
  packages=("${build_packages[@]}" "${run_packages[@]}" "${test_packages[@]}")
  prepare_install "${packages[@]}"
  timed "install distribution packages" step "installing distribution packages" install_packages "${packages[@]}"
  timed "install Python packages" step "installing Python packages" python_environment
fi
if $builds; then timed "build" step "building everything (Release)" build; fi
$tests || exit 0
# Without the originals the tests of the drop-in functions would be skipped.
for site in site-originals site-mutants; do
  [ -d "build/$site" ] || { echo "run.sh: error: no build/$site; run bash tests/run.sh --build" >&2; exit 1; }
done

export TEST_BINARIES=$PWD/build/$preset/bin
python=build/venv-tests/bin/python
ctest_options=(--test-dir "build/$preset" --no-tests=error --output-on-failure -j "$jobs" -LE gpu)
# Many tests wait for a server or a build, so there is one process more than there are cores. The tests of a file stay in one
# process, for their fixtures. What only a release needs runs weekly.
python_tests=tests
pytest_options=(-q --durations 10 -n $((jobs + 1)) --dist loadfile --no-loadscope-reorder -m "not release")
if $quick; then
  ctest_options+=(-L unit)
  python_tests=tests/unit
fi
# Each suite writes its own log, and a failed suite does not stop the next one.
cpp_suite() {
  ctest "${ctest_options[@]}" 2>&1 | tee "$step_logs/ctest.log" |
    grep -vE '^ *(Start|[0-9]+/[0-9]+ Test.*(Passed|Skipped))'
  return "${PIPESTATUS[0]}"
}
python_suite() { "$python" -m pytest "${pytest_options[@]}" "$python_tests" 2>&1 | tee "$step_logs/pytest.log"; }

status=0
timed "C++ tests" cpp_suite || status=1
timed "Python tests" python_suite || status=1

echo
echo "Summary ($(date -u +%FT%TZ), $((SECONDS / 60)) min $((SECONDS % 60)) s)"
{ grep -E '^[0-9]+% tests passed' "$step_logs/ctest.log" || echo "did not finish"; } | sed 's/^/  C++     /'
# Skipped tests prove nothing, so they are counted next to the passed ones.
skipped=$(grep -cE '^ *[0-9]+/[0-9]+ Test.*[*]{3}Skipped' "$step_logs/ctest.log" || true)
[ "$skipped" -eq 0 ] || echo "          $skipped skipped: see $step_logs/ctest.log"
tail -n 1 "$step_logs/pytest.log" | sed 's/^/  Python  /'
echo "          second builds of packages are not run here: see tests/README.md"
echo "  GPU     not run here: see tests/gpu/README.md"
[ "$status" -eq 0 ] && echo "All tests passed." || echo "Some tests failed: see the logs in $step_logs."
exit "$status"
