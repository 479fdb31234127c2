#!/usr/bin/env bash
# bert-large-pod-a4759bab: v5e:8x8; chips: 64, hosts: 16;
# commit 0123456789abcdef0123456789abcdef01234567, config sha256 a4759bab8500f37271e90e2c53180de7e2c68f06393e27e2340bf1310e0730e5.
# Checked before, unless --force names it: the commit, the workdir, doctor, plan.
set -eu

# What every host is given.
mkdir -p /cache/launch/bert-large-pod-a4759bab
git -C /checkout archive --format=tar --output=/cache/launch/bert-large-pod-a4759bab/commit.tar 0123456789abcdef0123456789abcdef01234567
mkdir /cache/launch/bert-large-pod-a4759bab/source
tar -x -f /cache/launch/bert-large-pod-a4759bab/commit.tar -C /cache/launch/bert-large-pod-a4759bab/source
python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir /cache/launch/bert-large-pod-a4759bab /cache/launch/bert-large-pod-a4759bab/source
cp /cache/launch/bert-large-pod-a4759bab/source/constraints.txt /cache/launch/bert-large-pod-a4759bab
rm -r /cache/launch/bert-large-pod-a4759bab/source /cache/launch/bert-large-pod-a4759bab/commit.tar
cat > /cache/launch/bert-large-pod-a4759bab/experiment.json <<'END'
{
  "format_version": 2,
  "name": "bert_large_pod",
  "seed": 0,
  "init_from": "",
  "model": {
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "compute_dtype": "bfloat16",
    "dropout_rng": "rbg16"
  },
  "corpus": {
    "sources": [
      "tfds:wikipedia/20230601.en"
    ],
    "layout": "paragraphs_by_line",
    "text_field": "text",
    "encoding": "utf-8",
    "language": "en",
    "repeated_documents": "keep",
    "tokenizer": "train",
    "tokenizer_kind": "wordpiece",
    "case": "uncased",
    "validation_share": 0.005
  },
  "data": {
    "short_seq_prob": 0.1,
    "masked_lm_prob": 0.15,
    "masking": "piece",
    "dupe_factor": 10,
    "eval_sequence_length": 128,
    "eval_max_predictions_per_seq": 20,
    "eval_rows": 10000
  },
  "phases": [
    {
      "steps": 900000,
      "sequence_length": 128,
      "max_predictions_per_seq": 20,
      "batch_size": 256
    },
    {
      "steps": 100000,
      "sequence_length": 512,
      "max_predictions_per_seq": 77,
      "batch_size": 256
    }
  ],
  "optimizer": {
    "name": "bert_adam",
    "peak_learning_rate": 0.0001,
    "warmup_steps": 10000,
    "schedule": "paper",
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-06,
    "weight_decay": 0.01,
    "clip": "global",
    "clip_norm": 1.0,
    "reference_replicas": 1,
    "gradient_reduction": "bfloat16",
    "layer_decay": 1.0,
    "bad_steps_in_a_row": 10,
    "after_bad_steps": "roll_back"
  },
  "parallelism": {
    "state": "zero3",
    "tensor": 1,
    "accumulation": [
      1
    ],
    "remat": "dots",
    "layer_loop": "scan"
  },
  "run": {
    "log_every": 100,
    "eval_every": 10000,
    "eval_batch_size": 256,
    "checkpoint_every": 1000,
    "keep_checkpoints": 3,
    "keep_best": 1,
    "keep_every": 0,
    "when_disk_is_full": "stop",
    "hang_after_seconds": 1800,
    "check_every": 0,
    "prefetch_batches": 4,
    "data_workers": 0,
    "profile_steps": [],
    "watch": [],
    "probes": [],
    "probe_share": 0.05,
    "corpus_dir": ""
  }
}
END
cat > /cache/launch/bert-large-pod-a4759bab/follow.sh <<'END'
#!/usr/bin/env bash
# follow.sh BYTE SECONDS: shows run.log from a byte on, until the run has ended or time is up.
cd "$(dirname "$0")"
timeout "$2" tail --bytes="+$1" --follow=name --pid="$(cat run.pid)" run.log
exit 0
END
cat > /cache/launch/bert-large-pod-a4759bab/install.sh <<'END'
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
cat > /cache/launch/bert-large-pod-a4759bab/run.sh <<'END'
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
cat > /cache/launch/bert-large-pod-a4759bab/start.sh <<'END'
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
cat > /cache/launch/bert-large-pod-a4759bab/state.sh <<'END'
#!/usr/bin/env bash
# Says how the run stands: absent, running, ended CODE, or lost (killed with this script's like).
cd "$(dirname "$0")"
if ! [ -f run.log ]; then state=absent
elif ! flock --shared --nonblock run.lock true; then state=running
elif [ -f run.exit ]; then state="ended $(cat run.exit)"
else state=lost
fi
echo "bert-jax-host $(hostname) $state"
END
cat > /cache/launch/bert-large-pod-a4759bab/stop.sh <<'END'
#!/usr/bin/env bash
# stop.sh SIGNAL: asks the run to end; TERM has it save before.
cd "$(dirname "$0")"
if ! flock --shared --nonblock run.lock true; then kill -s "$1" "$(cat run.pid)"; fi
END

