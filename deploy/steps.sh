# Steps with progress for the scripts that set things up; sourced. Each step's output goes to a log file;
# the terminal shows what is under way, how long it took, and, when it fails, one line and the log's end.

# Set by the script that sources this: where logs go, and the number of steps.
: "${step_logs:?}" "${step_count:?}"
mkdir -p "$step_logs"
step_number=0
step_job=""

# Ends the command of the step under way with all that it started; for the EXIT trap. A command in the background of
# a script ignores the terminal's Ctrl-C, so apt-get or ninja would run on.
stop_step() {
  [ -n "$step_job" ] || return 0
  kill -TERM -- "-$step_job" 2>/dev/null || true
  # What a step runs as root is only root's to end.
  [ "$(id -u)" -eq 0 ] || ! command -v sudo >/dev/null || sudo -n kill -TERM -- "-$step_job" 2>/dev/null || true
  wait "$step_job" 2>/dev/null || true
  step_job=""
}
trap stop_step EXIT
trap 'exit 130' INT TERM

fail() {
  printf '%s: error: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# step "what it does" command...: runs the command; a failure ends the script.
step() {
  local title=$1 log started elapsed status
  shift
  step_number=$((step_number + 1))
  log="$step_logs/$step_number.log"
  started=$SECONDS
  printf '[%d/%d] %s ...' "$step_number" "$step_count" "$title"
  [ -t 1 ] || printf '\n'
  set -m  # a process group of its own, for stop_step
  "$@" >"$log" 2>&1 </dev/null &
  step_job=$!
  set +m
  while kill -0 "$step_job" 2>/dev/null; do
    sleep 0.2
    elapsed=$((SECONDS - started))
    if [ -t 1 ] && [ "$elapsed" -gt 0 ]; then
      printf '\r[%d/%d] %s ... %d s %s\033[K' "$step_number" "$step_count" "$title" "$elapsed" \
        "$(step_progress "$log")"
    fi
  done
  wait "$step_job" && status=0 || status=$?
  step_job=""
  elapsed=$((SECONDS - started))
  if [ "$status" -ne 0 ]; then
    [ -t 1 ] && printf '\n'
    tail -n 15 "$log" | sed 's/^/    /' >&2
    fail "step $step_number ($title) failed after $elapsed s; the whole log is in $log"
  fi
  if [ -t 1 ]; then
    printf '\r[%d/%d] %s: done in %d s\033[K\n' "$step_number" "$step_count" "$title" "$elapsed"
  else
    printf '[%d/%d] %s: done in %d s\n' "$step_number" "$step_count" "$title" "$elapsed"
  fi
}

# The last "[n/m]" of a ninja build's log, or nothing.
step_progress() { grep -ao '^\[[0-9]*/[0-9]*\]' "$1" 2>/dev/null | tail -n 1; }
