# Python environments in the user's cache folder, which all clones share. A script sources this file in the root of the
# repository.

# shared_folder LINK PREFIX INSTALL REQUIREMENTS...: links build/LINK to a folder in the user's cache folder, whose name has
# a hash of the files of requirements. The first clone fills it by `INSTALL FOLDER REQUIREMENTS...`.
shared_folder() {
  local link=$1 prefix=$2 install=$3 folder lock
  shift 3
  folder=${XDG_CACHE_HOME:-$HOME/.cache}/logprobd/$prefix-$({ /usr/bin/python3 --version && cat "$@"; } |
    sha256sum | cut -c1-16)
  mkdir -p "$(dirname "$folder")"
  # Two clones may install at once.
  exec {lock}>"$folder.lock"
  flock "$lock"
  if [ ! -f "$folder/.complete" ]; then
    rm -rf "$folder"
    "$install" "$folder" "$@"
    touch "$folder/.complete"
  fi
  exec {lock}>&-
  rm -rf "build/$link"
  ln -s "$folder" "build/$link"
}

# install_alone FOLDER REQUIREMENTS: installs packages without their dependencies into a folder, for shared_folder.
install_alone() {
  build/venv-tests/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
    --only-binary=:all: --target "$1" -r "$2"
}
