#!/usr/bin/env bash
# Downloads CUTLASS's headers into build/cutlass. They are a wheel on PyPI that needs no installation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=4.2.0.0
[ -f "build/cutlass/nvidia_cutlass-$version.dist-info/METADATA" ] && exit 0
rm -rf build/cutlass build/cutlass.part
/usr/bin/python3 -m venv build/cutlass.part
echo "nvidia-cutlass==$version --hash=sha256:f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6" \
  >build/cutlass.part/requirements.txt
build/cutlass.part/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --require-hashes --dest build/cutlass.part -r build/cutlass.part/requirements.txt
/usr/bin/python3 -m zipfile -e build/cutlass.part/nvidia_cutlass-"$version"-*.whl build/cutlass.part/unpacked
mv build/cutlass.part/unpacked build/cutlass
rm -rf build/cutlass.part
