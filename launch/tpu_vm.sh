# Logs to a file after the terminal was closed, which must not end the launch.
log() { echo "launch: $*" >&2 || { exec > "$FOLDER/shown" 2>&1 && echo "launch: $*"; } || true; }
queued() { gcloud compute tpus queued-resources "$1" "$NAME" "${@:2}" "${LOCATION[@]}"; }
run_on() { gcloud compute tpus tpu-vm ssh "$NAME" --worker="$1" --command="$2" "${LOCATION[@]}"; }
copy() { gcloud compute tpus tpu-vm scp "${FILES[@]}" "$NAME:$REMOTE/" --worker=all "${LOCATION[@]}"; }

# Prints the state of the request; GONE if there is none, nothing if gcloud fails.
state() {
  queued describe '--format=value(state.state)' 2> "$FOLDER/describe" && return
  if grep -q NOT_FOUND "$FOLDER/describe"; then echo GONE; fi
}

# Saves the run and deletes the machines, however the script ends.
leave() {
  code=$?
  trap '' INT TERM HUP PIPE
  trap - EXIT
  kill $(jobs -p) 2> /dev/null || true
  if [ -n "$KEEP" ]; then
    log "$NAME is kept and costs money; the first lines of $0 end it"
    exit "$code"
  fi
  if [ -n "$started" ]; then
    log "asking the run to save and stop"
    run_on all "bash $REMOTE/stop.sh" && [ "$code" = 130 ] && code=75
  fi
  give_back || code=1
  exit "$code"
}

give_back() {
  log "deleting $NAME"
  for _ in 1 2 3 4 5; do
    queued delete --force || sleep "$POLL"
    if [ "$(state)" = GONE ]; then return 0; fi
  done
  log "$NAME may still be there and cost money; delete it with:" \
    "gcloud compute tpus queued-resources delete $NAME --force ${LOCATION[*]}"
  return 1
}

wait_for_machines() {
  for _ in $(seq $((WAIT / (POLL + 1) + 1))); do
    case "$(state)" in
      ACTIVE) return 0 ;;
      FAILED) log "$NAME: no machines in time, or a problem that describe names"; return 2 ;;
      SUSPEND*) return 134 ;;
      GONE | DELETING) log "$NAME was deleted from elsewhere"; exit 75 ;;
    esac
    sleep "$POLL"
  done
  log "$NAME: no machines in time"
  return 2
}

# Repeats a command while a host does not answer yet.
retry() {
  for _ in 1 2 3 4 5; do
    if "$@"; then return 0; fi
    sleep "$POLL"
    case "$(state)" in SUSPEND*) return 134 ;; GONE | DELETING) exit 75 ;; esac
  done
  log "$NAME: its hosts fail at: $*"
  return 2
}

# Shows the log of host 0 until no host runs; returns one exit code for all hosts.
follow() {
  local from=+1 silent=0 codes failure
  while true; do
    run_on 0 "cd $REMOTE && tail --lines=$from --follow --pid=\$(cat run.pid) run.log" &
    wait $! || true  # a signal interrupts `wait`, but not a command in the foreground
    from=0
    codes=" $(run_on all "bash $REMOTE/code.sh" | sed -n 's/.*bert-jax-run \([0-9a-z]*\)$/\1/p' | tr '\n' ' ')"
    case "$(state)" in SUSPEND*) return 134 ;; GONE | DELETING) exit 75 ;; esac
    if [[ $codes == *" running "* ]]; then silent=0
    elif [ "$(wc -w <<< "$codes")" = "$HOSTS" ]; then break
    elif [ $((silent += 1)) -gt 10 ]; then return 134; fi
    sleep "$POLL"
  done
  started=
  # A failure of one host is the cause of the other exit codes.
  for failure in "${FINAL[@]}" 74; do
    if [[ $codes == *" $failure "* ]]; then return "$failure"; fi
  done
  case "$(tr ' ' '\n' <<< "$codes" | sort -u | xargs)" in
    0) return 0 ;;
    75 | '0 75') return 75 ;;
    *) return 134 ;;
  esac
}

attempt() {
  log "asking for $NAME"
  queued create "${REQUEST[@]}" || return 2
  wait_for_machines || return
  log "copying ${#FILES[@]} files to $HOSTS hosts, and installing"
  retry run_on all "mkdir -p $REMOTE" || return
  retry copy || return
  retry run_on all "bash $REMOTE/install.sh" || return
  started=yes
  retry run_on all "bash $REMOTE/start.sh" || return
  follow
}

# Another launch may use this name: its machines and staged files must not be changed.
require_free() {
  if [ "$(state)" = GONE ]; then return 0; fi
  cat "$FOLDER/describe" >&2
  log "$NAME is there already, or gcloud cannot tell: end it by the first lines of $0, or use another --name"
  exit 2
}

mkdir -p "$FOLDER"
require_free
stage
# Builds the wheel from the commit, without other files of the checkout.
rm -rf "$FOLDER/source"
mkdir "$FOLDER/source"
git -C "$CHECKOUT" archive --format=tar "$COMMIT" | tar -x -C "$FOLDER/source"
"$PYTHON" -m pip wheel --quiet --disable-pip-version-check --no-deps \
  --wheel-dir "$FOLDER" "$FOLDER/source"
cp "$FOLDER/source/constraints.txt" "$FOLDER"

require_free
started=
trap leave EXIT
trap 'exit 130' INT TERM HUP
for left in $(seq "$RETRIES" -1 0); do
  code=0
  attempt || code=$?
  log "the run ended with exit code $code"
  if [[ " 0 ${FINAL[*]} " == *" $code "* ]] || [ "$left" = 0 ]; then break; fi
  log "resuming from the newest checkpoint on new machines, $left retries left"
  started=
  give_back || exit 1
done
[ "$code" = 130 ] && code=75  # stop.sh was run from another terminal
exit "$code"
