"""A plan as lines for a terminal."""

from collections.abc import Iterator
from typing import Any

from bert_jax.errors import printable
from bert_jax.plan import scaling
from bert_jax.plan.variants import Variant

_GIB = 2**30


def lines(plan: dict[str, Any]) -> Iterator[str]:
    """All of a plan as `document.document` gives it."""
    versions = ", ".join(f"{name} {version}" for name, version in plan["versions"].items())
    yield f"{printable(plan['experiment'])}, compiled by {versions}; nothing was run on a TPU"
    for entry in plan["slices"]:
        yield ""
        yield from _slice(entry)
    yield from scaling.lines(plan.get("scaling", []))


def _slice(entry: dict[str, Any]) -> Iterator[str]:
    chips, devices = entry["chips"], entry["devices"]
    yield f"{entry['topology']}: {chips:,} chips, {devices:,} devices ({entry['device_kind']})"
    for phase in entry["phases"]:
        yield from _phase(phase, entry)
    if entry["hours"] is None:
        yield "  recipe: unknown, since not every phase compiles"
    else:
        cost = "" if entry["cost"] is None else f", cost {entry['cost']:,.0f}"
        yield f"  recipe: {entry['hours']:,.1f} hours, {entry['chip_hours']:,.0f} chip-hours{cost}"
    if "search" in entry:
        yield from _search(entry["search"])


def _search(search: dict[str, Any]) -> Iterator[str]:
    late = "; time ran out" if search["cut_short"] else ""
    yield (
        f"  search: of {search['possible']} layouts of a phase {search['excluded']} cannot fit by "
        f"arithmetic, {search['compiled']} were compiled, {search['unfit']} of which do not "
        f"fit{late}; the best:"
    )
    for found in search["ranked"]:
        settings = " ".join(f"--set {setting}" for setting in found["settings"])
        few = "" if found["whole"] else f", of {found['layers']} layers alone, whole not tried"
        yield f"    {found['hours']:8,.1f} hours, {found['peak'] / _GIB:.2f} GiB{few}: {settings}"
    if not search["ranked"]:
        yield "    none that fits was found"


def _phase(phase: dict[str, Any], entry: dict[str, Any]) -> Iterator[str]:
    yield (
        f"  phase {phase['phase']}: {phase['batch_size']} rows of {phase['sequence_length']}, "
        f"{phase['rows_per_device']:g} a device; {Variant(**phase['layout'])}"
    )
    if phase["outcome"] != "compiled":
        yield f"    {_failure(phase)}"
        for remedy in phase.get("remedies", []):
            yield f"    {remedy}"
        return
    yield f"    fits: {_memory(phase['memory'], entry)}"
    yield from _time(phase)
    yield from _collectives(phase)
    yield from _checks(phase)


def _failure(phase: dict[str, Any]) -> str:
    if phase["outcome"] != "too large":
        return f"{phase['outcome']}: {printable(phase['message'])}"
    if phase["wanted"] is None:
        return f"does not fit: {printable(phase['message'])}"
    wanted, available = phase["wanted"] / _GIB, phase["available"] / _GIB
    return (
        f"does not fit: {wanted:.2f} GiB wanted of the {available:.2f} GiB of a device, "
        f"{wanted - available:.2f} too many"
    )


def _memory(memory: dict[str, int], entry: dict[str, Any]) -> str:
    peak, per_chip = memory["peak"] / _GIB, entry["devices"] // entry["chips"]
    parts = ", ".join(
        f"{name} {memory[key] / _GIB:.2f}"
        for name, key in (
            ("state and batch", "arguments"),
            ("temporaries", "temporaries"),
            ("code", "code"),
        )
    )
    chip = f", {per_chip * peak:.2f} GiB a chip" if per_chip > 1 else ""
    return f"at most {peak:.2f} of {entry['device_memory'] / _GIB:g} GiB a device{chip}: {parts}"


def _time(phase: dict[str, Any]) -> Iterator[str]:
    seconds = phase["seconds"]
    yield (
        f"    step: {1e3 * seconds['total']:.1f} ms, {phase['hours']:,.1f} hours for "
        f"{phase['steps']:,}; utilisation {100 * phase['utilisation']:.1f} % "
        f"({phase['model_flops'] / 1e12:.2f} TFLOP at {phase['peak_flops'] / 1e12:,.0f} a second)"
    )
    kernels = phase["kernels"]
    silent = sum(kernel["flops"] is None for kernel in kernels)
    reasons = {
        "compute": f"{phase['cycles']:,} cycles at {phase['clock_hz'] / 1e9:g} GHz",
        "kernels": f"{len(kernels)} custom kernels"
        + (f", {silent} of which do not state their operations" if silent else ""),
        "random_bits": f"{phase['random_bytes'] / 1e6:,.1f} MB, at a rate that is assumed",
        "collectives": "what other work does not cover, at the published rate of the links",
        "latency": "a microsecond a hop, assumed",
    }
    for name, reason in reasons.items():
        if seconds[name] or name in ("compute", "collectives"):
            yield f"      {name.replace('_', ' '):<12}{1e3 * seconds[name]:8.2f} ms  {reason}"


def _collectives(phase: dict[str, Any]) -> Iterator[str]:
    for one in phase["collectives"]:
        yield (
            f"    {one['kind']}: {one['count']} a step, {one['bytes'] / 1e6:,.1f} MB, "
            f"{100 * one['asynchronous_share']:.0f} % of it beside other work"
        )


def _checks(phase: dict[str, Any]) -> Iterator[str]:
    checks = phase["checks"]
    whole = checks["whole_batch"]
    if whole is None:
        yield "    check: arrays of the whole batch cannot be told from others by their size"
    elif whole:
        yield f"    check: BROKEN, a device holds the whole batch: {', '.join(whole)}"
    else:
        yield "    check: no array of the whole batch on a device"
    yield f"    check: the largest all-reduce is {checks['largest_all_reduce'] / 1e6:.1f} MB"
    yield f"    check: {checks['in_loops']} collectives a step run inside loops"
    if checks["endless_loops"]:
        yield (
            f"    check: {checks['endless_loops']} loops whose rounds are not in the text, counted "
            "once: the step takes longer than this says"
        )
