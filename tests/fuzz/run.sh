#!/usr/bin/env bash
# Builds the fuzz targets with clang and runs each one from its committed corpus.
#   bash tests/fuzz/run.sh [SECONDS [TARGET...]]   60 s each by default; fails if a target finds something
#   bash tests/fuzz/run.sh --minimise              replaces the corpora by the smallest ones with the same coverage
# New inputs stay in build/fuzz/corpus, so that the next run continues from them. An input that fails is kept in
# build/fuzz/found. The result is written to build/fuzz/result.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

minimises=false seconds=60
case "${1:-}" in
  --minimise) minimises=true; shift ;;
  "") ;;
  *[!0-9]*) echo "usage: bash tests/fuzz/run.sh [--minimise | SECONDS] [TARGET...]" >&2; exit 2 ;;
  *) seconds=$1; shift ;;
esac
targets=("$@")
[ "$#" -gt 0 ] || targets=(wire_parser push_parser control_packet safetensors model_config toml http http2)

# LOGPROBD_CUDA=OFF and RelWithDebInfo: the code that parses is on the host, and fast enough with debug information.
cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++-14 -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLOGPROBD_CUDA=OFF \
  -DLOGPROBD_FUZZ=ON -DLOGPROBD_SANITIZE=fuzzer-no-link,address,undefined >/dev/null
cmake --build build/fuzz -j "$(nproc)" --target "${targets[@]/%/_fuzz}"
mkdir -p build/fuzz/found build/fuzz/logs

export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
# An input may take 10 s, or 2 GiB of memory.
options=(-timeout=10 -rss_limit_mb=2048 -max_len=8192 -print_final_stats=1)

minimise() {
  local target=$1 small
  small=$(mktemp -d)
  mkdir -p "build/fuzz/corpus/$target"
  "build/fuzz/fuzz/${target}_fuzz" -set_cover_merge=1 -use_counters=0 "${options[@]}" "$small" "tests/fuzz/corpus/$target" \
    "build/fuzz/corpus/$target" >"build/fuzz/logs/$target.merge" 2>&1
  rm -rf "tests/fuzz/corpus/$target"
  mv "$small" "tests/fuzz/corpus/$target"
  chmod 755 "tests/fuzz/corpus/$target"
}

fuzz() {
  local target=$1 log=build/fuzz/logs/$1
  mkdir -p "build/fuzz/corpus/$target"
  "build/fuzz/fuzz/${target}_fuzz" "${options[@]}" -max_total_time="$seconds" -artifact_prefix="build/fuzz/found/$target-" \
    "build/fuzz/corpus/$target" "tests/fuzz/corpus/$target" >"$log" 2>&1 ||
    { echo "== $target failed" >&2; grep -vE '^#[0-9]+' "$log" | tail -n 60 >&2; return 1; }
}

run() { if $minimises; then minimise "$1"; else fuzz "$1"; fi; }

# As many targets at a time as there are cores.
status=0
for target in "${targets[@]}"; do
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || status=1; done
  run "$target" &
done
while [ -n "$(jobs -p)" ]; do wait -n || status=1; done
$minimises && exit "$status"

python3 tests/fuzz/result.py "$seconds" "${targets[@]}" | tee build/fuzz/result.json
exit "$status"
