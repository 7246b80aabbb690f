#!/usr/bin/env bash
# Builds the wheels of the server, of the Python client and of the adapters, the source distributions of the latter two, and an
# SPDX document of what is in the wheel of the server: the programs of a build and all libraries that they need, except the C
# and C++ libraries and those of CUDA. The same programs and the same commit give the same bytes.
#   bash deploy/packages/build_wheels.sh [BUILD] [OUT]     by default build/release and build/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:-build/release} out=${2:-build/packages}
for name in logprobd logprobctl; do
  [ -x "$build/bin/$name" ] || { echo "build_wheels.sh: error: no $build/bin/$name; run cmake --build $build" >&2; exit 1; }
done
source deploy/packages/build_steps.sh
mkdir -p "$out"

copy_tracked deploy/packages/server client/python client/adapters
server=$staging/deploy/packages/server
cp LICENSE "$server"
cp deploy/packages/platform_setup.py "$server/setup.py"
mkdir "$server/logprobd_server/bin"
for name in logprobd logprobctl; do
  strip -o "$server/logprobd_server/bin/$name" "$build/bin/$name"
done
# Programs with the gRPC of deploy/newer_grpc contain its libraries.
static=() prefix=$(sed -n 's,^gRPC_DIR:PATH=\(.*\)/lib/cmake/grpc$,\1,p' "$build/CMakeCache.txt")
[ ! -f "$prefix/contents.tsv" ] || static=(--static "$prefix")
quietly python3 deploy/packages/contents.py --name logprobd-server --version "$version" --licenses "$server/licenses" \
  "${static[@]}" --sbom "$out/logprobd_server-$version.spdx.json" "$build/bin/logprobd" "$build/bin/logprobctl"
# The packages of the extra [cuda] lie beside ours. auditwheel adds the folder of the libraries that it copies.
patchelf --set-rpath '$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../nvidia/nccl/lib' "$server/logprobd_server/bin/logprobd"
quietly python -m build --wheel --no-isolation --outdir "$staging/unrepaired" "$server"
quietly auditwheel repair --strip --wheel-dir "$out" "$staging"/unrepaired/*.whl

for folder in client/python client/adapters; do
  cp LICENSE "$staging/$folder"
  quietly python -m build --no-isolation --outdir "$staging/packages/$folder" "$staging/$folder"
  cp "$staging/packages/$folder"/*.whl "$out"
  repack "$staging/packages/$folder"/*.tar.gz "$out"
done
ls -l "$out"
