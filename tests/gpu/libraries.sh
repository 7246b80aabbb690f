# Sourced by run.sh and run_service.sh: what LD_LIBRARY_PATH must name on a machine without the build.

# library_path LIB: the copied libraries, and cuBLASLt and NCCL of the toolkit or of a PyTorch wheel.
library_path() {
  local libraries=$1:/usr/local/cuda/lib64 folder
  for folder in $(python3 - <<'PYTHON' 2>/dev/null
import glob, os, site, sys
for base in {*site.getsitepackages(), *sys.path}:
    for path in glob.glob(os.path.join(base, "nvidia", "*", "lib")):
        print(path)
PYTHON
  ); do libraries+=:$folder; done
  echo "$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}
