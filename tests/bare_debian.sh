#!/usr/bin/env bash
# Checks that the README's first command works on a bare system: makes a minimal Debian 12 root file system
# with debootstrap, unpacks the committed tree in it and runs deploy/quickstart.sh there twice.
#   sudo bash tests/bare_debian.sh [DIR]     DIR: new folder of that root (default build/bare-debian)
# tests/run.sh does not run this script, because it needs root and takes about fifteen minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$(realpath -m "${1:-build/bare-debian}")
[ "$(id -u)" -eq 0 ] || { echo "bare_debian.sh: error: debootstrap and chroot need root: use sudo" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "bare_debian.sh: error: debootstrap is not installed" >&2; exit 1; }
[ ! -e "$root" ] || { echo "bare_debian.sh: error: $root exists: remove it first" >&2; exit 1; }

cleanup() {
  mountpoint -q "$root/proc" && umount -l "$root/proc" || true
}
trap cleanup EXIT

echo "making a bare root file system in $root"
debootstrap --variant=minbase bookworm "$root" >"$root.log" 2>&1 || { tail "$root.log"; exit 1; }
mount -t proc proc "$root/proc"
cp /etc/resolv.conf "$root/etc/resolv.conf"
# A machine behind a proxy may trust additional certificates, which the new root file system then needs too.
mkdir -p "$root/usr/local/share/ca-certificates"
find /usr/local/share/ca-certificates -name '*.crt' -exec cp {} "$root/usr/local/share/ca-certificates/" \;
mkdir -p "$root/src"
git archive HEAD | tar -x -C "$root/src"

in_root() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"; }
packages_before=$(in_root dpkg-query -f '.\n' -W | wc -l)
echo "a bare root file system has $packages_before packages; first run:"
start=$SECONDS
in_root bash /src/deploy/quickstart.sh --device cpu --port 18470 --http-port 19470
first=$((SECONDS - start))
echo
echo "second run:"
start=$SECONDS
in_root bash /src/deploy/quickstart.sh --device cpu --port 18470 --http-port 19470
second=$((SECONDS - start))
# `find | grep -q` is not used, because grep exits at the first match: find then ends with SIGPIPE, and pipefail
# would turn the match into "nothing found".
if [ -n "$(in_root find /src/build/venv '(' -iname 'nvidia*' -o -iname 'torch*' ')' -print -quit)" ]; then
  echo "FAIL: the CPU set-up downloaded CUDA wheels or torch" >&2
  exit 1
fi
[ "$second" -lt 30 ] || { echo "FAIL: the second run took $second s, but the limit is 30 s" >&2; exit 1; }
echo
echo "PASS: bare Debian 12, first run $first s, second run $second s, no CUDA wheels"
