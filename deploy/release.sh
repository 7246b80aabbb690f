#!/usr/bin/env bash
# Builds everything that a release consists of into dist/: wheels and source distributions, the list of their contents, the
# packages of the newer gRPC, a Debian package, the manifests for Kubernetes, the documentation site, with buildah the images,
# and SHA256SUMS.
#   bash deploy/release.sh [--base IMAGE] VERSION   on a clean checkout whose version is VERSION
#   bash deploy/release.sh --dry-run VERSION        only checks the version, the changelog and the checkout
# --base  root file system of the images (default: that of deploy/image/build.sh)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
dry_run=false base=()
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=true; shift ;;
    --base) base=(--base "${2:?--base needs the name of an image}"); shift 2 ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit ;;
    *) break ;;
  esac
done
[ $# -eq 1 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
version=$1
fail() { echo "release.sh: error: $*" >&2; exit 1; }

# CMakeLists.txt defines the version. The Python packages repeat it, because they can be built without CMake.
defined=$(bash deploy/version.sh)
[ "$version" = "$defined" ] || fail "CMakeLists.txt has version $defined, not $version: change it there, or release $defined"
for file in client/python/logprobd/__init__.py client/adapters/logprobd_adapters/__init__.py kernels/torch_ops/python/logprobd_ops/_operator.py \
  deploy/packages/server/logprobd_server/__init__.py deploy/packages/kernels/logprobd_kernels/__init__.py; do
  grep -qE "^(__version__|VERSION) = \"$version\"$" "$file" || fail "$file has another version than $version"
done
grep -q "\"logprobd-kernels==$version\"" kernels/torch_ops/python/pyproject.toml ||
  fail "kernels/torch_ops/python/pyproject.toml needs another version of logprobd-kernels than $version"
tags=$(grep -rhoE 'newTag: .*' deploy/kubernetes | sed -E 's/newTag: //; s/-cuda$//' | sort -u)
[ "$tags" = "$version" ] || fail "deploy/kubernetes has images of the versions $tags, not $version"
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
# Programs and kernels of every supported GPU, without tests. The path of the build is part of the programs. The Debian package
# has the distribution's gRPC, which gets security updates; the wheel and the images have the newer one inside. Its packages
# are part of the release, because the suites do not keep them.
rm -rf build/dist build/dist-newer-grpc
bash deploy/newer_grpc/make_prefix.sh --pinned
cmake --preset cuda -B build/dist -DLOGPROBD_TESTS=OFF -DLOGPROBD_BENCHMARKS=OFF
cmake --build build/dist --target logprobd logprobctl logprobd_kernels
cmake --preset newer-grpc -B build/dist-newer-grpc -DLOGPROBD_CUDA=ON -DLOGPROBD_TESTS=OFF -DLOGPROBD_BENCHMARKS=OFF
cmake --build build/dist-newer-grpc --target logprobd logprobctl
bash deploy/packages/build_wheels.sh build/dist-newer-grpc "$out"
tar --sort=name --mtime="@$(git log -1 --format=%ct)" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
  -C build/newer_grpc -cf "$out/logprobd-newer-grpc-$version.tar" packages
bash deploy/packages/build_operator.sh build/dist "$out"
bash deploy/debian/make_deb.sh build/dist "$out"
git archive --format=tar --prefix="logprobd-kubernetes-$version/" HEAD deploy/kubernetes deploy/monitoring |
  gzip -9n >"$out/logprobd-kubernetes-$version.tar.gz"
bash deploy/site/build.sh build/dist/site
tar --sort=name --mtime="@$(git log -1 --format=%ct)" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
  --transform="s,^site,logprobd-docs-$version," -C build/dist -c site | gzip -9n >"$out/logprobd-docs-$version.tar.gz"
if command -v buildah >/dev/null; then
  for target in cpu cuda; do
    tag=$version
    [ $target = cpu ] || tag+=-$target
    bash deploy/image/build.sh "${base[@]}" --packages "$out" --tag "logprobd:$tag" $target
    buildah push "logprobd:$tag" "docker-archive:$out/logprobd-image-$tag.tar:logprobd:$tag"
    python3 deploy/image/repeatable_archive.py "$out/logprobd-image-$tag.tar"
  done
else
  echo "release.sh: note: there is no buildah, so $out has no images" >&2
fi
(cd "$out" && sha256sum -- * >SHA256SUMS)
cat "$out/SHA256SUMS"
