#!/usr/bin/env bash
# bert-large-pod-SHA256: v5e:8x8; chips: 64, hosts: 16;
# commit 0123456789abcdef0123456789abcdef01234567, config sha256 SHA256.
# Checked before, unless --force names it: the commit, the workdir, doctor, plan.
set -eu

# What every host is given.
mkdir -p /cache/launch/bert-large-pod-SHA256
git -C /checkout archive --format=tar --output=/cache/launch/bert-large-pod-SHA256/commit.tar 0123456789abcdef0123456789abcdef01234567
mkdir /cache/launch/bert-large-pod-SHA256/source
tar -x -f /cache/launch/bert-large-pod-SHA256/commit.tar -C /cache/launch/bert-large-pod-SHA256/source
python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir /cache/launch/bert-large-pod-SHA256 /cache/launch/bert-large-pod-SHA256/source
cp /cache/launch/bert-large-pod-SHA256/source/constraints.txt /cache/launch/bert-large-pod-SHA256
rm -r /cache/launch/bert-large-pod-SHA256/source /cache/launch/bert-large-pod-SHA256/commit.tar
cat > /cache/launch/bert-large-pod-SHA256/experiment.json <<'END'
EXPERIMENT
END
cat > /cache/launch/bert-large-pod-SHA256/install.sh <<'END'
#!/usr/bin/env bash
# Makes venv/ of the wheel, unless it is there, or a run uses the one that is.
set -eu
cd "$(dirname "$0")"
flock --shared --nonblock run.lock true || exit 0
wheel=bert_jax-0.1.0-py3-none-any.whl
[ "$(cat venv/installed 2>/dev/null)" = "$(sha256sum "$wheel" constraints.txt)" ] && exit 0
python=
for version in 3.13 3.12 3.11; do
  if "python$version" -c 'import ensurepip' 2>/dev/null; then python="python$version"; break; fi
done
if [ -z "$python" ]; then
  python3 -m pip install --quiet --user 'uv>=0.8,<1'
  python3 -m uv python install --quiet 3.12
  python="$(python3 -m uv python find --managed-python 3.12)"
fi
rm -rf venv
"$python" -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --constraint constraints.txt "./$wheel[tpu,gcs]"
sha256sum "$wheel" constraints.txt > venv/installed
END
cat > /cache/launch/bert-large-pod-SHA256/run.sh <<'END'
#!/usr/bin/env bash
# The run: its exit code goes to run.exit.
{  # read as a whole, whatever becomes of this file meanwhile
cd "$(dirname "$0")"
exec 9> run.lock
flock --timeout 10 9 || exit 1  # a look at the lock may hold it for a moment
export JAX_PLATFORMS=tpu,cpu
address="$(curl -sf -H 'Metadata-Flavor: Google' \
  http://metadata.google.internal/computeMetadata/v1/instance/network-interfaces/0/ip)"
if [ -n "$address" ]; then  # the coordinator listens inside the network alone
  export JAX_COORDINATOR_PORT=8482 JAX_COORDINATOR_BIND_ADDRESS="$address:8482"
fi
PATH="$PWD/venv/bin:$PATH"
bert-jax pretrain experiment.json --workdir gs://BUCKET/bert_large_pod 9>&- &
echo $! > run.pid
wait $!
echo $? > run.exit.new
mv run.exit.new run.exit
exit
}
END
cat > /cache/launch/bert-large-pod-SHA256/start.sh <<'END'
#!/usr/bin/env bash
# Starts the run, unless it runs, in a session that outlives this connection.
set -eu
cd "$(dirname "$0")"
flock --shared --nonblock run.lock true || exit 0
rm -f run.exit run.pid
[ -f run.log ] && mv run.log run.log.old
: > run.log
setsid nohup bash run.sh < /dev/null >> run.log 2>&1 &
for _ in $(seq 300); do [ -f run.pid ] && exit 0; sleep 0.1; done
echo "start.sh: the run did not start" >&2
exit 1
END
cat > /cache/launch/bert-large-pod-SHA256/state.sh <<'END'
#!/usr/bin/env bash
# Prints how the run stands: absent, running, ended CODE, or lost (killed with this script's like).
cd "$(dirname "$0")"
if ! [ -f run.log ]; then state=absent
elif ! flock --shared --nonblock run.lock true; then state=running
elif [ -f run.exit ]; then state="ended $(cat run.exit)"
else state=lost
fi
echo "bert-jax-host $(hostname) $state"
END
cat > /cache/launch/bert-large-pod-SHA256/stop.sh <<'END'
#!/usr/bin/env bash
# Asks the run to save and end.
cd "$(dirname "$0")"
if ! flock --shared --nonblock run.lock true; then kill -s TERM "$(cat run.pid)"; fi
END

# The machines, unless they are there. They are deleted if they do not come in time.
gcloud compute tpus queued-resources create bert-large-pod-SHA256 --node-id=bert-large-pod-SHA256 --accelerator-type=v5litepod-64 --runtime-version=v2-alpha-tpuv5-lite --valid-until-duration=2d --spot --zone=us-west4-a --quiet
until [ "$(gcloud compute tpus queued-resources describe bert-large-pod-SHA256 '--format=value(state.state)' --zone=us-west4-a --quiet)" = ACTIVE ]; do sleep 30; done

# Five times, while a host does not answer yet.
gcloud compute tpus tpu-vm ssh bert-large-pod-SHA256 --worker=all '--command=mkdir -p bert-jax/bert-large-pod-SHA256' --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm scp /cache/launch/bert-large-pod-SHA256/bert_jax-0.1.0-py3-none-any.whl /cache/launch/bert-large-pod-SHA256/constraints.txt /cache/launch/bert-large-pod-SHA256/experiment.json /cache/launch/bert-large-pod-SHA256/install.sh /cache/launch/bert-large-pod-SHA256/run.sh /cache/launch/bert-large-pod-SHA256/start.sh /cache/launch/bert-large-pod-SHA256/state.sh /cache/launch/bert-large-pod-SHA256/stop.sh bert-large-pod-SHA256:bert-jax/bert-large-pod-SHA256/ --worker=all --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh bert-large-pod-SHA256 --worker=all '--command=bash bert-jax/bert-large-pod-SHA256/install.sh' --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh bert-large-pod-SHA256 --worker=all '--command=bash bert-jax/bert-large-pod-SHA256/start.sh' --zone=us-west4-a --quiet

# Every half minute, until no host runs any more: how the run stands on each, the log of
# host 0 from the line that was shown last, and whether the machines are still there.
gcloud compute tpus tpu-vm ssh bert-large-pod-SHA256 --worker=all '--command=bash bert-jax/bert-large-pod-SHA256/state.sh' --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh bert-large-pod-SHA256 --worker=0 '--command=tail --lines=+1 bert-jax/bert-large-pod-SHA256/run.log' --zone=us-west4-a --quiet
gcloud compute tpus queued-resources describe bert-large-pod-SHA256 '--format=value(state.state)' --zone=us-west4-a --quiet

# Preempted, or a host lost: deleted and asked for again, 10 times at most.
# Stopped with exit code 75: started again on the same machines, counted alike.
# Ctrl-C: the run is asked to save, and waited for, before the machines are deleted:
#   gcloud compute tpus tpu-vm ssh bert-large-pod-SHA256 --worker=all '--command=bash bert-jax/bert-large-pod-SHA256/stop.sh' --zone=us-west4-a --quiet

# At the end, whatever the end; with --keep, not.
gcloud compute tpus queued-resources delete bert-large-pod-SHA256 --force --zone=us-west4-a --quiet
