# The distribution packages, by purpose; sourced by quickstart.sh and tests/run.sh. The names are the same
# in Debian 12 and Ubuntu 24.04.

build_packages=(
  g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  libabsl-dev prometheus-cpp-dev libcpp-httplib-dev libspdlog-dev libcli11-dev
  libtoml11-dev nlohmann-json3-dev libssl-dev
)
run_packages=(ca-certificates curl python3 python3-venv)
# Ubuntu has chromium as a snap only: there the tests of the status page want one installed by hand.
test_packages=(
  libgtest-dev libgmock-dev libdnnl-dev prometheus
  chromium chromium-driver fonts-dejavu-core
  clang-format-14 clang-tidy-14 git
)

# Prints those of the named packages that are not installed.
missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || printf '%s\n' "$name"
  done
}

# Asks for sudo's password where packages are missing, before progress lines could hide the question.
prepare_install() {
  [ "$(id -u)" -eq 0 ] || [ -z "$(missing_packages "$@")" ] || ! command -v sudo >/dev/null || sudo -v
}

# Installs what is missing of the named packages, as root or with sudo. Prints nothing of its own.
install_packages() {
  local -a missing sudo=()
  mapfile -t missing < <(missing_packages "$@")
  [ "${#missing[@]}" -eq 0 ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
      echo "packages are missing (${missing[*]}) and this is neither root nor a user with sudo" >&2
      return 1
    }
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -q
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends "${missing[@]}"
}
