"""Dry runs that were reviewed. `python tests/launch/golden_launch.py` writes them anew."""

import contextlib
import io
import os
import pathlib
import sys
from unittest import mock

from launch import checks, gke, tpu_vm

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden" / "launch"

_IMAGE = "registry.example/bert/bert-jax:1"
_CLUSTER = ("--cluster", "tpus", "--zone", "us-west4-a", "--project", "project")
_LARGE = [
    *("experiments/bert_large_pod.py", "--topology", "v5e:8x8", "--image", _IMAGE, *_CLUSTER),
    *("--workdir", "gs://BUCKET/bert_large_pod", "--service-account", "runner"),
]

# The launcher is tpu_vm, or that of the prefix.
CASES = {
    "bert_base_v3_4x4": [
        *("experiments/bert_base.py", "--topology", "v3:4x4", "--zone", "europe-west4-a"),
        *("--workdir", "gs://BUCKET/bert_base", "--project", "PROJECT", "--reserved"),
    ],
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
    "gke_bert_base_pod_v5e_4x4": [
        *("experiments/bert_base_pod.py", "--topology", "v5e:4x4", "--image", _IMAGE, "--spot"),
        *("--workdir", "gs://BUCKET/bert_base_pod"),
    ],
    "gke_bert_large_pod_v5e_8x8": _LARGE,
    "gke_xpk_bert_large_pod_v5e_8x8": [*_LARGE, "--xpk"],
}


def dry_run(case: str, cache: str = "/cache") -> str:
    """What is printed, with the names of this checkout and its commit made stable."""
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, BERT_JAX_CACHE_DIR=cache),
        mock.patch.object(checks, "ROOT", pathlib.PurePosixPath("/checkout")),
        mock.patch.object(checks, "head", lambda: "0123456789abcdef" * 2 + "01234567"),
        mock.patch.object(sys, "executable", "python"),
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
    ):
        launcher = gke if case.startswith("gke_") else tpu_vm
        assert launcher.main([*CASES[case], "--dry-run"]) == 0
    return out.getvalue()


if __name__ == "__main__":
    for case in CASES:
        (FOLDER / f"{case}.sh").write_text(dry_run(case))
