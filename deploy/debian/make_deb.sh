#!/usr/bin/env bash
# Builds a Debian package of logprobd and logprobctl from a finished build.
#   bash deploy/debian/make_deb.sh BUILD [OUT]
# BUILD is the build folder, whose bin/ holds the programs. The package goes to the folder OUT (default: BUILD), and its
# path is printed. The same programs and the same SOURCE_DATE_EPOCH (default: the time of the last commit) give the same
# bytes. It requires the packages dpkg-dev, binutils and help2man.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { echo "usage: bash deploy/debian/make_deb.sh BUILD [OUT]" >&2; exit 2; }
bin=$(realpath "$1")/bin out=$(realpath "${2:-$1}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
  echo "make_deb.sh: error: $*" >&2
  exit 1
}
for tool in dpkg-deb dpkg-shlibdeps strip help2man; do
  command -v "$tool" >/dev/null || fail "no $tool; install dpkg-dev, binutils and help2man"
done
for program in logprobd logprobctl; do
  [ -x "$bin/$program" ] || fail "$bin/$program is missing; build the release preset"
done
version=$(bash deploy/version.sh)
[[ "$("$bin/logprobd" --version)" == "logprobd $version "* ]] ||
  fail "$bin/logprobd is not of version $version, which CMakeLists.txt names; build it again"
architecture=$(dpkg --print-architecture)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/debian/logprobd doc=$work/debian/logprobd/usr/share/doc/logprobd
mkdir -p "$root/DEBIAN"  # by which dpkg-shlibdeps recognizes the root

# add MODE SOURCE TARGET: adds a file to the package.
add() { install -D -m "$1" "$2" "$root/$3"; }
for program in logprobd logprobctl; do
  add 0755 "$bin/$program" "usr/bin/$program"
  strip --strip-unneeded --remove-section=.comment --remove-section=.note "$root/usr/bin/$program"
done
add 0644 deploy/systemd/logprobd.service usr/lib/systemd/system/logprobd.service
add 0644 deploy/systemd/logprobd.sysusers usr/lib/sysusers.d/logprobd.conf
add 0644 deploy/systemd/logprobd.tmpfiles usr/lib/tmpfiles.d/logprobd.conf
add 0644 deploy/systemd/logprobd.default etc/default/logprobd
# The installed configuration names no model, so that the administrator must choose one.
sed 's|^model = .*|#model = "/var/lib/logprobd/models/NAME"|' deploy/config/logprobd.toml >"$work/logprobd.toml"
add 0644 "$work/logprobd.toml" etc/logprobd/logprobd.toml
! grep -q '^[^#]' "$root/etc/logprobd/logprobd.toml" || fail "deploy/config/logprobd.toml sets more than the model"
add 0644 deploy/systemd/tls.conf usr/share/doc/logprobd/examples/tls.conf
add 0644 LICENSE usr/share/doc/logprobd/copyright
add 0644 CHANGELOG.md usr/share/doc/logprobd/changelog
gzip -9n "$doc/changelog"

# manual PROGRAM SUMMARY: adds a manual page, made from --help.
manual() {
  install -d "$root/usr/share/man/man1"
  help2man --no-info --version-string="$version" --name="$2" "$bin/$1" | gzip -9n >"$root/usr/share/man/man1/$1.1.gz"
}
manual logprobd "score tokens against the head of a language model"
manual logprobctl "score rows with a logprobd server, check it and measure it"

# dpkg-shlibdeps requires a debian/control.
printf 'Source: logprobd\n\nPackage: logprobd\nArchitecture: any\n' >"$work/debian/control"
libraries=$(cd "$work" && dpkg-shlibdeps -O debian/logprobd/usr/bin/*)

cat >"$root/DEBIAN/control" <<CONTROL
Package: logprobd
Version: $version
Architecture: $architecture
Maintainer: logprobd maintainers <maintainers@logprobd.invalid>
Section: science
Priority: optional
Installed-Size: $(find "$root" -type f -printf '%s\n' | awk '{ sum += $1 } END { print int((sum + 1023) / 1024) }')
Depends: ${libraries#shlibs:Depends=}, systemd
Suggests: libcublas-13-0, libnccl2
Description: gRPC service that scores tokens against a language model's head
 logprobd returns log-probabilities, entropies and more of target tokens for
 rows of hidden states, on NVIDIA GPUs or on the CPU, without materialised
 logits. This package contains the server with a systemd unit, and the command
 line client logprobctl.
CONTROL
(cd "$root" && find etc -type f -printf '/%p\n' | sort) >"$root/DEBIAN/conffiles"
for script in postinst prerm postrm; do
  install -m 0755 "deploy/debian/$script" "$root/DEBIAN/$script"
done
(cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"

find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
package=$out/logprobd_${version}_$architecture.deb
# The compressor's output depends on whether it uses several threads.
dpkg-deb --root-owner-group --threads-max=1 --build "$root" "$package" >/dev/null
echo "$package"
