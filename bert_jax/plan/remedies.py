"""What makes a step fit that does not."""

from collections.abc import Callable, Iterable, Iterator

from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.plan.compile import Job, Outcome, compile_all
from bert_jax.plan.topology import Topology
from bert_jax.plan.variants import Variant, shards_of, variant_of, vary

# From the one that keeps most to the one that keeps least.
REMATS = ("none", "dots", "full")
PARALLELISMS = ("replicated", "zero1", "zero3")
_GIB = 2**30


def look_for(
    experiment: Experiment, phase: int, topology: Topology, say: Callable[[str], None]
) -> list[str]:
    """Compiles the step with one setting changed, for each that saves memory; then with all.

    Returns:
      A line for each that fits, or one that says that none does.
    """
    now = variant_of(experiment, phase)
    rows = experiment.phases[phase].batch_size // shards_of(experiment, topology)
    alone = list(_changes(now, rows))
    found = list(_fitting(experiment, phase, topology, alone, say))
    if not found:
        most = Variant(PARALLELISMS[-1], REMATS[-1], max(rows, 1))
        found = list(_fitting(experiment, phase, topology, [most], say))
    return found or [
        "no remat, accumulation or sharding of the state makes it fit: take more chips"
    ]


def _changes(now: Variant, rows: int) -> Iterator[Variant]:
    """Variants that differ in one setting and keep less on a device."""
    for remat in REMATS[REMATS.index(now.remat) + 1 :]:
        yield now._replace(remat=remat)
    for parallelism in PARALLELISMS[PARALLELISMS.index(now.state) + 1 :]:
        yield now._replace(state=parallelism)
    parts = 2 * now.accumulation
    while parts <= rows and rows % parts == 0:
        yield now._replace(accumulation=parts)
        parts *= 2


def _fitting(
    experiment: Experiment,
    phase: int,
    topology: Topology,
    variants: Iterable[Variant],
    say: Callable[[str], None],
) -> Iterator[str]:
    now = variant_of(experiment, phase)
    for variant, outcome in compile_variants(experiment, phase, topology, variants, say):
        if outcome.kind == "compiled":
            # As --set takes it: one number would be for all phases.
            parts = vary(experiment, phase, variant).parallelism.accumulation
            said = variant._asdict() | {"accumulation": ",".join(map(str, parts))}
            changed = ", ".join(
                f"parallelism.{name}={said[name]}"
                for name, value in variant._asdict().items()
                if value != getattr(now, name)
            )
            yield f"fits with {changed}: {outcome.memory['peak'] / _GIB:.2f} GiB"


def compile_variants(
    experiment: Experiment,
    phase: int,
    topology: Topology,
    variants: Iterable[Variant],
    say: Callable[[str], None],
    seconds: float | None = None,
) -> list[tuple[Variant, Outcome]]:
    """Compiles a phase's step in several ways; those that the experiment forbids are left out.

    Raises:
      TimeoutError: not all was done in so many seconds.
    """
    jobs = {}
    for variant in variants:
        try:
            jobs[variant] = Job(vary(experiment, phase, variant), phase, topology)
        except InputError:
            continue
    outcomes = compile_all(list(jobs.values()), say, "return", seconds)
    return [
        (variant, outcome)
        for variant, outcome in zip(jobs, outcomes, strict=True)
        if outcome.kind != "refused"
    ]
