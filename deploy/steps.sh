# Runs the steps of a setup script, which sources this file, and shows their progress. Each step's output is written
# to a log file; the terminal shows the current step, how long it took and, if it failed, an error and the log's end.

# The script that sources this file sets the folder of the logs and the number of steps.
: "${step_logs:?}" "${step_count:?}"
mkdir -p "$step_logs"
step_number=0
step_job=""

# Ends the command of the current step and all processes that it started; the EXIT trap calls it. A command in the
# background of a script ignores the terminal's Ctrl-C, so apt-get or ninja would continue to run.
stop_step() {
  [ -n "$step_job" ] || return 0
  kill -TERM -- "-$step_job" 2>/dev/null || true
  # Only root can end the processes that a step runs as root.
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

# step "what it does" command... runs the command. If it fails, the script ends.
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

# Prints the last "[n/m]" of a ninja build's log, or nothing.
step_progress() { grep -ao '^\[[0-9]*/[0-9]*\]' "$1" 2>/dev/null | tail -n 1; }
