"""A run small enough to be started many times: text, an experiment file, and the command."""

import contextlib
import io
import os
import pathlib
import random
import signal
import subprocess
import sys
from importlib import metadata
from typing import IO

EXPERIMENT = """
from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Phase, Run


def experiment():
    return Experiment(
        name="small",
        model=Model(vocab_size=45, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=32, max_position_embeddings=32),
        corpus=Corpus(sources=("text:{folder}/text",), layout="sentences_by_line",
                      tokenizer="{folder}/vocab.txt", validation_share=0.3),
        data=Data(eval_sequence_length=16, eval_max_predictions_per_seq=3, eval_rows=20),
        phases=(
            Phase(steps=14, sequence_length=16, max_predictions_per_seq=3, batch_size=8),
            Phase(steps=8, sequence_length=24, max_predictions_per_seq=4, batch_size=4),
        ),
        optimizer=Optimizer(name="adamw", peak_learning_rate=1e-2, warmup_steps=3),
        run=Run(log_every=3, eval_every=6, eval_batch_size=8, checkpoint_every=4,
                corpus_dir="{folder}/corpus"),
    )
"""


# `--set` strings of the small run for each objective but the paper's, of both kinds of encoders.
OBJECTIVES = {
    "mlm": ("data.objective=mlm",),
    "mlm_sop": ("data.objective=mlm_sop",),
    "causal": (
        *("data.objective=causal", "data.attention=per_document"),
        *("model.kind=modern", "model.global_every=1", "model.direction=left_to_right"),
        # All of a row, of both phases and of held-out rows.
        *("phases.0.max_predictions_per_seq=15", "phases.1.max_predictions_per_seq=23"),
        "data.eval_max_predictions_per_seq=15",
    ),
    "phases": (  # two objectives, one after the other
        *("phases.0.objective=causal", "phases.0.max_predictions_per_seq=15"),
        *("phases.1.masked_lm_prob=0.1", "model.kind=modern", "model.global_every=1"),
    ),
}


# `--set` strings of a run whose phases draw from two sources by shares of their own.
TWO_SOURCES = (
    *("corpus.sources=text:{folder}/text,text:{folder}/more", "run.corpus_dir={folder}/mixed"),
    *("corpus.temperature=0.5", "phases.0.mixture=1,0", "phases.1.mixture=1,3"),
)


def write_second_source(folder: pathlib.Path) -> tuple[str, ...]:
    """Writes other text besides that of `write_text`; returns `TWO_SOURCES`."""
    (folder / "more").mkdir()
    (folder / "more" / "all.txt").write_text(
        (folder / "text" / "all.txt").read_text().replace("w", "x")
    )
    return tuple(setting.replace("{folder}", str(folder)) for setting in TWO_SOURCES)


def write_text(folder: pathlib.Path, documents: int = 27) -> pathlib.Path:
    """Text, its vocabulary and the experiment file in `folder`; returns the experiment file."""
    rng = random.Random(0)
    words = [f"w{chr(97 + i)}" for i in range(20)] + [f"x{chr(97 + i)}" for i in range(19)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]
    (folder / "text").mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")

    def sentence():
        return " ".join(rng.choice(words) for _ in range(rng.randint(2, 7))) + " ."

    blocks = ["\n".join(sentence() for _ in range(rng.randint(4, 8))) for _ in range(documents)]
    (folder / "text" / "all.txt").write_text("\n\n".join(blocks) + "\n")
    file = folder / "small.py"
    file.write_text(EXPERIMENT.replace("{folder}", str(folder)))
    return file


def command(
    *args: object,
    devices: int = 1,
    stdin: bytes = b"",
    timeout: float = 300,
    stdout: int | IO = subprocess.PIPE,
    **env: str,
) -> subprocess.CompletedProcess:
    """Runs `python ARGS` as a user would, in the environment of `settings` and of `env`."""
    return subprocess.run(
        [sys.executable, *map(str, args)],
        input=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | settings(devices) | env,
        timeout=timeout,
        check=False,
    )


def run_bert_jax(*args: object, **options) -> subprocess.CompletedProcess:
    """Runs `bert-jax ARGS`."""
    return command("-m", "bert_jax.cli", *args, **options)


def on_two(*words: object) -> str:
    """What a command prints in two processes that know each other, both of which must finish."""
    local = "-m", "bert_jax.launch", "local", "--processes", 2, "--"
    done = command(*local, *words)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    return done.stdout.decode()


