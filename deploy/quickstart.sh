#!/usr/bin/env bash
# Sets up logprobd on a bare Debian 12 (or Ubuntu 24.04) and scores rows with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOF'
Usage: bash deploy/quickstart.sh [options]

Installs the required packages, builds the server, writes a small demo model, serves it, scores a few
rows through the Python client and compares the scores with double precision. The first run needs root
or sudo. A second run takes seconds.

  --device auto|cpu|cuda   device that scores (default auto: CUDA if there is a GPU and a CUDA toolkit)
  --model DIR              serve this model folder instead of the demo model
  --keep                   leave the server running
  --build-cuda             compile the GPU code, which takes ten minutes, although no GPU is visible
  --port N                 gRPC port (default 8470)
  --http-port N            port of /metrics, /healthz, /readyz (default 9470)
  --help                   print this help
EOF
}

device=auto model="" keep=false build_cuda=false port=8470 http_port=9470
while [ $# -gt 0 ]; do
  case "$1" in
    --device | --model | --port | --http-port)
      [ $# -ge 2 ] || { echo "quickstart.sh: error: $1 needs a value" >&2; exit 2; }
      case "$1" in
        --device) device=$2 ;;
        --model) model=$2 ;;
        --port) port=$2 ;;
        --http-port) http_port=$2 ;;
      esac
      shift 2
      ;;
    --keep) keep=true; shift ;;
    --build-cuda) build_cuda=true; shift ;;
    --help | -h) usage; exit 0 ;;
    *) echo "quickstart.sh: error: unknown option $1 (see --help)" >&2; exit 2 ;;
  esac
done
case "$device" in
  auto | cpu | cuda) ;;
  *) echo "quickstart.sh: error: --device $device is not valid; use auto, cpu or cuda" >&2; exit 2 ;;
esac

step_logs=build/quickstart step_count=6
[ -n "$model" ] || step_count=7
source deploy/debian_packages.sh
source deploy/steps.sh
[ -z "$model" ] || [ -e "$model" ] || fail "--model $model does not exist; pass the folder of a model"
command -v apt-get >/dev/null || fail "apt-get was not found; run this script on Debian 12 or Ubuntu 24.04"

# A GPU without a CUDA toolkit is reported, because the toolkit is the one thing that apt cannot install here.
has_gpu=false has_nvcc=false
[ -e /dev/nvidia0 ] && has_gpu=true
{ command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; } && has_nvcc=true
cuda_advice="install NVIDIA's CUDA toolkit 13 or later (packages cuda-nvcc-13-0, cuda-cudart-dev-13-0 and \
libcublas-dev-13-0 of NVIDIA's own repository, see docs.nvidia.com/cuda), put nvcc on PATH and run this script again"
! $build_cuda || $has_nvcc || fail "--build-cuda: there is no CUDA toolkit: $cuda_advice"
if [ "$device" = cuda ]; then
  $has_gpu || fail "--device cuda: no NVIDIA GPU is visible here (/dev/nvidia0 is missing)"
  $has_nvcc || fail "--device cuda: there is a GPU, but no CUDA toolkit: $cuda_advice"
elif [ "$device" = auto ] && $has_gpu && ! $has_nvcc; then
  echo "note: there is a GPU, but no CUDA toolkit, so rows are scored on the CPU. To use the GPU, $cuda_advice."
fi

# Architectures for which the CUDA code is built: those of this machine's GPUs ("80", "90", "80;90"), or empty if
# nvidia-smi cannot report them.
architectures=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
  grep -E '^[0-9]+\.[0-9]+$' | tr -d . | sort -nu | paste -sd ';' || true)
if [ -n "$architectures" ] && [ "${architectures%%;*}" -lt 80 ] && [ "$device" = cuda ]; then
  fail "--device cuda: compute capability 8.0 or later is required, but this machine has an sm_${architectures%%;*} GPU"
fi

# A program that already listens on one of these ports would be mistaken for the server that is started below.
for taken in "$port:--port" "$http_port:--http-port"; do
  if (exec 3<>"/dev/tcp/127.0.0.1/${taken%%:*}") 2>/dev/null; then
    fail "port ${taken%%:*} is in use, perhaps by a server of an earlier --keep; stop it, or pass another ${taken#*:}"
  fi
done

# Prints the last line of nvcc's version, or nothing if there is no toolkit, which is not an error.
toolkit_version() {
  { PATH=$PATH:/usr/local/cuda/bin nvcc --version 2>/dev/null || true; } | tail -n 1
}

