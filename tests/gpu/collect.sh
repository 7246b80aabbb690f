# Sourced by pack.sh and pack_service.sh.

# collect OUT LIB BINARY...: the binaries, stripped, in OUT, and in LIB the distribution's libraries that they need:
# not the C and C++ libraries, which the other machine has, nor anything of CUDA.
collect() {
  local out=$1 lib=$2 binary
  shift 2
  mkdir -p "$out" "$lib"
  for binary in "$@"; do
    strip -o "$out/$(basename "$binary")" "$binary"
  done
  ldd "$@" | awk '$3 ~ /^\// {print $3}' | sort -u |
    grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[^/]*)\.so|/libcu|/libnv' |
    while read -r library; do strip -o "$lib/$(basename "$library")" "$(readlink -f "$library")"; done
}
