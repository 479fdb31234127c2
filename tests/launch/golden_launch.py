"""Dry runs that were reviewed. `python tests/launch/golden_launch.py` writes them again.

The experiment's text and hash stand in them as EXPERIMENT and SHA256, what every launch on TPU VMs
shares as the name of its file: what these hold is not theirs.
"""

import contextlib
import io
import os
import pathlib
import re
import sys
from unittest import mock

from launch import __main__, checks

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden" / "launch"

_CLUSTER = ("--cluster", "tpus", "--zone", "us-west4-a", "--project", "project")

CASES = {
    "bert_large_pod_v5e_8x8": [
        *("experiments/bert_large_pod.py", "--topology", "v5e:8x8", "--zone", "us-west4-a"),
        *("--workdir", "gs://BUCKET/bert_large_pod", "--spot", "--valid-until", "2d"),
    ],
    "quotes": [
        *("experiments/tiny.py", "--topology", "v6e:2x2", "--zone", "us-east5-b", "--extend"),
        *("--workdir", """gs://BUCKET/it's "mine" $(id)""", "--name", "quotes"),
        *("--set", """run.corpus_dir=gs://BUCKET/a b's "$(rm -r /)" `id` \\ $HOME"""),
        *("--set", "corpus.text_field=END"),
    ],
    "gke_bert_large_pod_v5e_8x8": [
        *("experiments/bert_large_pod.py", "--topology", "v5e:8x8", *_CLUSTER),
        *("--workdir", "gs://BUCKET/bert_large_pod", "--service-account", "runner"),
        *("--image", "registry.example/bert/bert-jax:1"),
    ],
}


def dry_run(case: str, cache: str = "/cache") -> str:
    """Returns what is printed, with the names of this checkout and its commit made stable."""
    launcher = "gke" if case.startswith("gke_") else "tpu_vm"
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, BERT_JAX_CACHE_DIR=cache),
        mock.patch.object(checks, "ROOT", pathlib.PurePosixPath("/checkout")),
        mock.patch.object(checks, "head_commit", lambda: "0123456789abcdef" * 2 + "01234567"),
        mock.patch.object(sys, "executable", "python"),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
    ):
        assert __main__.main([launcher, *CASES[case], "--dry-run"]) == 0
    return out.getvalue()


def reviewed(case: str) -> str:
    """Returns the part of a dry run that is reviewed."""
    text = dry_run(case)
    body = ROOT / "launch" / "tpu_vm.sh"
    text = text.replace(body.read_text(), f"# {body.relative_to(ROOT)}\n")
    sha256 = re.search(r"config sha256 ([0-9a-f]{64})", text)[1]
    text = re.sub(r"^( *)\{\n(.*\n)+?\1\}$", r"\1EXPERIMENT", text, count=1, flags=re.MULTILINE)
    return text.replace(sha256, "SHA256").replace(f"-{sha256[:8]}", "-SHA256")


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.sh").write_text(reviewed(case))
