#!/usr/bin/env bash
# Downloads CUTLASS's headers into build/cutlass. They are a wheel on PyPI that needs no installation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=4.2.0.0
[ -f "build/cutlass/nvidia_cutlass-$version.dist-info/METADATA" ] && exit 0
rm -rf build/cutlass build/cutlass.part
/usr/bin/python3 -m venv build/cutlass.part
build/cutlass.part/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --dest build/cutlass.part "nvidia-cutlass==$version"
/usr/bin/python3 -m zipfile -e build/cutlass.part/nvidia_cutlass-"$version"-*.whl build/cutlass.part/unpacked
mv build/cutlass.part/unpacked build/cutlass
rm -rf build/cutlass.part
