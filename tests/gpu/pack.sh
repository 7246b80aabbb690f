#!/usr/bin/env bash
# Collects GPU tests and benchmarks of a build, stripped, with the distribution's libraries that they need,
# so that they run on a GPU machine of another distribution.
#   bash tests/gpu/pack.sh [BUILD] [OUT]    build/release and build/gpu by default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:-build/release} out=${2:-build/gpu}

rm -rf "$out"
mkdir -p "$out/lib"
shopt -s nullglob
binaries=("$build"/tests/*_gpu_test "$build"/bin/gpu_*_bench)
[ ${#binaries[@]} -gt 0 ] || { echo "no GPU tests in $build: build with -DLOGPROBD_CUDA=ON" >&2; exit 1; }
for binary in "${binaries[@]}"; do
  strip -o "$out/$(basename "$binary")" "$binary"
done
# Not the C and C++ libraries, which the other machine has, nor anything of CUDA.
ldd "${binaries[@]}" | awk '$3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[^/]*)\.so|/libcu|/libnv' |
  xargs -I{} cp -L {} "$out/lib/"
du -sh "$out" | cut -f1