# The machines. They are deleted if they do not come in time.
gcloud compute tpus queued-resources create bert-large-pod-a4759bab --node-id=bert-large-pod-a4759bab --accelerator-type=v5litepod-64 --runtime-version=v2-alpha-tpuv5-lite --valid-until-duration=2d --spot --zone=us-west4-a --quiet
until [ "$(gcloud compute tpus queued-resources describe bert-large-pod-a4759bab '--format=value(state.state)' --zone=us-west4-a --quiet)" = ACTIVE ]; do sleep 30; done

# Five times, while a host does not answer yet.
gcloud compute tpus tpu-vm ssh bert-large-pod-a4759bab --worker=all '--command=mkdir -p bert-jax/bert-large-pod-a4759bab' --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm scp /cache/launch/bert-large-pod-a4759bab/bert_jax-0.1.0-py3-none-any.whl /cache/launch/bert-large-pod-a4759bab/constraints.txt /cache/launch/bert-large-pod-a4759bab/experiment.json /cache/launch/bert-large-pod-a4759bab/follow.sh /cache/launch/bert-large-pod-a4759bab/install.sh /cache/launch/bert-large-pod-a4759bab/run.sh /cache/launch/bert-large-pod-a4759bab/start.sh /cache/launch/bert-large-pod-a4759bab/state.sh /cache/launch/bert-large-pod-a4759bab/stop.sh bert-large-pod-a4759bab:bert-jax/bert-large-pod-a4759bab/ --worker=all --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh bert-large-pod-a4759bab --worker=all '--command=bash bert-jax/bert-large-pod-a4759bab/install.sh' --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh bert-large-pod-a4759bab --worker=all '--command=bash bert-jax/bert-large-pod-a4759bab/start.sh' --zone=us-west4-a --quiet

# Again and again, from the byte that was shown last, until all hosts have ended:
# the log of host 0, how the run stands on each, whether the machines are still there.
gcloud compute tpus tpu-vm ssh bert-large-pod-a4759bab --worker=0 '--command=bash bert-jax/bert-large-pod-a4759bab/follow.sh 1 300' --zone=us-west4-a --quiet
gcloud compute tpus tpu-vm ssh bert-large-pod-a4759bab --worker=all '--command=bash bert-jax/bert-large-pod-a4759bab/state.sh' --zone=us-west4-a --quiet
gcloud compute tpus queued-resources describe bert-large-pod-a4759bab '--format=value(state.state)' --zone=us-west4-a --quiet

# Preempted, or a host lost: deleted and asked for anew, 10 times at most.
# Stopped with exit code 75: started again on the same machines, counted alike.
# Ctrl-C: the run is asked to save, and waited for, before the machines are deleted:
#   gcloud compute tpus tpu-vm ssh bert-large-pod-a4759bab --worker=all '--command=bash bert-jax/bert-large-pod-a4759bab/stop.sh TERM' --zone=us-west4-a --quiet

# At the end, whatever the end; with --keep, not.
gcloud compute tpus queued-resources delete bert-large-pod-a4759bab --force --zone=us-west4-a --quiet
