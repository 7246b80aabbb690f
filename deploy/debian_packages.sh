# Lists the distribution packages by purpose. quickstart.sh and tests/run.sh source this file. The names are
# the same in Debian 12 and Ubuntu 24.04.

build_packages=(
  g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc
  libabsl-dev prometheus-cpp-dev libmicrohttpd-dev libgnutls28-dev libcli11-dev
  libtoml11-dev nlohmann-json3-dev libssl-dev
)
run_packages=(ca-certificates curl python3 python3-venv)
# Ubuntu provides chromium and kubectl only as snaps. On Ubuntu, install them by hand to run the tests of the status page
# and of deploy/kubernetes.
test_packages=(
  libgtest-dev libgmock-dev libdnnl-dev prometheus
  chromium chromium-driver fonts-dejavu-core
  clang-14 libclang-rt-14-dev clang-format-14 clang-tidy-14 git openssl
  buildah debootstrap
  systemd dpkg-dev help2man
)
# A kubectl of another source is good as well, and dpkg would refuse a second package with this file.
command -v kubectl >/dev/null || test_packages+=(kubernetes-client)

# Prints the packages from its arguments that are not installed.
missing_packages() {
  local name
  for name in "$@"; do
    dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || printf '%s\n' "$name"
  done
}

# Asks for the sudo password if packages are missing, before progress lines can hide the prompt.
prepare_install() {
  [ "$(id -u)" -eq 0 ] || [ -z "$(missing_packages "$@")" ] || ! command -v sudo >/dev/null || sudo -v
}

# Installs the packages from its arguments that are missing, as root or with sudo. It prints no progress
# lines itself.
install_packages() {
  local -a missing sudo=()
  mapfile -t missing < <(missing_packages "$@")
  [ "${#missing[@]}" -eq 0 ] && return 0
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
      echo "packages are missing (${missing[*]}): run this as root, or install sudo" >&2
      return 1
    }
    sudo=(sudo)
  fi
  "${sudo[@]}" apt-get update -q
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -q --no-install-recommends "${missing[@]}"
}
