"""What a step sharded over a pod must not do, looked for in its module."""

from bert_jax.config import Experiment
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.plan import hlo

# Of the arrays that are found; a mistake makes hundreds.
_SHOWN = 4


def whole_batch_arrays(
    module: hlo.Module, experiment: Experiment, number: int, shards: int
) -> list[str] | None:
    """Arrays of one device's program that hold a position of every row of the batch.

    Such as random bits that are drawn for all rows on every device: they make a step slower the
    larger the pod is.

    Args:
      module: of one device.
      experiment: what it was compiled from.
      number: of the phase.
      shards: into which the batch is cut.

    Returns:
      Some of them, as type and dimensions; None if they cannot be told from others, because the
      batch is as large as something else, or is not cut.
    """
    phase, model = experiment.phases[number], experiment.model
    rows, length = phase.batch_size, phase.sequence_length
    heads = model.num_attention_heads
    others = {
        model.hidden_size,
        model.intermediate_size,
        model.num_hidden_layers,
        heads,
        model.hidden_size // heads,
        length,
        phase.max_predictions_per_seq,
    }
    flat = set() if rows * length == padded_vocab_size(model) else {rows * length}
    if shards == 1 or rows in others:
        return None
    wholes = {rows} | (
        {rows // experiment.parallelism.accumulation_of(number)} - others - {rows // shards}
    )
    found = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            for kind, sizes in hlo.arrays(instruction.type):
                if flat & set(sizes) or any(_spans(sizes, n, heads, length) for n in wholes):
                    found[f"{kind}[{','.join(map(str, sizes))}]"] = None
    return list(found)[:_SHOWN]


def _spans(sizes: tuple[int, ...], rows: int, heads: int, length: int) -> bool:
    """Whether dimensions are [.., rows, length, ..] or [.., rows, heads, length, ..], of three."""
    if len(sizes) < 3:
        return False
    return any(
        sizes[at] == rows and (sizes[at + 1] == length or sizes[at + 1 : at + 3] == (heads, length))
        for at in range(len(sizes) - 1)
    )
