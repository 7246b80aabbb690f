#!/usr/bin/env bash
# Prints the version of this checkout, which CMakeLists.txt defines.
sed -nE 's/^project\(logprobd VERSION ([0-9.]+) .*/\1/p' "$(dirname "${BASH_SOURCE[0]}")/../CMakeLists.txt"
