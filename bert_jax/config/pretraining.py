"""The config sections of a pre-training run: what is computed, and where and how.

A section has one of two roles. *Identity*: `Model`, `Corpus`, `Data`, `Phase` and `Optimizer` say
what is computed; they may not change when a run resumes. *Placement*: `Parallelism` and `Run` say
where and how; they may change. Each module of the library takes only the section that it needs.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from bert_jax.config.data import OBJECTIVES, Data
from bert_jax.config.fields import (
    Count,
    FieldRule,
    FolderName,
    Positive,
    PositiveCount,
    PositiveShare,
    Problem,
    RequiresValue,
    RowLength,
    Section,
    Seed,
    Share,
    WholeShare,
    minimum,
    subset_of,
)
from bert_jax.config.model import Model
from bert_jax.config.text_corpus import Corpus

# Allowed values of `run.trackers`; each is also the name of a module and of an extra.
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
# Maximum number of skipped steps of a run.
MAX_SKIPPED_STEPS = 64
# Share of a row's tokens that are predicted (Devlin et al. 2018, section 3.1).
_PAPER_SHARE = 0.15
# Maximum number of traced steps: a trace is held in memory.
_MAX_TRACED_STEPS = 100


def _is_step_range(steps: tuple[int, ...]) -> bool:
    return len(steps) == 2 and 0 <= steps[0] < steps[1] <= steps[0] + _MAX_TRACED_STEPS


_RotaryBaseOrZero = Annotated[
    float, FieldRule(lambda base: base == 0 or base > 1, "must be over 1, or 0")
]
_Accumulation = Annotated[
    tuple[int, ...], FieldRule(lambda x: min(x, default=0) > 0, "must be at least 1")
]
_BadStepCount = Annotated[
    PositiveCount, FieldRule(lambda n: n < MAX_SKIPPED_STEPS, f"below {MAX_SKIPPED_STEPS}")
]
_WSD_ONLY, _MUON_ONLY = (
    RequiresValue("optimizer.schedule", ("wsd",)),
    RequiresValue("optimizer.name", ("muon",)),
)
_StepRange = Annotated[
    tuple[int, ...],
    FieldRule(
        lambda steps: not steps or _is_step_range(steps),
        f"must be two steps, such as 10,20, at most {_MAX_TRACED_STEPS} apart",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Phase(Section, role="identity", label="phases"):
    """A stretch of training with one sequence length, batch size and objective."""

    # Number of steps in this phase.
    steps: PositiveCount
    # Length of a row, in tokens.
    sequence_length: RowLength
    # Maximum number of masked tokens in a row.
    max_predictions_per_seq: PositiveCount
    # Rows per step, over all devices.
    batch_size: PositiveCount = 256
    # Objective of this phase; empty: data.objective, which the last phase and the held-out rows
    # always use.
    objective: Literal["", "mlm_nsp", "mlm_sop", "mlm", "causal"] = ""
    # Share of a row's tokens that are to be predicted in this phase; 0: data.masked_lm_prob.
    masked_lm_prob: Share = 0.0
    # For kind=modern: base of the rotary positions of global layers in this phase; 0:
    # model.global_rotary_base.
    global_rotary_base: Annotated[_RotaryBaseOrZero, RequiresValue("model.kind", ("modern",))] = 0.0
    # Weights of this phase instead of corpus.mixture; 0: the phase does not use the source. Empty:
    # corpus.mixture.
    mixture: tuple[float, ...] = ()
    # Exponent of the size of a source in this phase; 0: corpus.temperature.
    temperature: WholeShare = 0.0
    # Added to the row numbers of the phase. `fork` sets it, so that a run with another batch size
    # continues at the first row that the original run did not train on.
    row_offset: int = 0

    def _problems(self) -> Iterator[Problem]:
        if self.max_predictions_per_seq >= self.sequence_length:
            yield "max_predictions_per_seq", f"must be below sequence_length={self.sequence_length}"


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section, role="identity", label="optimizer"):
    """The update (Devlin et al. 2018, appendix A.2; You et al. 2019 for LAMB).

    `bert_adam` is the Adam of google-research/bert: no bias correction, weight decay added to the
    update.
    """

    # The update rule. bert_adam: Adam without bias correction (with the default betas its first
    # update is 3.16 times adamw's);
    # stable_adamw: AdamW with a lower rate for tensors whose gradients suddenly grow; muon:
    # orthogonal updates of the layers' matrices (Jordan et al. 2024), adamw for the rest.
    name: Literal["bert_adam", "adamw", "lamb", "stable_adamw", "muon"] = "bert_adam"
    # The highest learning rate, at the end of the warm-up.
    peak_learning_rate: Positive = 1e-4
    # Steps in which the learning rate rises.
    warmup_steps: Count = 10_000
    # paper: linear decay that would be at the peak in step 0 and is zero at the end; in the first
    # warmup_steps a linear rise to the peak is used instead, so the rate jumps down after them.
    # linear, cosine: warm-up, then decay from the peak to zero. wsd: warm-up, constant peak rate,
    # decay in the last decay_steps.
    schedule: Literal["paper", "linear", "cosine", "wsd"] = "paper"
    # For schedule=wsd: number of last steps in which the rate falls to 0; 0: it stays constant.
    decay_steps: Annotated[Count, _WSD_ONLY] = 0
    # For schedule=wsd: shape of the decay, 1 - sqrt(share of decay_steps done) or linear.
    decay_shape: Annotated[Literal["one_minus_sqrt", "linear"], _WSD_ONLY] = "one_minus_sqrt"
    # For name=muon: the highest learning rate of the layers' matrices, with the same schedule.
    matrix_learning_rate: Annotated[Positive, _MUON_ONLY] = 0.02
    # For name=muon: decay of the running mean of the matrices' gradients.
    momentum: Annotated[Share, _MUON_ONLY] = 0.95
    # Adam's beta 1: decay of the running mean of gradients.
    b1: Share = 0.9
    # Adam's beta 2: decay of the running mean of squared gradients.
    b2: Share = 0.999
    # Adam's epsilon: added to the root of the mean of squared gradients.
    eps: Positive = 1e-6
    # Weight decay of kernels and embeddings; biases and layer norms have none.
    weight_decay: Annotated[float, minimum(0)] = 0.01
    # What is clipped by its norm. global: the mean gradient of the batch; per_replica: the gradient
    # of each of reference_replicas groups of rows, before they are summed.
    clip: Literal["global", "per_replica", "none"] = "global"
    # A gradient with a larger norm is scaled down to this norm.
    clip_norm: Annotated[Positive, RequiresValue("optimizer.clip", ("global", "per_replica"))] = 1.0
    # For clip=per_replica: number of groups of rows, each clipped by its own norm, as each
    # replica of google-research/bert clips its own.
    reference_replicas: Annotated[
        PositiveCount, RequiresValue("optimizer.clip", ("per_replica",))
    ] = 1
    # Type in which devices sum their gradients.
    gradient_reduction: Literal["float32", "bfloat16"] = "float32"
    # Learning rate of each layer as a factor of the rate of the layer above it; the embeddings have
    # the lowest rate.
    layer_decay: PositiveShare = 1.0
    # A step whose loss or gradient is not finite is skipped. After this many in a row the run does
    # what after_bad_steps says.
    bad_steps_in_a_row: _BadStepCount = 10
    # roll_back: the run returns to the checkpoint before the bad steps and skips them. stop: the
    # run ends.
    after_bad_steps: Literal["roll_back", "stop"] = "roll_back"


@dataclass(frozen=True, kw_only=True)
class Parallelism(Section, role="placement", label="parallelism"):
    """The layout of the step over devices. May change on resume."""

    # How parameters and optimizer state are sharded. replicated: not at all; zero1: all parameters
    # are gathered once a step; zero3: those of each layer are gathered when the layer runs (on
    # TPUs, small parameters are all gathered before the first layer).
    state: Literal["replicated", "zero1", "zero3"] = "replicated"
    # Number of replica groups, at least one for each TPU slice: state is sharded within a group,
    # and only gradients cross groups, once a step. Devices of a group are neighbours.
    slices: PositiveCount = 1
    # Degree of tensor parallelism: number of devices over which attention heads, feed-forward
    # blocks and vocabulary are split.
    tensor: PositiveCount = 1
    # Micro-batches per step: one number for all phases, or one for each phase.
    accumulation: _Accumulation = (1,)
    # What each layer stores for the backward pass: everything (none), the results of matrix
    # products except attention scores (dots), or nothing (full); the rest is recomputed.
    remat: Literal["none", "dots", "full"] = "none"
    # scan: a loop over layers; unroll: no loop, faster on CPUs, slower to compile; auto: scan, but
    # unroll if the only device is a CPU.
    layer_loop: Literal["auto", "scan", "unroll"] = "auto"
    # What computes attention, on NVIDIA GPUs only. auto: the fused kernels of cuDNN if they can,
    # else XLA; xla: always XLA. The log says which one a run uses, and why.
    attention: Literal["auto", "xla"] = "auto"

    def accumulation_of(self, phase: int) -> int:
        """Returns the number of micro-batches in a step of a phase."""
        return self.accumulation[phase if len(self.accumulation) > 1 else 0]


@dataclass(frozen=True, kw_only=True)
class Run(Section, role="placement", label="run"):
    """Everything that happens besides the steps. May change on resume."""

    # Steps between lines of metrics.jsonl.
    log_every: PositiveCount = 100
    # Steps between evaluations on held-out text.
    eval_every: PositiveCount = 10_000
    # Rows per batch of an evaluation.
    eval_batch_size: PositiveCount = 256
    # Steps between checkpoints.
    checkpoint_every: PositiveCount = 1_000
    # Number of newest checkpoints that are kept.
    keep_checkpoints: Annotated[int, minimum(2)] = 3  # the newest may be damaged
    # Number of checkpoints with the lowest held-out loss that are also kept.
    keep_best: Count = 1
    # Checkpoints of steps divisible by this are also kept; 0: none.
    keep_every: Count = 0
    # Steps after which a checkpoint is saved and kept besides all others, for example 81,162,810.
    keep_steps: tuple[int, ...] = ()
    # If a checkpoint does not fit on the disk: the run ends (stop), or trains on and tries again
    # later (go_on). A run in several processes always ends.
    when_disk_is_full: Literal["stop", "go_on"] = "stop"
    # The process prints its stacks and ends if no step or evaluation finished for this many
    # seconds, or twice as many while compiling; 0: never.
    hang_after_seconds: Count = 1_800
    # For several slices: seconds that a start waits for missing slices. Then the run starts with
    # the largest number of present slices that divides its batches.
    wait_for_slices_seconds: PositiveCount = 300
    # Steps between those in which TPU chips repeat each operation to check their arithmetic; 0:
    # never. Only on TPUs. A chip that fails the check ends the run; run again on another machine.
    check_every: Count = 0
    # Steps between recompute checks, in which two devices compute the same rows and must agree to
    # the bit; 0: none. If they differ, the run names the faulty device and rolls back to a
    # checkpoint from before the difference; a device that fails again ends the run.
    replay_every: Count = 0
    # Number of batches that are prepared in advance.
    prefetch_batches: PositiveCount = 4
    # Processes that prepare batches; 0: a thread.
    data_workers: Count = 0
    # 10,20 traces steps 11 to 20 for a profiler; empty: no trace.
    profile_steps: _StepRange = ()
    # Texts for sample predictions of [MASK] at every evaluation; empty: held-out sentences.
    watch: tuple[str, ...] = ()
    # Task files to score the encoder on: with a linear layer trained on its vectors, or by choosing
    # the likelier text of minimal pairs. This is done before the first step, after the last, and at
    # evaluations as often as run.probe_share allows.
    probes: tuple[str, ...] = ()
    # Share of the run's floating-point operations that run.probes may take.
    probe_share: PositiveShare = 0.05
    # Services that receive the metrics during the run: tensorboard, trackio, wandb, mlflow, each an
    # extra to install. They write to the workdir unless the tracker's own variables name a server.
    trackers: Annotated[tuple[str, ...], subset_of(TRACKERS)] = ()
    # Folder of the prepared corpus; empty: in the workdir. Runs on the same text may share it.
    corpus_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment(Section, role="identity", label="experiment"):
    """All settings of a pre-training."""

    # Name of the run and of its folder runs/NAME.
    name: FolderName
    # Seed of every random draw in training: weights, order, pairs, masks and dropout.
    seed: Seed = 0
    # A base, as `bert-jax import` writes it, whose weights the run starts from; empty: new weights.
    init_from: str = ""
    model: Model = field(default_factory=Model)
    corpus: Corpus
    data: Data = field(default_factory=Data)
    phases: tuple[Phase, ...]
    optimizer: Optimizer = field(default_factory=Optimizer)
    parallelism: Parallelism = field(default_factory=Parallelism)
    run: Run = field(default_factory=Run)

    @property
    def ends(self) -> list[int]:
        """The total number of steps at the end of each phase."""
        return list(itertools.accumulate(phase.steps for phase in self.phases))

    @property
    def total_steps(self) -> int:
        """The steps of all phases, which the learning-rate schedule spans."""
        return self.ends[-1]

    def phase_at(self, done: int) -> tuple[int, int]:
        """Returns the index of the phase with the step after `done`, and the steps before it."""
        number = bisect.bisect_right(self.ends, done)
        return number, self.ends[number] - self.phases[number].steps

    def rows_after(self, done: int) -> list[int]:
        """Returns for each phase its first row that is not trained on after `done` steps."""
        rows = []
        for phase in self.phases:
            rows.append(phase.row_offset + min(done, phase.steps) * phase.batch_size)
            done -= min(done, phase.steps)
        return rows

    def data_of(self, phase: int) -> Data:
        """Returns the data section with a phase's own objective and share of masked tokens."""
        overrides, data = self.phases[phase], self.data
        if overrides.masked_lm_prob:
            data = replace(data, masked_lm_prob=overrides.masked_lm_prob, final_masked_lm_prob=0.0)
        return replace(data, objective=overrides.objective) if overrides.objective else data

    def corpus_of(self, phase: int) -> Corpus:
        """Returns the corpus section with a phase's own mixture and temperature."""
        overrides, corpus = self.phases[phase], self.corpus
        weights = overrides.mixture or corpus.mixture
        return replace(
            corpus, mixture=weights, temperature=overrides.temperature or corpus.temperature
        )

    def model_of(self, phase: int) -> Model:
        """Returns the model section with a phase's own rotary base and direction."""
        base = self.phases[phase].global_rotary_base or self.model.global_rotary_base
        direction = OBJECTIVES[self.data_of(phase).objective].direction
        return replace(self.model, global_rotary_base=base, direction=direction)

    def latest_model(self, done: int) -> Model:
        """Returns the model section of the last of `done` steps; if 0, of the first step."""
        return self.model_of(self.phase_at(max(done - 1, 0))[0])

    def model_for_scoring(self, done: int) -> Model:
        """Returns the model section after `done` steps for scoring by data.objective."""
        return replace(self.latest_model(done), direction=self.model.direction)

    def _problems(self) -> Iterator[Problem]:
        if not self.phases:
            yield "phases", "name at least one phase"
        yield from self._row_problems("data.eval_", self.data, self.data.eval_sequence_length)
        yield from self._objective_problems()
        yield from self._parallelism_problems()
        yield from self._schedule_problems()
        yield from self._mixture_problems()
        for number, phase in enumerate(self.phases):
            for name, why in self._phase_problems(number, phase):
                yield f"phases.{number}.{name}", why
            data = self.data_of(number)
            yield from self._row_problems(f"phases.{number}.", data, phase.sequence_length)
        longest = max(phase.sequence_length for phase in self.phases)
        windowed = self.model.kind == "modern" and self.model.global_every > 1
        # Imported weights come with their window.
        if windowed and self.model.local_window > longest and not self.init_from:
            why = f"is over the longest row of {longest}; set it lower, or model.global_every=1"
            yield "model.local_window", why

    def _row_problems(self, prefix: str, data: Data, length: int) -> Iterator[Problem]:
        """Checks the row fields of a phase or of held-out rows; the fields begin with `prefix`."""
        table = self.model.max_position_embeddings
        if length > table:
            why = f"longer than the position table, model.max_position_embeddings={table}"
            yield f"{prefix}sequence_length", why
        name, count = f"{prefix}max_predictions_per_seq", length - data.unpredicted
        if not data.is_masked and self._value_of(name) != count:
            yield name, f"objective={data.objective} predicts all tokens; set it to {count}"

    def _phase_problems(self, number: int, phase: Phase) -> Iterator[Problem]:
        yield from self._phase_objective_problems(number)
        share, length = self.data_of(number).largest_masked_share, phase.sequence_length
        # Up to the paper's share this field may cut off masks, as in google-research/bert.
        if share > _PAPER_SHARE and round(share * length) > phase.max_predictions_per_seq:
            settings = "data.masked_lm_prob and data.final_masked_lm_prob ask"
            if phase.masked_lm_prob:
                settings = f"phases.{number}.masked_lm_prob asks"
            why = f"{settings} for {share:g} of {length}"
            yield "max_predictions_per_seq", f"{why}; set it to {round(share * length)}"
        divisors = {"parallelism.accumulation": self.parallelism.accumulation_of(number)}
        if self.optimizer.clip == "per_replica":
            divisors["optimizer.reference_replicas"] = self.optimizer.reference_replicas
        for name, divisor in divisors.items():
            if phase.batch_size % divisor:
                yield "batch_size", f"not a multiple of {name}={divisor}"
        if phase.steps * phase.batch_size + phase.row_offset >= 2**32:
            yield "steps", "over 2**32 rows in one phase"

    def _objective_problems(self) -> Iterator[Problem]:
        data, model, run = self.data, self.model, self.run
        traits, setting = OBJECTIVES[data.objective], f"data.objective={data.objective}"
        if model.direction != traits.direction:
            yield "model.direction", f"{setting}: set model.direction={traits.direction}"
        objectives = {phase.objective or data.objective for phase in self.phases}
        for objective in sorted(objectives):
            why = f"objective={objective}"
            has_pairs = OBJECTIVES[objective].row_kind != "sentences"
            if has_pairs and model.type_vocab_size < 2:
                yield "model.type_vocab_size", f"{why} has pairs of two segments; set it to 2"
            if objective == "causal" and model.code:
                yield "model.code", f"{why} needs causal attention; remove the custom encoder"
        # A custom objective may draw dropout, too. Only threefry8 draws equal bits on all devices.
        has_dropout = model.hidden_dropout_prob or model.attention_probs_dropout_prob
        if run.replay_every and model.dropout_rng != "threefry8" and (has_dropout or data.code):
            why = f"model.dropout_rng={model.dropout_rng} drops different elements on each device"
            why += "; set model.dropout_rng=threefry8, or run.replay_every=0"
            yield "run.replay_every", why
        if not data.is_masked and run.watch:
            why = f"cannot be used with {setting}, which predicts no [MASK]; use --set run.watch="
            yield "run.watch", why
        if self.data.code and run.probes:
            why = "cannot be used with data.code; score the run with `bert-jax evaluate --task`"
            yield "run.probes", why

    def _phase_objective_problems(self, number: int) -> Iterator[Problem]:
        objective, data = self.phases[number].objective, self.data
        if objective in ("", data.objective):
            return
        if number == len(self.phases) - 1:
            why = f"the last phase always has data.objective={data.objective}; remove this field"
            yield "objective", why
        if data.code:
            yield "objective", "data.code is the objective of all phases; remove this field"
        if data.attention != "whole_row" and not OBJECTIVES[objective].allows_document_attention:
            yield "objective", f"needs whole rows; remove data.attention={data.attention}"

    def _mixture_problems(self) -> Iterator[Problem]:
        corpus, unused = self.corpus, dict(enumerate(self.corpus.source_labels))
        for number, phase in enumerate(self.phases):
            name = "mixture" if phase.mixture else "temperature"
            if (phase.mixture or phase.temperature) and not corpus.is_mixed:
                why = "prepare divides the text by source only for a mixture of the corpus"
                why += "; set corpus.mixture or corpus.temperature, too"
                yield f"phases.{number}.{name}", why
            weights = phase.mixture or corpus.mixture
            if problem := corpus.mixture_problem(weights, phase.temperature or corpus.temperature):
                yield f"phases.{number}.mixture", problem
            weights = weights or (1.0,) * len(corpus.sources)
            unused = {n: label for n, label in unused.items() if not weights[n]}
        for label in unused.values():
            yield "corpus.mixture", f"{label} has weight 0 in every phase; remove the source"

    def _parallelism_problems(self) -> Iterator[Problem]:
        parallelism, heads = self.parallelism, self.model.num_attention_heads
        if len(parallelism.accumulation) not in (1, len(self.phases)):
            why = f"give one number, or one for each of the {len(self.phases)} phases"
            yield "parallelism.accumulation", why
        if heads % parallelism.tensor:
            yield "parallelism.tensor", f"does not divide model.num_attention_heads={heads}"
        if self.optimizer.clip == "per_replica":
            if max(parallelism.accumulation) != 1:
                why = "optimizer.clip=per_replica divides the batch already; set it to 1"
                yield "parallelism.accumulation", why
            if parallelism.state == "zero3":
                why = "sums gradients before optimizer.clip=per_replica could clip them"
                yield "parallelism.state", f"{why}; use zero1 or replicated"

    def _schedule_problems(self) -> Iterator[Problem]:
        total, optimizer = self.total_steps, self.optimizer
        steps = {"optimizer.warmup_steps": optimizer.warmup_steps}
        if optimizer.schedule == "wsd":
            steps["optimizer.decay_steps"] = optimizer.decay_steps
        if optimizer.warmup_steps >= total or sum(steps.values()) > total:
            flags = " ".join(f"--set {name}={total // 10}" for name in steps)
            why = f"too many for the {total} steps of all phases; for a short trial use {flags}"
            yield max(steps, key=steps.__getitem__), why
