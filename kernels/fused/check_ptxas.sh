#!/usr/bin/env bash
# Runs a compiler command and fails if ptxas serialised wgmma (C7510) or spilled registers. Such a
# kernel computes correct results, but it is slow.
set -uo pipefail
output=$("$@" 2>&1)
status=$?
if [ "$status" -ne 0 ]; then
  printf '%s\n' "$output" >&2
  exit "$status"
fi
if faults=$(grep -E 'C75[0-9]{2}|[1-9][0-9]* bytes spill' <<<"$output"); then
  printf 'check_ptxas.sh: ptxas serialised wgmma or spilled registers, so the kernel would be slow:\n%s\n' "$faults" >&2
  exit 1
fi
grep -E 'warning|error' <<<"$output" >&2 || true
