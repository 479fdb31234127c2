"""`bert-jax conformance`: checks this package against Devlin et al. 2018 and google-research/bert.

It also lists the deviations of an experiment from both.
"""

import dataclasses
import re
from collections.abc import Iterator

import jax

from bert_jax import config
from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Parallelism, Phase, explain
from bert_jax.errors import printable
from bert_jax.tools.conformance import data_rules, model_rules, optimizer_rules
from bert_jax.tools.conformance.rule import ReferenceRule
from bert_jax.training import mesh


def check() -> Iterator[ReferenceRule]:
    """Checks every rule of the reference, and yields the results; takes some twenty seconds."""
    mesh.make_mesh(Parallelism())  # raises InputError if the device does not exist
    # The rules concern formulas, so matmuls use full float32 precision on all devices.
    with jax.default_matmul_precision("highest"):
        for part in (data_rules, optimizer_rules, model_rules):
            yield from part.check()


def print_report(experiment: Experiment | None) -> bool:
    """Prints a line for each rule, and an experiment's deviations; returns whether all rules hold.

    With an experiment, the report can be stored: it has bounds, which are equal on all machines.
    """
    checked = []
    for rule in check():
        checked.append(rule)
        print(rule.line("measured" if experiment is None else "bounds"), flush=True)
    broken = sum(not rule.holds for rule in checked)
    print(
        f"{broken} of {len(checked)} rules FAILED" if broken else f"all {len(checked)} rules hold"
    )
    if experiment is not None:
        print(f"\n{experiment.name} deviates from the paper and its code:\n")
        for setting, why in deviations(experiment):
            print(f"{printable(setting)}\n  {why}")
    return not broken


# --- deviations from the paper ------------------------------------------------------------------


# The paper's BASE, on 16 chips of two cores; details that the paper omits are those of the
# reference's code (ten passes over the text, for example).
_BASE = Experiment(
    name="paper",
    corpus=Corpus(
        sources=("text:English Wikipedia of 2018", "text:BooksCorpus, which is not public"),
        layout="sentences_by_line",
        tokenizer="the released vocab.txt",
    ),
    data=Data(dupe_factor=10),
    phases=(
        Phase(steps=900_000, sequence_length=128, max_predictions_per_seq=20),
        Phase(steps=100_000, sequence_length=512, max_predictions_per_seq=77),
    ),
    optimizer=Optimizer(clip="per_replica", reference_replicas=32),
)
# The paper's LARGE, on 64 chips.
_LARGE = dataclasses.replace(
    _BASE,
    model=Model(
        hidden_size=1_024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4_096
    ),
    optimizer=dataclasses.replace(_BASE.optimizer, reference_replicas=128),
)

# Settings of role "identity" that are not reported: they do not matter here, have a meaning only
# with another setting, or are explained by `_EVERY_RUN`.
_LEFT_OUT = re.compile(
    r"name|seed|corpus\.(text_field|encoding|language|case|validation_share)|data\.eval_.*|"
    r"model\.dropout_rng|optimizer\.(bad_steps_in_a_row|after_bad_steps)|"
    r"phases\.\d+\.(row_offset|global_rotary_base)"
)

# {aspect: deviation} of every run, whatever its settings.
_EVERY_RUN = {
    "dropout": "is drawn with a resolution of 1/256 (model.dropout_rng=threefry8) or of 1/65536, "
    "so 0.1 is 26/256 or 6554/65536; kept values are scaled by the exact share that is kept",
    "held-out documents": "are corpus.validation_share of all, evaluated on the same rows and "
    "masks every time; the reference trains on all documents, and evaluates on any instances it is "
    "given",
    "data.dupe_factor": "passes follow one another, each in its own order; the reference shuffles "
    "the instances of all passes together",
    "phases": "share one schedule and the moments of Adam; in the reference each length is a "
    "separate job, which restarts its schedule, and its moments at 0",
    "random choices": "are functions of seed, phase, row and purpose; the reference takes them "
    "from one generator in turn: the distributions are equal, the rows differ",
    "rows of an epoch": "have the same number in every epoch, that of the first plan: some rows of "
    "a longer plan are dropped, some of a shorter plan come twice; the reference's files hold each "
    "once",
}


def deviations(experiment: Experiment) -> list[tuple[str, str]]:
    """Returns settings that differ from the paper's, with their comments, and `_EVERY_RUN`."""
    closest = min((_BASE, _LARGE), key=lambda p: len(config.differences(p, experiment, "identity")))
    paper, values = (dict(config.flatten(e, "identity")) for e in (closest, experiment))
    comments = {setting.path: setting.comment for setting in explain.settings(Experiment)}
    settings = []
    for path in dict.fromkeys([*values, *paper]):
        value, paper_value = values.get(path, "absent"), paper.get(path, "absent")
        if value != paper_value and not _LEFT_OUT.fullmatch(path):
            comment = comments[re.sub(r"\.\d+\.", ".N.", path)]
            settings.append((f"{path}={value!r}", f"the paper has {paper_value!r}. {comment}"))
    return [*settings, *_EVERY_RUN.items()]
