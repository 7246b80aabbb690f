#!/usr/bin/env bash
# Packs the server, its command line client and the benchmarks around them, with the distribution's libraries
# that they need, into one archive for a GPU machine of another distribution: run_service.sh runs them there.
#   bash tests/gpu/pack_service.sh [BUILD] [ARCHIVE]   build/release and build/service.tar.xz by default
#   bash tests/gpu/pack_service.sh --wheels [FOLDER]   the Python packages of the baselines, for Python 3.12,
#                                                      into build/wheels by default, where that machine cannot fetch them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/collect.sh

fetch_wheels() {
  local folder=$1 version package
  local -a wanted=() platforms=()
  # As the tests pin them; protobuf is what this grpcio-tools generates code for.
  for package in grpcio grpcio-tools; do
    version=$(sed -n "s/^$package==//p" tests/requirements.txt)
    wanted+=("$package==$version")
  done
  wanted+=("protobuf==$(build/venv-tests/bin/python -c 'import google.protobuf as p; print(p.__version__)')")
  for version in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${version}_x86_64")
  done
  rm -rf "$folder"
  build/venv-tests/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --dest "$folder" "${wanted[@]}"
  du -ch "$folder"/*.whl
}

if [ "${1:-}" = --wheels ]; then
  fetch_wheels "${2:-build/wheels}"
  exit
fi
build=${1:-build/release} archive=${2:-build/service.tar.xz}

binaries=()
for name in logprobd logprobctl engine_bench transport_bench transport_load_bench; do
  [ -x "$build/bin/$name" ] || { echo "no $name in $build: build with -DLOGPROBD_BENCHMARKS=ON" >&2; exit 1; }
  binaries+=("$build/bin/$name")
done
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
collect "$staging/bin" "$staging/lib" "${binaries[@]}"
# The leak that the soak must find: that machine may have no compiler.
"${CC:-cc}" -O1 -shared -fPIC -o "$staging/bin/leak.so" tests/soak/leak.c -ldl
tar -C "$staging" -c bin lib | xz -T0 -6 >"$archive"
du -h "$archive"
