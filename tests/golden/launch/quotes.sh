#!/usr/bin/env bash
# quotes: v6e:2x2; chips: 4, hosts: 1;
# commit 0123456789abcdef0123456789abcdef01234567, config sha256 SHA256.
# Checked before, unless --force names it: the commit, the workdir, doctor, plan.
# From another terminal: show the state of hosts, follow the log, save and stop, delete:
#   gcloud compute tpus tpu-vm ssh quotes --zone=us-east5-b --quiet --worker=all '--command=bash bert-jax/quotes/code.sh'
#   gcloud compute tpus tpu-vm ssh quotes --zone=us-east5-b --quiet --worker=0 '--command=tail -F bert-jax/quotes/run.log'
#   gcloud compute tpus tpu-vm ssh quotes --zone=us-east5-b --quiet --worker=all '--command=bash bert-jax/quotes/stop.sh'
#   gcloud compute tpus queued-resources delete quotes --force --zone=us-east5-b --quiet
set -euo pipefail
NAME=quotes
HOSTS=1
RETRIES=10
KEEP=''
COMMIT=0123456789abcdef0123456789abcdef01234567
CHECKOUT=/checkout
PYTHON=python
FOLDER=/cache/launch/quotes
REMOTE=bert-jax/quotes
POLL=30
WAIT=88200
LOCATION=(--zone=us-east5-b --quiet)
REQUEST=(--node-id=quotes --accelerator-type=v6e-4 --runtime-version=v2-alpha-tpuv6e --valid-until-duration=24h)
FILES=(/cache/launch/quotes/bert_jax-0.1.0-py3-none-any.whl /cache/launch/quotes/code.sh /cache/launch/quotes/constraints.txt /cache/launch/quotes/experiment.json /cache/launch/quotes/install.sh /cache/launch/quotes/run.sh /cache/launch/quotes/start.sh /cache/launch/quotes/stop.sh)
FINAL=(1 2 130)

stage() {
cat > /cache/launch/quotes/code.sh <<'END'
# Prints the exit code of the run, "running", or 134 if it was killed with its machine.
cd "$(dirname "$0")"
code=134
kill -0 "$(cat run.pid)" 2>/dev/null && code=running
[ -f run.exit ] && code="$(cat run.exit)"
# After a request to stop, 75 is not a preemption, so no new machines may be rented.
[ "$code" = 75 ] && [ -f run.asked ] && code=130
echo "bert-jax-run $code"
END
cat > /cache/launch/quotes/experiment.json <<'END'
EXPERIMENT
END
cat > /cache/launch/quotes/install.sh <<'END'
# Creates venv/ with the wheel.
set -eu
cd "$(dirname "$0")"
[ -f venv/installed ] && exit 0
python=
for version in 3.13 3.12 3.11; do
  if "python$version" -c 'import ensurepip' 2>/dev/null; then python="python$version"; break; fi
done
if [ -z "$python" ]; then
  python3 -m pip install --quiet --user 'uv>=0.8,<1'
  python3 -m uv python install --quiet 3.12
  python="$(python3 -m uv python find --managed-python 3.12)"
fi
"$python" -m venv --clear venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt "$(echo ./*.whl)[tpu,gcs]"
touch venv/installed
END
cat > /cache/launch/quotes/run.sh <<'END'
# Runs the command, and writes its exit code to run.exit when it ends.
cd "$(dirname "$0")"
export JAX_PLATFORMS=tpu,cpu
address="$(curl -sf -H 'Metadata-Flavor: Google' \
  http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip)"
if [ -n "$address" ]; then
  export JAX_COORDINATOR_PORT=8482 JAX_COORDINATOR_BIND_ADDRESS="$address:8482"
fi
PATH="$PWD/venv/bin:$PATH"
bert-jax extend experiment.json --workdir 'gs://BUCKET/it'"'"'s "mine" $(id)' &
echo $! > command.pid
echo $$ > run.pid
wait $!
echo $? > run.exit.new
mv run.exit.new run.exit
END
cat > /cache/launch/quotes/start.sh <<'END'
# Starts the run, once, in a session that continues after this connection ends.
set -eu
cd "$(dirname "$0")"
[ -f run.pid ] && exit 0
setsid nohup bash run.sh < /dev/null > run.log 2>&1 &
for _ in $(seq 300); do [ -f run.pid ] && exit 0; sleep 0.1; done
echo "start.sh: the run did not start" >&2
exit 1
END
cat > /cache/launch/quotes/stop.sh <<'END'
# Asks the run to save and stop, and waits until it ends.
cd "$(dirname "$0")"
touch run.asked
[ -f run.exit ] || kill -s TERM "$(cat command.pid)" || exit 1
for _ in $(seq 900); do [ -f run.exit ] && exit 0; sleep 1; done
exit 1
END
}

# launch/tpu_vm.sh
