#!/usr/bin/env bash
# Builds the wheels of the server and of the Python client, the client's source distribution, and an SPDX document of what
# is in the server's wheel: the programs of a build and all libraries that they need, except the C and C++ libraries and
# those of CUDA. The same programs and the same commit give the same bytes.
#   bash deploy/packages/build_wheels.sh [BUILD] [OUT]     by default build/release and build/packages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:-build/release} out=${2:-build/packages}
for name in logprobd logprobctl; do
  [ -x "$build/bin/$name" ] || { echo "build_wheels.sh: error: no $build/bin/$name; run cmake --build $build" >&2; exit 1; }
done

source deploy/tool_environment.sh
tool_environment packages

# Files in the archives get the time of the commit.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT
mkdir -p "$out"

cp -r deploy/packages/server "$staging/server"
cp LICENSE "$staging/server"
mkdir "$staging/server/logprobd_server/bin"
for name in logprobd logprobctl; do
  strip -o "$staging/server/logprobd_server/bin/$name" "$build/bin/$name"
done
version=$(bash deploy/version.sh)
python3 deploy/packages/contents.py --version "$version" --licenses "$staging/server/licenses" \
  --sbom "$out/logprobd_server-$version.spdx.json" "$build/bin/logprobd" "$build/bin/logprobctl" >"$staging/log"
# The packages of the extra [cuda] lie beside ours. auditwheel adds the folder of the libraries that it copies.
patchelf --set-rpath '$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../nvidia/nccl/lib' \
  "$staging/server/logprobd_server/bin/logprobd"
python -m build --wheel --no-isolation --outdir "$staging/unrepaired" "$staging/server" >"$staging/log" 2>&1 ||
  { cat "$staging/log" >&2; exit 1; }
auditwheel repair --strip --wheel-dir "$out" "$staging"/unrepaired/*.whl >"$staging/log" 2>&1 ||
  { cat "$staging/log" >&2; exit 1; }

# Files that git does not know, such as caches, stay out of the client's packages.
git ls-files -z client/python LICENSE | xargs -0 cp --parents -t "$staging"
cp LICENSE "$staging/client/python"
python -m build --no-isolation --outdir "$staging/client" "$staging/client/python" >"$staging/log" 2>&1 ||
  { cat "$staging/log" >&2; exit 1; }
cp "$staging"/client/*.whl "$out"
# setuptools writes the current time into source distributions.
for archive in "$staging"/client/*.tar.gz; do
  tar -xf "$archive" -C "$staging/client"
  folder=$(basename "$archive" .tar.gz)
  tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$staging/client" -c "$folder" |
    gzip -9n >"$out/$folder.tar.gz"
done
ls -l "$out"
