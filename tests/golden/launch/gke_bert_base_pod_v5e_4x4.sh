#!/usr/bin/env bash
# bert-base-pod-b033e40c: v5e:4x4, 16 chips on 4 hosts;
# image registry.example/bert/bert-jax:1, config sha256 b033e40cce822187310a3e2e4dd23ed87302d61ad8476bd93b40634d20c54bfe.
# Checked before, unless --force names it: the commit, the workdir, doctor, plan.
set -eu

# One of this name that has not ended is left alone, and nothing is launched; one that
# has ended is deleted first.
kubectl --namespace=default get jobset bert-base-pod-b033e40c --ignore-not-found --output=json

mkdir -p /cache/launch/bert-base-pod-b033e40c
cat > /cache/launch/bert-base-pod-b033e40c/manifest.yaml <<'END'
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: bert-base-pod-b033e40c
  namespace: default
  labels:
    app.kubernetes.io/name: bert-jax
  annotations:
    bert-jax/config-sha256: b033e40cce822187310a3e2e4dd23ed87302d61ad8476bd93b40634d20c54bfe
immutable: true
data:
  experiment.json: |
    {
      "format_version": 2,
      "name": "bert_base_pod",
      "seed": 0,
      "init_from": "",
      "model": {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
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
          1,
          4
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
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: bert-base-pod-b033e40c
  namespace: default
  labels:
    app.kubernetes.io/name: bert-jax
  annotations:
    bert-jax/config-sha256: b033e40cce822187310a3e2e4dd23ed87302d61ad8476bd93b40634d20c54bfe
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
    subdomain: bert-base-pod-b033e40c
  failurePolicy:
    maxRestarts: 10
    restartStrategy: BlockingRecreate
    rules:
    - name: failure
      action: FailJobSet
      onJobFailureReasons:
      - PodFailurePolicy
    - name: preemption
      action: RestartJobSet
  replicatedJobs:
  - name: hosts
    replicas: 1
    template:
      spec:
        parallelism: 4
        completions: 4
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes:
              containerName: run
              operator: In
              values:
              - 1
              - 2
              - 130
        template:
          metadata:
            labels:
              app.kubernetes.io/name: bert-jax
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 300
            shareProcessNamespace: true
            automountServiceAccountToken: false
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 4x4
              cloud.google.com/gke-spot: 'true'
            securityContext:
              runAsNonRoot: true
              runAsUser: 1000
            containers:
            - name: run
              image: registry.example/bert/bert-jax:1
              command:
              - bert-jax
              args:
              - pretrain
              - /etc/bert_jax/experiment.json
              - --workdir
              - gs://BUCKET/bert_base_pod
              env:
              - name: BERT_JAX_ARRIVE_WITHIN
                value: '900'
              - name: BERT_JAX_CACHE_DIR
                value: /cache
              - name: JAX_NUM_PROCESSES
                value: '4'
              - name: JAX_PLATFORMS
                value: tpu,cpu
              - name: JAX_COORDINATOR_ADDRESS
                value: bert-base-pod-b033e40c-hosts-0-0.bert-base-pod-b033e40c:8482
              - name: JAX_PROCESS_ID
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
              - name: POD_IP
                valueFrom:
                  fieldRef:
                    fieldPath: status.podIP
              - name: JAX_COORDINATOR_BIND_ADDRESS
                value: $(POD_IP):8482
              ports:
              - containerPort: 8471
              - containerPort: 8482
              resources:
                requests:
                  google.com/tpu: 4
                limits:
                  google.com/tpu: 4
              securityContext:
                allowPrivilegeEscalation: false
                capabilities:
                  drop:
                  - ALL
              volumeMounts:
              - name: experiment
                mountPath: /etc/bert_jax
                readOnly: true
              - name: cache
                mountPath: /cache
            volumes:
            - name: experiment
              configMap:
                name: bert-base-pod-b033e40c
            - name: cache
              emptyDir: {}
END
kubectl --namespace=default apply --filename=/cache/launch/bert-base-pod-b033e40c/manifest.yaml

# A pod that ends with exit code 1, 2, 130 is the end. Any other end but 0 (75 is a
# preemption) starts all pods again, 10 times at most.
# If the cluster refuses it, and by `python -m launch stop`, after the pods have saved:
#   kubectl --namespace=default delete jobset,configmap bert-base-pod-b033e40c --ignore-not-found --cascade=foreground --timeout=120s
