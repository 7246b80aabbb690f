#!/usr/bin/env bash
# Builds the container image of the server from its wheel, with buildah, podman or docker.
#   bash deploy/image/build.sh [--base IMAGE] [--tag NAME] [--packages DIR] [cpu|cuda]
# --base      image with the root file system (default: debian:12-slim)
# --packages  folder of the server's wheel (default: build/packages)
# --tag       name of the result (default: logprobd:VERSION for cpu, logprobd:VERSION-cuda)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
base=debian:12-slim packages=build/packages tag="" target=cpu
while [ $# -gt 0 ]; do
  case $1 in
    --base) base=$2; shift 2 ;;
    --packages) packages=$2; shift 2 ;;
    --tag) tag=$2; shift 2 ;;
    cpu | cuda) target=$1; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit ;;
    *) echo "build.sh: error: unknown argument $1; --help explains them" >&2; exit 2 ;;
  esac
done
compgen -G "$packages/logprobd_server-*.whl" >/dev/null ||
  { echo "build.sh: error: no server wheel in $packages: run bash deploy/packages/build_wheels.sh" >&2; exit 1; }
version=$(bash deploy/version.sh)
[ "$target" = cpu ] || version+=-$target
tag=${tag:-logprobd:$version}

# Nothing else of the checkout is sent to the builder.
context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
cp "$packages"/logprobd_server-*.whl deploy/image/cuda.txt "$context"
arguments=(--build-arg "BASE=$base" --target "$target" -t "$tag" -f deploy/image/Containerfile "$context")
# Only Docker's format has a health check.
if command -v buildah >/dev/null; then
  buildah build --format docker --timestamp "$(git log -1 --format=%ct)" "${arguments[@]}"
elif command -v podman >/dev/null; then
  podman build --format docker "${arguments[@]}"
else
  docker build "${arguments[@]}"
fi
echo "built $tag"
