#!/usr/bin/env bash
# Runs the unit tests in random order, eight at once, to find those that depend on an order, on another test or on a quiet
# machine. `bash tests/run.sh --build` comes first.
#   bash tests/random_order.sh             once
#   bash tests/random_order.sh 20          twenty times
#   bash tests/random_order.sh 1 SEED      the Python tests once more in the order of a seed
# Exit status: 1 if a test failed in any run; the seed of a run of Python tests stands before it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
runs=${1:-1} seed=${2:-}
case "$runs$seed" in *[!0-9]*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' tests/random_order.sh >&2; exit 2 ;; esac
export TEST_BINARIES=$PWD/build/release/bin
python=build/venv-tests/bin/python
[ -x "$python" ] || { echo "random_order.sh: error: no $python; run bash tests/run.sh --build" >&2; exit 1; }
for site in site-originals site-mutants; do  # without them tests would be skipped
  [ -d "build/$site" ] || { echo "random_order.sh: error: no build/$site; run bash tests/run.sh --build" >&2; exit 1; }
done
source tests/shared_folder.sh
shared_folder site-randomly randomly install_alone tests/requirements-random.txt

failed=0
for ((run = 1; run <= runs; ++run)); do
  if [ -z "$seed" ]; then
    echo "run $run: C++"
    ctest --test-dir build/release --schedule-random --no-tests=error --output-on-failure -j 8 -LE gpu -L unit 2>&1 |
      grep -vE '^ *(Start|[0-9]+/[0-9]+ Test.*(Passed|Skipped))' || failed=1
  fi
  order=${seed:-$((RANDOM * 32768 + RANDOM))}
  echo "run $run: Python, seed $order"
  PYTHONPATH=build/site-randomly "$python" -m pytest -q -p no:cacheprovider -p randomly --randomly-seed "$order" -n 8 \
    -m "not release" tests/unit || failed=1
done
exit "$failed"
