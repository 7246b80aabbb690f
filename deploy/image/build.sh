#!/usr/bin/env bash
# Builds the container image of the server from the wheel in build/packages, with buildah, podman or docker.
#   bash deploy/image/build.sh [--base IMAGE] [--tag NAME] [cpu|cuda]
# --base   image with the root file system (default: debian:12-slim)
# --tag    name of the result (default: logprobd:VERSION-cpu or logprobd:VERSION-cuda)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
base=debian:12-slim tag="" target=cpu
while [ $# -gt 0 ]; do
  case $1 in
    --base) base=$2; shift 2 ;;
    --tag) tag=$2; shift 2 ;;
    cpu | cuda) target=$1; shift ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "build.sh: error: unknown argument $1; --help explains them" >&2; exit 2 ;;
  esac
done
version=$(sed -nE 's/^project\(logprobd VERSION ([0-9.]+) .*/\1/p' CMakeLists.txt)
tag=${tag:-logprobd:$version-$target}
compgen -G 'build/packages/logprobd_server-*.whl' >/dev/null ||
  { echo "build.sh: error: no server wheel in build/packages: run bash deploy/packages/build_wheels.sh" >&2; exit 1; }
arguments=(--build-arg "BASE=$base" --target "$target" -t "$tag" -f deploy/image/Containerfile .)
if command -v buildah >/dev/null; then
  # Without user namespaces, as in a container, LOGPROBD_BUILDAH can hold --isolation chroot --storage-driver vfs.
  read -ra options <<<"${LOGPROBD_BUILDAH:-}"
  # Only Docker's format has a health check.
  buildah "${options[@]}" build --format docker --timestamp "$(git log -1 --format=%ct)" "${arguments[@]}"
elif command -v podman >/dev/null; then
  podman build --format docker "${arguments[@]}"
else
  docker build "${arguments[@]}"
fi
echo "built $tag"
