#!/usr/bin/env bash
# Makes a prefix with the newer gRPC, Protobuf, Abseil and OpenSSL as static libraries, for CMAKE_PREFIX_PATH, from the
# packages of packages.tsv.
#   bash deploy/newer_grpc/make_prefix.sh [--pinned] [--packages FOLDER] [PREFIX]     by default build/newer_grpc
# --pinned    fails if a pinned package is neither in FOLDER nor in the suites; otherwise the suites' newest are taken
# --packages  folder that keeps the packages (default: PREFIX/packages)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=deploy/newer_grpc pinned=() packages=""
while [ $# -gt 0 ]; do
  case $1 in
    --pinned) pinned=(--pinned); shift ;;
    --packages) packages=$2; shift 2 ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit ;;
    *) break ;;
  esac
done
prefix=${1:-build/newer_grpc}
packages=${packages:-$prefix/packages}
python3 $here/packages.py fetch "${pinned[@]}" "$packages"
wanted=$(cat "$packages/packages.tsv" $here/make_prefix.sh $here/runtime_shims.cc $here/cmake/* <(g++ --version) | sha256sum)
[ "$(cat "$prefix/.made" 2>/dev/null)" != "$wanted" ] || exit 0

mkdir -p "$prefix"
prefix=$(realpath "$prefix") packages=$(realpath "$packages")
for name in bin include lib licenses system; do rm -rf "${prefix:?}/$name"; done
rm -f "$prefix/.made" "$prefix/contents.tsv"
mkdir -p "$prefix"/{bin,lib/cmake,licenses}
# A root for the compilers of Protobuf, which run with the C library of their packages.
system=$prefix/system
mkdir -p "$system"/usr/{bin,lib,lib64,sbin}
for name in bin lib lib64 sbin; do ln -s usr/$name "$system/$name"; done
for package in "$packages"/*.deb; do
  dpkg-deb --extract "$package" "$system"
done
for name in $(tail -n +2 "$packages/packages.tsv" | cut -f 1); do
  cp "$system/usr/share/doc/$name/copyright" "$prefix/licenses/$name.txt"
done
libraries=$system/usr/lib/x86_64-linux-gnu
for program in protoc grpc_cpp_plugin; do
  cat >"$prefix/bin/$program" <<PROGRAM
#!/bin/sh
system=\$(dirname "\$(dirname "\$(realpath "\$0")")")/system
exec "\$system/lib64/ld-linux-x86-64.so.2" --library-path "\$system/usr/lib/x86_64-linux-gnu" "\$system/usr/bin/$program" "\$@"
PROGRAM
  chmod 755 "$prefix/bin/$program"
done
mv "$system/usr/include" "$prefix/include"
cp -r "$prefix/include/x86_64-linux-gnu/." "$prefix/include" && rm -r "$prefix/include/x86_64-linux-gnu"
# Left out: what is for tests, for other credentials and services, or a second copy of something.
for archive in "$libraries"/*.a; do
  case $(basename "$archive") in
    *unsecure* | *_alts* | *channelz* | *authorization* | *error_details* | *plugin_support* | libprotoc.a | libprotobuf-lite.a | libutf8_range.a | \
    libabsl_*test* | libabsl_*mock*) ;;
    *) mv "$archive" "$prefix/lib" ;;
  esac
done
g++ -std=c++17 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -c $here/runtime_shims.cc -o "$prefix/runtime_shims.o"
ar rcsD "$prefix/lib/libruntime_shims.a" "$prefix/runtime_shims.o"
rm "$prefix/runtime_shims.o"
# Our package files stand before those of the packages, whose targets are shared libraries.
cp $here/cmake/static_archives.cmake "$prefix/lib/cmake"
for name in absl grpc protobuf; do
  mkdir "$prefix/lib/cmake/$name"
  cp "$libraries/cmake/$name"/*[vV]ersion.cmake "$prefix/lib/cmake/$name"
done
cp "$libraries/cmake/absl/abslTargets.cmake" $here/cmake/abslConfig.cmake "$prefix/lib/cmake/absl"
cp $here/cmake/gRPCConfig.cmake "$prefix/lib/cmake/grpc"
cp $here/cmake/protobuf-config.cmake "$prefix/lib/cmake/protobuf"
rm -rf "$system/usr/share" "$libraries/cmake"
find "$libraries" -name '*.a' -delete
# What the archives are from: package, version, source package. deploy/packages/contents.py lists it.
for package in "$packages"/*-dev_*.deb; do
  dpkg-deb --showformat '${Package}\t${Version}\t${source:Package}\n' --show "$package"
done >"$prefix/contents.tsv"
printf '%s' "$wanted" >"$prefix/.made"
