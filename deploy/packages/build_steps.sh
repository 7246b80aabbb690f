# Steps of the scripts that build packages, which source this file and run in the root of the repository. It puts the tools
# on PATH, and makes the folder $staging, which is removed at the end.
source deploy/tool_environment.sh
umask 022  # Archives contain the modes of files.
tool_environment packages

# Files in the archives get the time of the commit.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
version=$(bash deploy/version.sh)
staging=$(mktemp -d)
trap 'rm -rf "$staging"' EXIT

# quietly COMMAND...: shows what a command prints only if it fails.
quietly() {
  "$@" >"$staging/log" 2>&1 || { cat "$staging/log" >&2; exit 1; }
}

# copy_tracked PATTERN...: copies files that git knows to $staging. Caches and other files stay out of the packages.
copy_tracked() {
  git ls-files -z -- "$@" | xargs -0 cp --parents -t "$staging"
}

# repack ARCHIVE OUT: writes a source distribution anew, because setuptools writes the current time into it.
repack() {
  local folder
  folder=$(basename "$1" .tar.gz)
  tar -xf "$1" -C "$staging"
  tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -C "$staging" -c "$folder" |
    gzip -9n >"$2/$folder.tar.gz"
}
