#!/usr/bin/env bash
# bert-large-pod-SHA256: v5e:8x8, 64 chips on 16 hosts;
# image registry.example/bert/bert-jax:1, config sha256 SHA256.
# Checked before, unless --force names it: the commit, the workdir, doctor, plan.
# Exit codes 1, 2, 130 of a pod end the run. Others except 0, such
# as 75 after a preemption, restart all pods, 10 times at most.
# To list its pods, to follow the log of its first host, and to end it:
#   kubectl --context=gke_project_us-west4-a_tpus --namespace=default get pods --selector=jobset.sigs.k8s.io/jobset-name=bert-large-pod-SHA256 --output=wide
#   kubectl --context=gke_project_us-west4-a_tpus --namespace=default logs --selector=jobset.sigs.k8s.io/jobset-name=bert-large-pod-SHA256,batch.kubernetes.io/job-completion-index=0 --container=run --tail=-1 --follow
#   kubectl --context=gke_project_us-west4-a_tpus --namespace=default delete jobset,configmap bert-large-pod-SHA256 --ignore-not-found --cascade=foreground --timeout=1200s
set -eu
existing=$(kubectl --context=gke_project_us-west4-a_tpus --namespace=default get jobset bert-large-pod-SHA256 --ignore-not-found --output=name)
ended=$(kubectl --context=gke_project_us-west4-a_tpus --namespace=default get jobset bert-large-pod-SHA256 --ignore-not-found '--output=jsonpath={.status.terminalState}')
if [ -n "$ended" ]; then
  echo "launch: bert-large-pod-SHA256 has ended before (JobSet $ended); deleting it" >&2
  kubectl --context=gke_project_us-west4-a_tpus --namespace=default delete jobset,configmap bert-large-pod-SHA256 --ignore-not-found --cascade=foreground --timeout=1200s
  existing=
fi

mkdir -p /cache/launch/bert-large-pod-SHA256
cat > /cache/launch/bert-large-pod-SHA256/manifest.yaml <<'END'
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: bert-large-pod-SHA256
  namespace: default
  labels:
    app.kubernetes.io/name: bert-jax
  annotations:
    bert-jax/config-sha256: SHA256
immutable: true
data:
  experiment.json: |
    EXPERIMENT
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: bert-large-pod-SHA256
  namespace: default
  labels:
    app.kubernetes.io/name: bert-jax
  annotations:
    bert-jax/config-sha256: SHA256
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  network:
    enableDNSHostnames: true
    subdomain: bert-large-pod-SHA256
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
        parallelism: 16
        completions: 16
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
            serviceAccountName: runner
            automountServiceAccountToken: false
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
              cloud.google.com/gke-tpu-topology: 8x8
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
              - gs://BUCKET/bert_large_pod
              env:
              - name: BERT_JAX_ARRIVE_WITHIN
                value: '900'
              - name: BERT_JAX_CACHE_DIR
                value: /cache
              - name: JAX_NUM_PROCESSES
                value: '16'
              - name: JAX_PLATFORMS
                value: tpu,cpu
              - name: JAX_COORDINATOR_ADDRESS
                value: bert-large-pod-SHA256-hosts-0-0.bert-large-pod-SHA256:8482
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
                name: bert-large-pod-SHA256
            - name: cache
              emptyDir: {}
END
# No change if it is running; another experiment of the same name is refused.
if ! kubectl --context=gke_project_us-west4-a_tpus --namespace=default apply --filename=/cache/launch/bert-large-pod-SHA256/manifest.yaml; then
  [ -n "$existing" ] || kubectl --context=gke_project_us-west4-a_tpus --namespace=default delete jobset,configmap bert-large-pod-SHA256 --ignore-not-found --cascade=foreground --timeout=1200s
  exit 2
fi
echo "launch: bert-large-pod-SHA256 is launched; see $0 for commands to follow or end it" >&2
