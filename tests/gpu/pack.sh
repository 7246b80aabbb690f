#!/usr/bin/env bash
# Collects GPU tests and benchmarks of a build, stripped, with the distribution's libraries that they need,
# so that they run on a GPU machine of another distribution.
#   bash tests/gpu/pack.sh [BUILD] [OUT]    build/release and build/gpu by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tests/gpu/collect.sh
build=${1:-build/release} out=${2:-build/gpu}

shopt -s nullglob
binaries=("$build"/tests/*_gpu_test "$build"/bin/gpu_*_bench)
[ ${#binaries[@]} -gt 0 ] || { echo "no GPU tests in $build: build with -DLOGPROBD_CUDA=ON" >&2; exit 1; }
rm -rf "$out"
collect "$out" "$out/lib" "${binaries[@]}"
du -sh "$out" | cut -f1
