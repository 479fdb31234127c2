# To a file, once nobody is there to be shown anything: a terminal that was closed ends nothing.
say() { echo "launch: $*" >&2 || { exec > "$FOLDER/shown" 2>&1 && echo "launch: $*"; } || true; }
queued() { gcloud compute tpus queued-resources "$1" "$NAME" "${@:2}" "${WHERE[@]}"; }
on() { gcloud compute tpus tpu-vm ssh "$NAME" --worker="$1" --command="$2" "${WHERE[@]}"; }
copy() { gcloud compute tpus tpu-vm scp "${FILES[@]}" "$NAME:$THERE/" --worker=all "${WHERE[@]}"; }

# The state of the request; GONE if there is none, nothing if gcloud cannot tell.
state() {
  queued describe '--format=value(state.state)' 2> "$FOLDER/describe" && return
  if grep -q NOT_FOUND "$FOLDER/describe"; then echo GONE; fi
}

# Saves and deletes, whatever the end.
leave() {
  code=$?
  trap '' INT TERM HUP PIPE
  trap - EXIT
  kill $(jobs -p) 2> /dev/null || true
  if [ -n "$KEEP" ]; then
    say "$NAME is kept and costs money; the first lines of $0 end it"
    exit "$code"
  fi
  if [ -n "$started" ]; then
    say "asking the run to save and stop"
    on all "bash $THERE/stop.sh" && [ "$code" = 130 ] && code=75
  fi
  give_back || code=1
  exit "$code"
}

give_back() {
  say "deleting $NAME"
  for _ in 1 2 3 4 5; do
    queued delete --force || sleep "$POLL"
    if [ "$(state)" = GONE ]; then return 0; fi
  done
  say "$NAME may still be there and cost money; delete it with:" \
    "gcloud compute tpus queued-resources delete $NAME --force ${WHERE[*]}"
  return 1
}

wait_for_machines() {
  for _ in $(seq $((WAIT / (POLL + 1) + 1))); do
    case "$(state)" in
      ACTIVE) return 0 ;;
      FAILED) say "$NAME: no machines in time, or a problem that describe names"; return 2 ;;
      SUSPEND*) return 134 ;;
      GONE | DELETING) say "$NAME was deleted from elsewhere"; exit 75 ;;
    esac
    sleep "$POLL"
  done
  say "$NAME: no machines in time"
  return 2
}

# Again, while a host does not answer yet.
insist() {
  for _ in 1 2 3 4 5; do
    if "$@"; then return 0; fi
    sleep "$POLL"
    case "$(state)" in SUSPEND*) return 134 ;; GONE | DELETING) exit 75 ;; esac
  done
  say "$NAME: its hosts fail at: $*"
  return 2
}

# Shows the log of host 0 until no host runs; returns one exit code of all.
follow() {
  local from=+1 silent=0 codes failure
  while true; do
    on 0 "cd $THERE && tail --lines=$from --follow --pid=\$(cat run.pid) run.log" &
    wait $! || true  # unlike a command in the foreground, it is cut short by a signal to us
    from=0
    codes=" $(on all "bash $THERE/code.sh" | sed -n 's/.*bert-jax-run \([0-9a-z]*\)$/\1/p' | tr '\n' ' ')"
    case "$(state)" in SUSPEND*) return 134 ;; GONE | DELETING) exit 75 ;; esac
    if [[ $codes == *" running "* ]]; then silent=0
    elif [ "$(wc -w <<< "$codes")" = "$HOSTS" ]; then break
    elif [ $((silent += 1)) -gt 10 ]; then return 134; fi
    sleep "$POLL"
  done
  started=
  # A failure is the cause of what it did to the others.
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
  say "asking for $NAME"
  queued create "${REQUEST[@]}" || return 2
  wait_for_machines || return
  say "copying ${#FILES[@]} files to $HOSTS hosts, and installing"
  insist on all "mkdir -p $THERE" || return
  insist copy || return
  insist on all "bash $THERE/install.sh" || return
  started=yes
  insist on all "bash $THERE/start.sh" || return
  follow
}

# What another launch has rented is not ours to delete, nor to change what it copies to new machines.
require_free() {
  if [ "$(state)" = GONE ]; then return 0; fi
  cat "$FOLDER/describe" >&2
  say "$NAME is there already, or gcloud cannot tell: end it by the first lines of $0, or use another --name"
  exit 2
}

mkdir -p "$FOLDER"
require_free
stage
# The wheel of the commit, whatever else lies in the checkout.
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
  say "the run ended with exit code $code"
  if [[ " 0 ${FINAL[*]} " == *" $code "* ]] || [ "$left" = 0 ]; then break; fi
  say "going on from the newest checkpoint on new machines, $left retries left"
  started=
  give_back || exit 1
done
[ "$code" = 130 ] && code=75  # by stop.sh, from elsewhere
exit "$code"
