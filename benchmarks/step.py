"""One training step: tokens a second, useful arithmetic a second, and share of a large matmul's.

`python -m benchmarks.step --shapes tiny,mini`. Forward, backward, clip and AdamW, dropout 0.1, on
one thread. The large product is timed in the same rounds, so that a busy machine slows both.
"""

from benchmarks import measure, ours
from bert_jax.model import flops

DTYPES = ("float32", "bfloat16")


def main() -> None:
    """Measures, shape after shape."""
    flags = measure.parser(__doc__, shapes=ours.CHOICE, rounds=5).parse_args()
    measure.restart_with(threads=1)
    figures, details = {}, {}
    for name in flags.shapes.split(","):
        shape, turns = ours.SHAPES[name], {}
        for dtype in DTYPES:
            bare = ours.Bare.of(shape, dtype)
            turns[f"{name} {dtype}"] = lambda bare=bare, turn=shape.turn: bare.take(turn)[0]
            turns[f"{dtype} matmul"] = lambda dtype=dtype: ours.matmul(dtype)
        details[name] = found = measure.in_turns(turns, flags.rounds)
        model, tokens = ours.model_of(shape, "float32"), shape.batch * shape.sequence
        useful = flops.train_step_flops(model, shape.batch, shape.sequence, shape.predictions)
        for dtype in DTYPES:
            seconds, matmul = min(found[f"{name} {dtype}"]), max(found[f"{dtype} matmul"])
            figures[f"{name}_{dtype}_tokens_per_second"] = tokens / seconds
            figures[f"{name}_{dtype}_utilisation"] = useful / seconds / matmul
        measure.report("step", figures, details, flags.out)  # the larger shapes take long


if __name__ == "__main__":
    main()