def on_eight(code: str) -> None:
    """Runs code of the tests where there are eight devices."""
    done = command("-c", f"import sys; sys.path[:] = {sys.path!r}; {code}", devices=8)
    assert done.returncode == 0, done.stderr.decode()


def killed(step: int, by: int, *args: object, **options) -> subprocess.CompletedProcess:
    """Runs `bert-jax ARGS`, sent the signal before step STEP."""
    # Not above: conftest reads this module before jax may start.
    from bert_jax.tools.verify.faults import Fault, Plan

    plan = Plan(Fault("step", by, step))
    return command("-m", "bert_jax.tools.verify.child", plan.to_json(), *args, **options)


def settings(devices: int) -> dict[str, str]:
    """Environment variables of jax: virtual devices, and a folder of compiled programs.

    Tests compile the same small programs again and again, so they share what is compiled, and it
    is compiled quickly, unless `make test-nightly` has it as a user's.
    """
    cache = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "compiled"
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    if os.environ.get("TESTS_COMPILE") != "as_for_users":
        flags.append("--xla_backend_optimization_level=0")
        # The older emitters of fused loops take two thirds of the time that the newer ones take,
        # and a program in one part nine tenths of what one in many takes.
        # Later versions have none, and a flag that XLA does not know ends the process.
        if metadata.version("jaxlib").startswith("0.10."):
            flags.append("--xla_cpu_use_fusion_emitters=false")
            flags.append("--xla_cpu_parallel_codegen_split_count=1")
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(flags),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def pretrain(
    file: pathlib.Path, workdir: pathlib.Path, *overrides: str, may_extend: bool = False
) -> tuple[str, str]:
    """Runs in this process; returns the outcome and what was shown."""
    from rich.console import Console

    from bert_jax import config
    from bert_jax.pretraining.pretraining_job import PretrainingJob
    from bert_jax.running import session
    from bert_jax.running.progress import Progress
    from bert_jax.storage.workdir import Workdir
    from bert_jax.tasks.probes import Probes

    experiment = config.override(config.load(str(file)), overrides)
    console = Console(record=True, width=200, file=io.StringIO())
    place = Workdir(workdir, experiment.run.corpus_dir)
    probes = Probes(experiment.run.probes) if experiment.run.probes else None
    progress = Progress(console)
    job = PretrainingJob(experiment, place, progress.report, may_extend, probes)
    return session.run(job, progress), console.export_text()


@contextlib.contextmanager
def hooked(**methods):
    """While it is active, runs call these functions as the `Hooks` of the same names."""
    from bert_jax.running.context import HOOKS, Hooks  # after jax's settings

    hooks = Hooks()
    vars(hooks).update(methods)
    token = HOOKS.set(hooks)
    try:
        yield
    finally:
        HOOKS.reset(token)


def signal_before(at):
    """Within it a run is sent SIGTERM before a step, and stops after it."""

    def change_batch(done, batch):
        if done == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    return hooked(change_batch=change_batch)


def saves_in(workdir: pathlib.Path, run: object = None) -> object:
    """What writes a run's checkpoints, as of one process."""
    from bert_jax.checkpoints.save import Saver
    from bert_jax.config import Run
    from bert_jax.distributed.peers import Peers
    from bert_jax.storage.workdir import Workdir

    return Saver(Workdir(workdir), run or Run(), Peers(0, 1, None, 1.0), print)


def final_state(workdir: pathlib.Path, step: int | None = None) -> tuple[int, dict]:
    """The newest checkpoint of a run, or that of a step: its step and its whole state."""
    import jax
    from etils import epath

    from bert_jax import config
    from bert_jax.checkpoints.load import Checkpoints
    from bert_jax.training import mesh as mesh_lib
    from bert_jax.training.objective import Pretraining
    from bert_jax.training.step import abstract_state

    experiment = config.from_json((workdir / "experiment.json").read_text(), "experiment")
    abstract = abstract_state(
        Pretraining(experiment.model),
        experiment.optimizer,
        experiment.parallelism,
        mesh_lib.make_mesh(experiment.parallelism),
    )
    saved = Checkpoints(epath.Path(workdir / "checkpoints"))
    step = step or max(saved.steps)
    return step, jax.device_get(saved.restore(step, abstract).state)


def assert_same_run(one: pathlib.Path, other: pathlib.Path) -> None:
    """Two runs have the same lines, last step and state, bit for bit."""
    from compare import assert_identical

    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert_identical(final_state(one), final_state(other))
