#!/usr/bin/env bash
# Builds the packages of the operator: the wheel of logprobd-kernels, which has the kernels of a build, the source distribution
# of logprobd-ops, its wheel, which has a library for each given torch, and an SPDX document of what is in the kernels. The
# same kernels, compiler and commit give the same bytes.
#   bash deploy/packages/build_operator.sh [BUILD] [OUT] [FOLDER...]     by default build/release and build/packages
# FOLDER contains a package torch, such as the site-packages of an environment. Without one, the wheels of PyPI that
# torch/*.txt pin are fetched (6 GB) and unpacked into build/torch (7 GB). Each takes 3 minutes on two CPUs; $CXX is the compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:-build/release} out=${2:-build/packages}
shift $(($# < 2 ? $# : 2))
torches=("$@")
source deploy/packages/build_steps.sh
kernels=$build/lib/liblogprobd_kernels.so.$version
[ -f "$kernels" ] || { echo "build_operator.sh: error: no $kernels; run cmake --build $build --target logprobd_kernels" >&2; exit 1; }
mkdir -p "$out"

# fetch_torch FILE FOLDER: unpacks the headers and libraries of the wheels that a list pins, of torch and of CUDA's runtime.
fetch_torch() {
  local wanted
  wanted=$(sha256sum <"$1")
  [ "$(cat "$2/.requirements" 2>/dev/null)" != "$wanted" ] || return 0
  echo "build_operator.sh: fetching $(grep -o '^torch==[^ ]*' "$1")" >&2
  rm -rf "$2"
  quietly python3 -m pip download --no-deps --no-cache-dir --require-hashes --only-binary :all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$staging/wheels" -r "$1"
  python3 - "$2" "$staging"/wheels/*.whl <<'PYTHON'
import re, sys, zipfile
wanted = r"torch/(include/.*|version\.py|__init__\.py|lib/lib(torch|torch_cpu|torch_cuda|c10|c10_cuda)\.so)|nvidia/.*/include/.*"
for wheel in map(zipfile.ZipFile, sys.argv[2:]):
    wheel.extractall(sys.argv[1], [name for name in wheel.namelist() if re.fullmatch(wanted, name)])
PYTHON
  rm -r "$staging/wheels"
  printf '%s' "$wanted" >"$2/.requirements"
}

if [ ${#torches[@]} -eq 0 ]; then
  for list in deploy/packages/torch/*.txt; do
    torches+=("$PWD/build/torch/$(basename "$list" .txt)")
    fetch_torch "$list" "${torches[-1]}"
  done
fi

copy_tracked deploy/packages/kernels
package=$staging/deploy/packages/kernels
cp LICENSE "$package"
cp deploy/packages/platform_setup.py "$package/setup.py"
mkdir "$package/logprobd_kernels/lib"
strip -o "$package/logprobd_kernels/lib/$(basename "$kernels")" "$kernels"
mkdir "$package/logprobd_kernels/include"
git ls-files -z -- 'kernels/*.h' ':!kernels/torch_ops' | xargs -0 cp --parents -t "$package/logprobd_kernels/include"
quietly python3 deploy/packages/contents.py --name logprobd-kernels --version "$version" --licenses "$package/licenses" \
  --sbom "$out/logprobd_kernels-$version.spdx.json" "$kernels"
quietly python -m build --wheel --no-isolation --outdir "$staging/unrepaired" "$package"

copy_tracked kernels/torch_ops
mv "$staging/kernels/torch_ops/python" "$staging/operator"
mkdir -p "$staging/operator/csrc"
mv "$staging/kernels" "$staging/operator/csrc/kernels"
cp LICENSE "$staging/operator"
quietly python -m build --sdist --no-isolation --outdir "$staging/packages" "$staging/operator"
repack "$staging"/packages/logprobd_ops-*.tar.gz "$out"
# The libraries are built as users build theirs.
source=$staging/logprobd_ops-$version
for torch in "${torches[@]}"; do
  # Other packages beside torch must not replace the pinned tools.
  rm -rf "$staging/torch"
  mkdir "$staging/torch"
  ln -s "$(realpath "$torch")/torch" "$staging/torch/torch"
  for headers in nvidia triton; do
    [ ! -e "$torch/$headers" ] || ln -s "$(realpath "$torch")/$headers" "$staging/torch/$headers"
  done
  (cd "$source" && PYTHONPATH=$staging/torch:$package python setup.py --quiet build_ext --inplace --build-temp "$staging/objects")
  rm -r "$staging/objects"
done
quietly python -m build --wheel --no-isolation --outdir "$staging/unrepaired" "$source"
for wheel in "$staging"/unrepaired/*.whl; do
  # Importing torch and logprobd_kernels loads these.
  quietly auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --exclude 'liblogprobd_kernels.so.*' \
    --wheel-dir "$out" "$wheel"
done
ls -l "$out"
