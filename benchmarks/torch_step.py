"""Our training step against PyTorch's BertForPreTraining, in turns: `make bench-torch`.

Each framework runs in an environment and a process of its own, kept to one thread; they take turns,
and only one computes at a time. A step is forward, backward, clip by global norm and AdamW, with
dropout 0.1, on the same batch. A figure is the peer's CPU time over ours: above 1 we are faster.
The peer's time is that of the faster of eager and torch.compile. On a GPU it is wall time:
`--device cuda --shapes base,large --compiled base,large --batch 64 --dtypes bfloat16`, with jax and
torch for CUDA in the two environments.
"""

import dataclasses
import itertools
from typing import Any

from benchmarks import measure, ours

KINDS = ("stock", "patched")


def main() -> None:
    """Measures, shape after shape."""
    flags = measure.parser(
        __doc__,
        shapes=ours.CHOICE,
        dtypes="float32,bfloat16",
        compiled=("tiny,mini,small", "shapes whose compiled peer runs too"),
        rounds=5,
        batch=(0, "rows; default: the shape's"),
        device=("cpu", "or cuda"),
        python=measure.TORCH,
    ).parse_args()
    measure.restart_with(threads=1, device=flags.device)
    figures, details = {}, {"device": flags.device}
    for name in flags.shapes.split(","):
        with measure.peer(flags.python, "step", threads=1) as peer:
            details[name] = compare(name, peer, flags)
        for dtype, kind in itertools.product(flags.dtypes.split(","), KINDS):
            best, median = ratios(details[name]["seconds"], dtype, kind)
            figures |= {f"{name}_{dtype}_{kind}": best, f"{name}_{dtype}_{kind}_median": median}
        measure.report("torch_step", figures, details, flags.out)  # the larger shapes take long


def compare(name: str, peer: measure.Ask, flags: Any) -> dict[str, Any]:
    """Rounds of one shape: seconds a step, first losses, versions."""
    hows = ("eager", "compiled") if name in flags.compiled.split(",") else ("eager",)
    shape, clock = ours.SHAPES[name], int(flags.device != "cpu")
    shape = dataclasses.replace(shape, batch=flags.batch or shape.batch)
    batch = {name: values.tolist() for name, values in ours.make_batch(shape).items()}
    build = {"fields": shape.fields, "batch": batch, "turn": shape.turn, "device": flags.device}
    versions = peer("build", **build)
    losses, turns = {}, {}
    for dtype in flags.dtypes.split(","):
        bare = ours.Bare.of(shape, dtype)
        losses[f"ours {dtype}"] = bare.first_loss
        turns[f"ours {dtype}"] = lambda bare=bare: bare.take(shape.turn)[clock]
        for kind, how in itertools.product(KINDS, hows):
            entry = f"{kind} {dtype} {how}"
            losses[entry] = peer("add", entry=entry, dtype=dtype, kind=kind, how=how)
            turns[entry] = lambda entry=entry: peer("step", entry=entry)[clock]
    print(f"{name}, first losses: {losses}", flush=True)
    seconds = measure.in_turns(turns, flags.rounds)
    return {"versions": versions, "first_loss": losses, "seconds": seconds}


def ratios(seconds: dict[str, list[float]], dtype: str, kind: str) -> tuple[float, float]:
    """The faster peer's time over ours: best over best, median over median."""
    peers = [found for entry, found in seconds.items() if entry.startswith(f"{kind} {dtype} ")]
    return measure.times_faster(seconds[f"ours {dtype}"], *peers)


if __name__ == "__main__":
    main()
