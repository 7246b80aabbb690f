#!/usr/bin/env bash
# Builds everything that a release consists of into dist/: wheels and source distributions, the list of their contents, a
# Debian package, the manifests for Kubernetes, with buildah the image, and SHA256SUMS.
#   bash deploy/release.sh VERSION             on a clean checkout whose version is VERSION
#   bash deploy/release.sh --dry-run VERSION   only checks the version, the changelog and the checkout
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run=false
[ "${1:-}" != --dry-run ] || { dry_run=true; shift; }
[ $# -eq 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
version=$1
fail() { echo "release.sh: error: $*" >&2; exit 1; }

# CMakeLists.txt defines the version. The Python packages repeat it, because they can be built without CMake.
defined=$(bash deploy/version.sh)
[ "$version" = "$defined" ] || fail "CMakeLists.txt has version $defined, not $version: change it there, or release $defined"
for file in client/python/logprobd/__init__.py client/adapters/logprobd_adapters/__init__.py kernels/torch_ops/python/pyproject.toml \
  deploy/packages/server/logprobd_server/__init__.py; do
  grep -qE "^(__version__|version) = \"$version\"$" "$file" || fail "$file has another version than $version"
done
heading=$(grep -m1 '^## ' CHANGELOG.md)
if ! $dry_run; then
  grep -qE "^## $version \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" <<<"$heading" ||
    fail "the first entry of CHANGELOG.md is '$heading': it must be '## $version (YYYY-MM-DD)'"
  [ -z "$(git status --porcelain)" ] || fail "the checkout has changes that are not committed"
else
  grep -qE "^## $version " <<<"$heading" || fail "the first entry of CHANGELOG.md is '$heading', not one of $version"
  echo "version $version: consistent; CHANGELOG.md has an entry"
  exit
fi

out=dist
[ ! -e "$out" ] || fail "$out exists: remove it first"
# Programs and kernels of every supported GPU, without tests. The path of the build is part of the programs.
cmake --preset cuda -B build/dist -DLOGPROBD_TESTS=OFF -DLOGPROBD_BENCHMARKS=OFF
cmake --build build/dist --target logprobd logprobctl
bash deploy/packages/build_wheels.sh build/dist "$out"
bash deploy/debian/make_deb.sh build/dist "$out"
git archive --format=tar --prefix="logprobd-kubernetes-$version/" HEAD deploy/kubernetes deploy/monitoring |
  gzip -9n >"$out/logprobd-kubernetes-$version.tar.gz"
if command -v buildah >/dev/null; then
  bash deploy/image/build.sh --packages "$out" --tag "logprobd:$version" cpu
  buildah push "logprobd:$version" "docker-archive:$out/logprobd-image-$version.tar:logprobd:$version"
else
  echo "release.sh: note: there is no buildah, so $out has no image" >&2
fi
(cd "$out" && sha256sum -- * >SHA256SUMS)
cat "$out/SHA256SUMS"