build() {
  local stamp=build/release/.quickstart cuda wanted
  local -a options=()
  # Without a GPU, an earlier configuration decides, so that a tree with GPU code is not built again without it.
  cuda=$(sed -n 's/^LOGPROBD_CUDA:STRING=//p' build/release/CMakeCache.txt 2>/dev/null || true)
  if [ "$device" = cpu ]; then
    cuda=OFF
  elif $has_gpu || $build_cuda; then
    cuda=AUTO
  fi
  cuda=${cuda:-OFF}
  [ "$cuda" = AUTO ] && [ -n "$architectures" ] && options+=("-DCMAKE_CUDA_ARCHITECTURES=$architectures")
  [ -f build/release/build.ninja ] || options+=(-DLOGPROBD_TESTS=OFF)
  # CMake configures again only if the choice of CUDA, the architectures or the toolkit has changed. A build tree that
  # tests/run.sh has configured keeps its tests.
  wanted="cuda=$cuda architectures=$architectures nvcc=$(toolkit_version)"
  if [ "$cuda" = AUTO ] && $has_nvcc && [[ -z "$architectures" || "$architectures" == *90* ]]; then
    bash deploy/fetch_cutlass.sh  # for the fused kernels of compute capability 9.0
  fi
  if [ ! -f build/release/build.ninja ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    cmake --preset release -DLOGPROBD_CUDA="$cuda" ${options[@]+"${options[@]}"}
    printf '%s' "$wanted" >"$stamp"
  fi
  cmake --build build/release --target logprobd logprobctl
}

# Installs the client into its own virtual environment, and repeats this only if the client has changed.
python_client() {
  local stamp=build/venv/.client wanted
  wanted=$(find client/python -type f -name '*.py' -o -type f -name pyproject.toml | sort | xargs sha256sum | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return 0
  /usr/bin/python3 -m venv build/venv
  build/venv/bin/python -m pip install --quiet --disable-pip-version-check ./client/python
  printf '%s' "$wanted" >"$stamp"
}

server_pid=""
stop_server() {
  [ -n "$server_pid" ] || return 0
  kill "$server_pid" 2>/dev/null || true
  wait "$server_pid" 2>/dev/null || true
  server_pid=""
}
trap 'stop_step; stop_server' EXIT

wait_ready() {
  local i
  for i in $(seq 1200); do
    local ready=false
    curl -fsS -o /dev/null "http://127.0.0.1:$http_port/readyz" 2>/dev/null && ready=true
    # This check comes after the request: a response counts only if our server is still running.
    if ! kill -0 "$server_pid" 2>/dev/null; then
      cat build/quickstart/server.log
      echo "the server exited while it was starting"
      return 1
    fi
    $ready && return 0
    sleep 0.1
  done
  echo "the server was not ready after 120 s; its log is build/quickstart/server.log"
  return 1
}

prepare_install "${build_packages[@]}" "${run_packages[@]}"
step "installing distribution packages" install_packages "${build_packages[@]}" "${run_packages[@]}"
step "building the server (Release)" build
step "installing the Python client" python_client
if [ -z "$model" ]; then
  model=build/demo-model
  step "writing the demo model" build/venv/bin/python -m logprobd.demo_model "$model"
fi
build/release/bin/logprobd --model "$model" --device "$device" --listen "127.0.0.1:$port" \
  --http "127.0.0.1:$http_port" >build/quickstart/server.log 2>&1 </dev/null &
server_pid=$!
step "starting the server" wait_ready
step "asking the server what it serves" build/release/bin/logprobctl info --address "127.0.0.1:$port"
step "scoring rows through the Python client" build/venv/bin/python deploy/demo/score_demo.py \
  --address "127.0.0.1:$port" --model "$model"

echo
cat "$step_logs/$step_count.log"
address=127.0.0.1:$port
if ! $keep; then
  echo
  echo "The server is stopped now. To keep it running, run this script with --keep. README.md has a Python example."
  exit 0
fi
cat <<EOF

Metrics   http://127.0.0.1:$http_port/metrics      health  http://127.0.0.1:$http_port/readyz
Server    build/release/bin/logprobd --model $model        (--help explains every option)
Try next  build/release/bin/logprobctl selftest --address $address            compare with double precision
          build/release/bin/logprobctl bench --address $address --rows 256    latency and rows/s
          README.md                            ten lines of Python for your own rows (LOGPROBD_ADDRESS=$address)

The server keeps running as process $server_pid (log: build/quickstart/server.log); stop it with: kill $server_pid
EOF
disown "$server_pid"
server_pid=""
