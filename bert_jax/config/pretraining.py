"""The sections of a pre-training: what is computed, and where and how.

A section has one of two roles. *Identity*: `Model`, `Corpus`, `Data`, `Phase` and `Optimizer` say
what is computed; they may not change when a run is resumed. *Placement*: `Parallelism` and `Run`
say where and how; they may. Each module of the library is given its own section and sees no other.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from bert_jax.config.corpus import Corpus
from bert_jax.config.data import OBJECTIVES, Data
from bert_jax.config.fields import (
    Count,
    FieldRule,
    FolderName,
    Positive,
    PositiveCount,
    PositiveShare,
    RequiresValue,
    RowLength,
    Section,
    Seed,
    Share,
    Wrong,
    among,
    at_least,
)
from bert_jax.config.model import Model

# Words of `run.trackers`: modules, and extras of the same name.
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
# How many steps of a run may be left out.
SKIPPED_STEPS = 64
# Of a row's tokens, those that are predicted (Devlin et al. 2018, section 3.1).
_PAPERS_SHARE = 0.15
# How many are traced at most: a trace is kept in memory.
_TRACED_STEPS = 100


def _is_stretch(steps: tuple[int, ...]) -> bool:
    return len(steps) == 2 and 0 <= steps[0] < steps[1] <= steps[0] + _TRACED_STEPS


_OwnBase = Annotated[float, FieldRule(lambda base: base == 0 or base > 1, "must be over 1, or 0")]
_Parts = Annotated[
    tuple[int, ...], FieldRule(lambda x: min(x, default=0) > 0, "must be at least 1")
]
_FewSteps = Annotated[
    PositiveCount, FieldRule(lambda n: n < SKIPPED_STEPS, f"below {SKIPPED_STEPS}")
]
_OF_WSD, _OF_MUON = (
    RequiresValue("optimizer.schedule", ("wsd",)),
    RequiresValue("optimizer.name", ("muon",)),
)
_Stretch = Annotated[
    tuple[int, ...],
    FieldRule(
        lambda steps: not steps or _is_stretch(steps), f"10,20, {_TRACED_STEPS} steps at most"
    ),
]


@dataclass(frozen=True, kw_only=True)
class Phase(Section, role="identity", label="phases"):
    """A stretch of training at one sequence length, with a data plan of its own."""

    # Updates in this phase.
    steps: PositiveCount
    # Length of a row, in tokens.
    sequence_length: RowLength
    # The most masked tokens that an example may have.
    max_predictions_per_seq: PositiveCount
    # Rows a step, over all devices.
    batch_size: PositiveCount = 256
    # What this phase learns instead of data.objective, which is the last phase's, and of which
    # held-out rows are from the first step on; empty: the same.
    objective: Literal["", "mlm_nsp", "mlm_sop", "mlm", "causal"] = ""
    # In this phase, the share of an example's tokens that are to be predicted; 0: data's.
    masked_lm_prob: Share = 0.0
    # Of kind=modern: in this phase, the base of the rotary positions of layers that attend to whole
    # rows; 0: model.global_rotary_base.
    global_rotary_base: Annotated[_OwnBase, RequiresValue("model.kind", ("modern",))] = 0.0
    # Added to the row numbers of the phase. `fork` sets it, so that another batch size continues at
    # the first row that the other run did not train on.
    row_offset: int = 0

    def _wrong(self) -> Iterator[Wrong]:
        if self.max_predictions_per_seq >= self.sequence_length:
            yield "max_predictions_per_seq", f"must be below sequence_length={self.sequence_length}"


@dataclass(frozen=True, kw_only=True)
class Optimizer(Section, role="identity", label="optimizer"):
    """The update (Devlin et al. 2018, appendix A.2; You et al. 2019 for LAMB).

    `bert_adam` is the reference's Adam: no bias correction, decay added to the update.
    """

    # The rule of the update; bert_adam keeps its moments' bias (a first update 3.16 times adamw's);
    # stable_adamw lowers the rate of a tensor whose gradients outgrow what their means remember;
    # muon makes updates of layers' matrices orthogonal (Jordan et al. 2024), the rest is adamw.
    name: Literal["bert_adam", "adamw", "lamb", "stable_adamw", "muon"] = "bert_adam"
    # The highest learning rate, at the end of the warm-up.
    peak_learning_rate: Positive = 1e-4
    # Steps in which the learning rate rises.
    warmup_steps: Count = 10_000
    # paper: linear decay from step 0, replaced by a linear warm-up that leaves a jump at its end;
    # wsd: warm-up, a stable stretch at the peak, and a decay in the last decay_steps.
    schedule: Literal["paper", "linear", "cosine", "wsd"] = "paper"
    # Of schedule=wsd, the last steps, in which the rate falls to 0; 0: it never does.
    decay_steps: Annotated[Count, _OF_WSD] = 0
    # Of schedule=wsd, how it falls: as 1 - sqrt of the share of them done, or in even steps.
    decay_shape: Annotated[Literal["one_minus_sqrt", "linear"], _OF_WSD] = "one_minus_sqrt"
    # Of name=muon, the highest rate of layers' matrices, by the same schedule.
    matrix_learning_rate: Annotated[Positive, _OF_MUON] = 0.02
    # Of name=muon, the decay of the running mean of matrices' gradients.
    momentum: Annotated[Share, _OF_MUON] = 0.95
    # Adam's beta 1: decay of the running mean of gradients.
    b1: Share = 0.9
    # Adam's beta 2: decay of the running mean of squared gradients.
    b2: Share = 0.999
    # Adam's epsilon: added to the root of the mean of squared gradients.
    eps: Positive = 1e-6
    # Decay of kernels and embeddings; biases and layer norms have none.
    weight_decay: Annotated[float, at_least(0)] = 0.01
    # Which norm is limited: the whole gradient's after the mean, that of each of reference_replicas
    # groups of rows before the sum (as the reference), or none.
    clip: Literal["global", "per_replica", "none"] = "global"
    # A gradient with a larger norm is scaled down to this one.
    clip_norm: Annotated[Positive, RequiresValue("optimizer.clip", ("global", "per_replica"))] = 1.0
    # With clip=per_replica: groups of rows in a batch, each of whose gradients is clipped by
    # itself.
    reference_replicas: Annotated[
        PositiveCount, RequiresValue("optimizer.clip", ("per_replica",))
    ] = 1
    # Type in which devices add up their gradients.
    gradient_reduction: Literal["float32", "bfloat16"] = "float32"
    # Each layer learns by so much slower than the one above it, the embeddings slowest of all.
    layer_decay: PositiveShare = 1.0
    # A step whose loss or gradient is not finite changes nothing. After so many in a row the run
    # goes back to the checkpoint before them and leaves them out, or ends.
    bad_steps_in_a_row: _FewSteps = 10
    # What the run does after bad_steps_in_a_row: goes back to the checkpoint before them, or ends.
    after_bad_steps: Literal["roll_back", "stop"] = "roll_back"


@dataclass(frozen=True, kw_only=True)
class Parallelism(Section, role="placement", label="parallelism"):
    """The layout of the step over devices. May change on resume."""

    # The state whole on every device, or cut over them: zero1 gathers the parameters once a step,
    # zero3 each layer's where it is used, TPUs smaller ones of all layers before the first.
    state: Literal["replicated", "zero1", "zero3"] = "replicated"
    # Parts of the devices, each of which holds all of the state and takes its share of a batch's
    # rows; between them gradients alone travel, once a step. TPU slices that a network joins are as
    # many parts at least; of one torus, or of other devices, parts are neighbours.
    slices: PositiveCount = 1
    # Devices that share a row: heads, feed-forward and vocabulary are cut over them.
    tensor: PositiveCount = 1
    # Micro-batches a step: one number for all phases, or one a phase.
    accumulation: _Parts = (1,)
    # What is kept of each layer for the backward pass: everything (none), the results of matrix
    # products but no attention scores (dots), or nothing (full); the rest is computed again.
    remat: Literal["none", "dots", "full"] = "none"
    # Layers as one compiled loop (compiles fast), or one after the other (runs faster on a CPU).
    layer_loop: Literal["scan", "unroll"] = "scan"

    def accumulation_of(self, phase: int) -> int:
        """Returns the micro-batches of a step of this phase."""
        return self.accumulation[phase if len(self.accumulation) > 1 else 0]


@dataclass(frozen=True, kw_only=True)
class Run(Section, role="placement", label="run"):
    """Everything that happens next to the steps, every so many of them. May change on resume."""

    # Steps between lines of metrics.jsonl.
    log_every: PositiveCount = 100
    # Steps between evaluations on held-out text.
    eval_every: PositiveCount = 10_000
    # Rows scored at a time.
    eval_batch_size: PositiveCount = 256
    # Steps between checkpoints.
    checkpoint_every: PositiveCount = 1_000
    # How many of the newest checkpoints are kept.
    keep_checkpoints: Annotated[int, at_least(2)] = 3  # the newest may be damaged
    # How many checkpoints of the lowest held-out loss are kept, too.
    keep_best: Count = 1
    # Checkpoints of steps divisible by this are kept, too; 0: none.
    keep_every: Count = 0
    # A checkpoint that does not fit on the disk ends the run, or is left out and tried again; of
    # several processes it ends the run.
    when_disk_is_full: Literal["stop", "go_on"] = "stop"
    # The process prints its stacks and ends when no step was done for so many seconds; 0: never. An
    # evaluation counts as a step; what compiles may take twice as long.
    hang_after_seconds: Count = 1_800
    # Of a run on several slices: seconds that a start waits for those that are missing. Then it
    # takes the slices that are here, as many as the batches divide by.
    wait_for_slices_seconds: PositiveCount = 300
    # Steps between those that TPU chips compute several times to check their arithmetic; 0: none.
    # On TPUs only. A chip that fails its check ends the run; run it again on another machine.
    check_every: Count = 0
    # Steps between replays, in which two devices each do the same rows, and must agree to the bit;
    # 0: none. Where they differ, the run names the one that erred and goes back before the last
    # replay that was clean; a device that errs again ends the run.
    replay_every: Count = 0
    # Batches made ahead of the step that needs them.
    prefetch_batches: PositiveCount = 4
    # Processes that make batches; 0: a thread.
    data_workers: Count = 0
    # 10,20 traces the steps after the 10th up to the 20th, for a profiler; empty: no trace.
    profile_steps: _Stretch = ()
    # Texts whose [MASK] is filled in at every evaluation; empty: sentences of held-out documents.
    watch: tuple[str, ...] = ()
    # Task files to score the encoder on during the run: a linear layer is trained on its vectors,
    # or of minimal pairs the likelier text is chosen; before the first step, after the last, and at
    # evaluations as often as run.probe_share allows.
    probes: tuple[str, ...] = ()
    # Share of the run's operations that run.probes may take.
    probe_share: PositiveShare = 0.05
    # Where metrics are sent while the run goes on: tensorboard, trackio, wandb, mlflow, each an
    # extra to install; they stay in the workdir unless the tracker's own variables name a server.
    trackers: Annotated[tuple[str, ...], among(TRACKERS)] = ()
    # Where the prepared corpus lies; empty: in the workdir. Runs that share text may share it.
    corpus_dir: str = ""


@dataclass(frozen=True, kw_only=True)
class Experiment(Section, role="identity", label="experiment"):
    """One pre-training: all a run needs to know."""

    # Names the run, and its folder runs/NAME.
    name: FolderName
    # Seed of every random draw in training: weights, order, pairs, masks and dropout.
    seed: Seed = 0
    # A folder that `bert-jax import` made, whose weights the run begins with; empty: fresh ones.
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
        """Steps after which each phase ends, those of the phases before it among them."""
        return list(itertools.accumulate(phase.steps for phase in self.phases))

    @property
    def total_steps(self) -> int:
        """Steps of all phases together; the learning-rate schedule runs over their sum."""
        return self.ends[-1]

    def phase_at(self, done: int) -> tuple[int, int]:
        """Returns the number of the phase of the step after `done` steps, and its first step."""
        number = bisect.bisect_right(self.ends, done)
        return number, self.ends[number] - self.phases[number].steps

    def rows_after(self, done: int) -> list[int]:
        """Returns of each phase the first row that `done` steps have not come to."""
        rows = []
        for phase in self.phases:
            rows.append(phase.row_offset + min(done, phase.steps) * phase.batch_size)
            done -= min(done, phase.steps)
        return rows

    def data_of(self, phase: int) -> Data:
        """Returns the way to a phase's examples, with the phase's own objective and masks."""
        own, data = self.phases[phase], self.data
        if own.masked_lm_prob:
            data = replace(data, masked_lm_prob=own.masked_lm_prob, final_masked_lm_prob=0.0)
        return replace(data, objective=own.objective) if own.objective else data

    def model_of(self, phase: int) -> Model:
        """Returns the model as a phase trains it, with its own rotary base and direction."""
        base = self.phases[phase].global_rotary_base or self.model.global_rotary_base
        direction = OBJECTIVES[self.data_of(phase).objective].direction
        return replace(self.model, global_rotary_base=base, direction=direction)

    def model_after(self, done: int) -> Model:
        """Returns the model as the last of `done` steps computed it; of none: as the first will."""
        return self.model_of(self.phase_at(max(done - 1, 0))[0])

    def model_scored(self, done: int) -> Model:
        """Returns the model after `done` steps as it is scored by data.objective."""
        return replace(self.model_after(done), direction=self.model.direction)

    def _wrong(self) -> Iterator[Wrong]:
        if not self.phases:
            yield "phases", "name at least one phase"
        yield from self._wrong_rows("data.eval_", self.data, self.data.eval_sequence_length)
        yield from self._wrong_objective()
        yield from self._wrong_parallelism()
        yield from self._wrong_schedule()
        for number, phase in enumerate(self.phases):
            for name, why in self._wrong_phase(number, phase):
                yield f"phases.{number}.{name}", why
            data = self.data_of(number)
            yield from self._wrong_rows(f"phases.{number}.", data, phase.sequence_length)
        longest = max(phase.sequence_length for phase in self.phases)
        windowed = self.model.kind == "modern" and self.model.global_every > 1
        # Weights that were there before bring their window along.
        if windowed and self.model.local_window > longest and not self.init_from:
            why = f"is over the longest row, of {longest}; set it lower, or model.global_every=1"
            yield "model.local_window", why

    def _wrong_rows(self, prefix: str, data: Data, length: int) -> Iterator[Wrong]:
        """Yields what cannot be of held-out rows, or of a phase's, whose fields have a prefix."""
        table = self.model.max_position_embeddings
        if length > table:
            why = f"longer than the position table, model.max_position_embeddings={table}"
            yield f"{prefix}sequence_length", why
        most, whole = f"{prefix}max_predictions_per_seq", length - data.unpredicted
        if data.unpredicted and self._value_of(most) != whole:
            yield most, f"objective={data.objective} predicts all pieces; set it to {whole}"

    def _wrong_phase(self, number: int, phase: Phase) -> Iterator[Wrong]:
        yield from self._wrong_objective_of(number)
        share, length = self.data_of(number).largest_masked_share, phase.sequence_length
        # The paper's share is cut off by a narrow table, as in the reference.
        if share > _PAPERS_SHARE and round(share * length) > phase.max_predictions_per_seq:
            asks = "data.masked_lm_prob and data.final_masked_lm_prob ask"
            if phase.masked_lm_prob:
                asks = f"phases.{number}.masked_lm_prob asks"
            why = f"{asks} for {share:g} of {length}"
            yield "max_predictions_per_seq", f"{why}; set it to {round(share * length)}"
        parts = {"parallelism.accumulation": self.parallelism.accumulation_of(number)}
        if self.optimizer.clip == "per_replica":
            parts["optimizer.reference_replicas"] = self.optimizer.reference_replicas
        for name, divisor in parts.items():
            if phase.batch_size % divisor:
                yield "batch_size", f"not a multiple of {name}={divisor}"
        if phase.steps * phase.batch_size + phase.row_offset >= 2**32:
            yield "steps", "over 2**32 rows in one phase"

    def _wrong_objective(self) -> Iterator[Wrong]:
        data, model, run = self.data, self.model, self.run
        wanted, given = OBJECTIVES[data.objective], f"data.objective={data.objective}"
        if model.direction != wanted.direction:
            yield "model.direction", f"{given}: set model.direction={wanted.direction}"
        learned = {phase.objective or data.objective for phase in self.phases}
        for objective in sorted(learned):
            named = f"objective={objective}"
            if OBJECTIVES[objective].units != "sentences" and model.type_vocab_size < 2:
                yield "model.type_vocab_size", f"{named} has pairs, of two segments; set it to 2"
            if objective == "causal" and model.code:
                yield "model.code", f"attends as it likes, which {named} cannot use"
        draws = model.hidden_dropout_prob or model.attention_probs_dropout_prob
        if run.replay_every and model.dropout_rng != "threefry8" and (draws or data.code):
            why = f"model.dropout_rng={model.dropout_rng} gives a row another noise on each device"
            yield "run.replay_every", f"{why}; set it to threefry8, or run.replay_every=0"
        if wanted.unpredicted and run.watch:
            yield "run.watch", f"{given} fills no [MASK]; remove it, --set run.watch="
        if self.data.code and run.probes:
            why = "know no objective of data.code; ask later with `bert-jax evaluate --task`"
            yield "run.probes", why

    def _wrong_objective_of(self, number: int) -> Iterator[Wrong]:
        own, data = self.phases[number].objective, self.data
        if own in ("", data.objective):
            return
        if number == len(self.phases) - 1:
            yield "objective", f"data.objective={data.objective} is the last phase's; remove it"
        if data.code:
            yield "objective", "data.code says what is learned; remove it"
        if data.attention != "whole_row" and not OBJECTIVES[own].cuts:
            yield "objective", f"its rows are read whole; remove data.attention={data.attention}"

    def _wrong_parallelism(self) -> Iterator[Wrong]:
        given, heads = self.parallelism, self.model.num_attention_heads
        if len(given.accumulation) not in (1, len(self.phases)):
            why = f"give one number, or one for each of the {len(self.phases)} phases"
            yield "parallelism.accumulation", why
        if heads % given.tensor:
            yield "parallelism.tensor", f"does not divide model.num_attention_heads={heads}"
        if self.optimizer.clip == "per_replica":
            if max(given.accumulation) != 1:
                why = "optimizer.clip=per_replica takes the batch in parts already; set it to 1"
                yield "parallelism.accumulation", why
            if given.state == "zero3":
                why = "sums gradients, so that optimizer.clip=per_replica has none to clip"
                yield "parallelism.state", why

    def _wrong_schedule(self) -> Iterator[Wrong]:
        total, update = self.total_steps, self.optimizer
        steps = {"optimizer.warmup_steps": update.warmup_steps}
        if update.schedule == "wsd":
            steps["optimizer.decay_steps"] = update.decay_steps
        if update.warmup_steps >= total or sum(steps.values()) > total:
            short = " ".join(f"--set {name}={total // 10}" for name in steps)
            why = f"too many for the {total} steps of all phases; for a short trial {short}"
            yield max(steps, key=steps.__getitem__), why
