#!/usr/bin/env bash
# Builds, then packs the GPU tests, the benchmarks, the server, its command line client and the operator's library into one
# archive, stripped, with the distribution's libraries that they need. run.sh runs them on a GPU machine of another
# distribution, which needs no compiler.
#   bash tests/gpu/pack.sh [BUILD] [ARCHIVE]   by default build/release and build/gpu.tar.xz
#   bash tests/gpu/pack.sh --wheels [FOLDER]   the Python packages of the service's baselines, for Python 3.12, into
#                                              build/wheels, for a machine that cannot fetch them itself; those that the
#                                              operator's drop-in functions replace into build/wheels/originals
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fetch_wheels() {
  local folder=$1 version package
  local -a packages=() platforms=()
  # The tests' versions; protobuf is the version that this grpcio-tools generates code for.
  for package in grpcio grpcio-tools; do
    version=$(sed -n "s/^$package==//p" tests/requirements.txt)
    packages+=("$package==$version")
  done
  packages+=("protobuf==$(build/venv-tests/bin/python -c 'import google.protobuf as p; print(p.__version__)')")
  for version in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${version}_x86_64")
  done
  rm -rf "$folder"
  build/venv-tests/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
    --dest "$folder" "${packages[@]}"
  build/venv-tests/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
    --dest "$folder/originals" -r tests/requirements-originals.txt
  du -ch "$folder"/*.whl "$folder"/originals/*.whl
}

if [ "${1:-}" = --wheels ]; then
  fetch_wheels "${2:-build/wheels}"
  exit
fi
build=${1:-build/release} archive=${2:-build/gpu.tar.xz}

# Stale binaries would be tested under the name of the current commit.
echo "pack.sh: building $build ..." >&2
cmake --build "$build" >"$build/pack.log" 2>&1 || { tail -n 20 "$build/pack.log" >&2; exit 1; }
shopt -s nullglob
binaries=("$build"/tests/*_gpu_test "$build"/tests/fused_example "$build"/bin/gpu_*_bench)
[ ${#binaries[@]} -gt 0 ] || { echo "pack.sh: error: no GPU tests in $build: build with -DLOGPROBD_CUDA=ON" >&2; exit 1; }
for name in logprobd logprobctl engine_bench transport_bench transport_load_bench; do
  if [ -x "$build/bin/$name" ]; then
    binaries+=("$build/bin/$name")
  else
    echo "pack.sh: note: $build/bin/$name is missing and left out: build with -DLOGPROBD_BENCHMARKS=ON" >&2
  fi
done

staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
mkdir "$staging/bin" "$staging/lib"
for binary in "${binaries[@]}"; do
  strip -o "$staging/bin/$(basename "$binary")" "$binary"
done
# The C and C++ libraries and everything of CUDA belong to the other machine.
ldd "${binaries[@]}" | awk '$3 ~ /^\// {print $3}' | sort -u |
  grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[^/]*)\.so|/libcu|/libnv' |
  while read -r library; do strip -o "$staging/lib/$(basename "$library")" "$(readlink -f "$library")"; done
for library in "$build"/lib/liblogprobd_torch_ops.so "$build"/lib/liblogprobd_kernels.so.*; do
  strip -o "$staging/bin/$(basename "$library")" "$library"
done
# The memory leak that the soak test must find, and the driver that hangs; the other machine may have no compiler.
for source in tests/soak/leak.c tests/support/faulty_calls.c; do
  "${CC:-cc}" -O1 -shared -fPIC -o "$staging/bin/$(basename "$source" .c).so" "$source" -ldl
done
git describe --always --dirty --abbrev=12 --match= >"$staging/bin/COMMIT"
# The binaries share most of their GPU code, which a dictionary as large as the archive finds.
tar -C "$staging" -c bin lib | xz -T1 --lzma2=preset=6,dict=512MiB >"$archive"
du -h "$archive"
