# Provides Python tools to the scripts of deploy, which source this file and run in the root of the repository.

# tool_environment NAME: puts the tools of deploy/NAME/requirements.txt on PATH. They have a virtual environment of their
# own, build/venv-NAME, which is made again when their list changes.
tool_environment() {
  local tools=$PWD/build/venv-$1 list=deploy/$1/requirements.txt wanted
  wanted=$(sha256sum "$list")
  # Two scripts may need it at once.
  local lock
  mkdir -p build
  exec {lock}>"$tools.lock"
  flock "$lock"
  if [ "$(cat "$tools/.requirements" 2>/dev/null)" != "$wanted" ]; then
    rm -rf "$tools"
    /usr/bin/python3 -m venv "$tools"
    "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r "$list"
    printf '%s' "$wanted" >"$tools/.requirements"
  fi
  exec {lock}>&-
  export PATH=$tools/bin:$PATH
}
