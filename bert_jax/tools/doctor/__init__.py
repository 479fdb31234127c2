"""Finds faults of plain text or of a prepared corpus, before they spoil a training run.

Neither is changed, except that a missing `stream/` of a corpus is made from its `dataset/`, as in
training. A `problem` spoils training or prevents it; a `note` may be intended.
"""

import os
from collections.abc import Sequence

from bert_jax import config
from bert_jax.config import Corpus, Experiment
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.storage import mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import COMPLETE, Workdir, holds_finetuning, load_experiment
from bert_jax.text import sources as text_sources
from bert_jax.tools.doctor import corpus_findings, text
from bert_jax.tools.doctor.finding import ONE_SENTENCE, Finding

__all__ = ["Finding", "examine", "print_findings"]


def examine(path: str, settings: Sequence[str] = ()) -> list[Finding]:
    """Examines text or a corpus at a path; returns findings, problems first.

    Args:
      path: a corpus folder, the workdir of a pre-training (its corpus is examined), an experiment
        file (its sources are examined), or text: a file or folder of .txt, .jsonl, .csv, .tsv or
        .parquet, all except the last also compressed.
      settings: changes to an experiment, in the form of `--set`.
    """
    return sorted(_examine(path, settings), key=lambda finding: finding.severity != "problem")


def _examine(path: str, settings: Sequence[str]) -> list[Finding]:
    is_experiment_file = os.path.isfile(path) and path.endswith((".py", ".json"))
    if is_experiment_file or (not os.path.exists(path) and config.is_shipped(path)):
        experiment = config.override(config.load(path), settings)
        findings = text.examine(experiment.corpus)
        if _lengths_with_pairs(experiment):
            return findings
        return [finding for finding in findings if finding.rule is not ONE_SENTENCE]
    if settings:
        raise InputError(f"--set {settings[0]}: {path} is no experiment; remove --set")
    workdir = mirror.open_workdir(path)
    if workdir.experiment.exists():
        return _examine_run(workdir)
    for folder in (workdir.address, workdir.corpus):  # a corpus, or a folder that holds one
        if storage_of(folder).exists(folder / COMPLETE):
            return corpus_findings.examine(folder)
    sources = _sources(path)
    # From this path, `prepare` would read files of the first kind only; a note lists the others.
    return text.examine(Corpus(sources=sources), prepared_as=Corpus(sources=sources[:1]))


def _examine_run(workdir: Workdir) -> list[Finding]:
    """Examines the corpus of a run, with the sequence lengths of its phases with sentence pairs."""
    if holds_finetuning(workdir):
        raise InputError(
            f"{workdir.address}: a fine-tuning has no corpus; use `bert-jax report` to see its "
            "scores and mistakes"
        )
    experiment = load_experiment(workdir)
    folder = workdir.with_corpus(experiment.run.corpus_dir).corpus
    if not storage_of(folder).exists(folder / COMPLETE):
        raise InputError(f"{folder}: no prepared corpus of this run; name another PATH")
    return corpus_findings.examine(folder, _lengths_with_pairs(experiment))


def _lengths_with_pairs(experiment: Experiment) -> tuple[int, ...]:
    lengths = {
        phase.sequence_length
        for number, phase in enumerate(experiment.phases)
        if experiment.data_of(number).row_kind != "sentences"  # the other kinds are pairs
    }
    return tuple(sorted(lengths))


def _sources(path: str) -> tuple[str, ...]:
    """Returns the sources of a file or folder of text, one for each kind of file."""
    exists = "://" in path or os.path.exists(path)
    sources = tuple(f"{kind}:{path}" for kind in (text_sources.kinds_in(path) if exists else ()))
    if not sources:
        raise InputError(
            f"{path}: nothing to examine; name a run's workdir, a prepared corpus, an experiment "
            "file, or a file or folder of .txt, .jsonl, .csv, .tsv or .parquet"
        )
    return sources


def print_findings(findings: Sequence[Finding]) -> int:
    """Prints findings, then the counts of problems and notes; returns the number of problems."""
    for finding in findings:
        print(f"{finding.severity}: {printable(finding.message)}")
        for name in ("example", "effect", "remedy"):
            if getattr(finding, name):
                print(f"  {name:8} {printable(getattr(finding, name))}")
    problems = sum(finding.severity == "problem" for finding in findings)
    notes = len(findings) - problems
    print(
        f"{pluralize(problems, 'problem') if problems else 'no problem'}, "
        f"{pluralize(notes, 'note') if notes else 'no notes'}"
    )
    return problems
