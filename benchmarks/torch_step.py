"""Our training step against PyTorch's BertForPreTraining, in turns: `make bench-torch`.

Each framework runs in an environment and a process of its own, kept to one thread; they take turns,
and only one computes at a time. A step is forward, backward, clip by global norm and AdamW, with
dropout 0.1, on the same batch. A figure is the peer's CPU time over ours: above 1 we are faster.
The peer's time is that of the faster of eager and torch.compile. On a GPU it is wall time:
`--device cuda --shapes base,large --compiled base,large --batch 64 --dtypes bfloat16`, with jax and
torch for CUDA in the two environments.
"""

import argparse
import itertools
import sys
from typing import Any

from benchmarks import measure, shapes
from benchmarks.worker import Worker

DTYPES = ("float32", "bfloat16")
KINDS = ("stock", "patched")


def main() -> None:
    """Measures, shape after shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", default="tiny,mini,small,base", help="of " + ",".join(shapes.SHAPES)
    )
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the peer")
    parser.add_argument(
        "--compiled", default="tiny,mini,small", help="shapes whose compiled peer runs too"
    )
    parser.add_argument(
        "--memory",
        choices=("kept", "shipped"),
        default="kept",
        help="the peer's freed memory: kept as ours is, or as the C library is shipped",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=0, help="rows; default: the shape's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layer-loop", choices=("scan", "unroll"), default="unroll")
    parser.add_argument("--python", default=".venv-torch/bin/python", help="with torch")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    figures: dict[str, float] = {}
    details: dict[str, Any] = {"peer_memory": flags.memory, "device": flags.device}
    for shape in flags.shapes.split(","):
        details[shape] = compare(shape, flags)
        for dtype, kind in itertools.product(flags.dtypes.split(","), flags.kinds.split(",")):
            best, median = ratios(details[shape]["seconds"], dtype, kind)
            figures[f"{shape}_{dtype}_{kind}"] = best
            figures[f"{shape}_{dtype}_{kind}_median"] = median
            print(f"{shape} {dtype} against {kind}: {best:.2f} (medians {median:.2f})", flush=True)
        measure.keep("torch_step", figures, details, flags.out)  # the larger shapes take long
    measure.report("torch_step", figures, details, flags.out)


def compare(shape: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Rounds of one shape: seconds a step, first losses, versions."""
    hows = ("eager", "compiled") if shape in flags.compiled.split(",") else ("eager",)
    with (
        Worker(sys.executable, "benchmarks.ours", 1, device=flags.device) as ours,
        Worker(flags.python, "benchmarks.peer", 1, flags.memory) as peer,
    ):
        size = {"shape": shape, "sequence": flags.sequence, "batch": flags.batch}
        versions = peer.ask("build", **size, device=flags.device)
        losses, turns = {}, {}
        for dtype in flags.dtypes.split(","):
            entry = f"ours {dtype}"
            turns[entry] = ours
            losses[entry] = ours.ask(
                "build",
                entry=entry,
                dtype=dtype,
                layer_loop=flags.layer_loop,
                **size,
            )
            for kind, how in itertools.product(flags.kinds.split(","), hows):
                entry = f"{kind} {dtype} {how}"
                turns[entry] = peer
                losses[entry] = peer.ask("add", entry=entry, dtype=dtype, kind=kind, how=how)
        seconds: dict[str, list[float]] = {entry: [] for entry in turns}
        clock = 0 if flags.device == "cpu" else 1
        for number in range(flags.rounds):
            # Every other round backwards, so that no entry always follows the same one.
            for entry in list(turns)[:: 1 if number % 2 == 0 else -1]:
                seconds[entry].append(turns[entry].ask("step", entry=entry)[clock])
    for entry, rounds in seconds.items():
        found = measure.spread(rounds)
        print(
            f"{shape} {entry}: {1e3 * found['min']:.0f} ms a step "
            f"({1e3 * found['median']:.0f} median, {1e3 * found['max']:.0f} most), "
            f"first loss {losses[entry]:.3f}",
            flush=True,
        )
    return {"versions": versions, "first_loss": losses, "seconds": seconds}


def ratios(seconds: dict[str, list[float]], dtype: str, kind: str) -> tuple[float, float]:
    """The faster peer's time over ours: best over best, median over median."""
    ours = measure.spread(seconds[f"ours {dtype}"])
    peers = [
        measure.spread(rounds)
        for entry, rounds in seconds.items()
        if entry.startswith(f"{kind} {dtype} ")
    ]
    best, median = (min(peer[which] for peer in peers) for which in ("min", "median"))
    return best / ours["min"], median / ours["median"]


if __name__ == "__main__":
    main()
