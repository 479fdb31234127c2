"""Which curves a report shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bert_jax.report.plots import Bars, Curve, Plot, draw, draw_bars
from bert_jax.report.records import Line, Record
from bert_jax.report.statistics import Histogram, Statistics


@dataclass(frozen=True)
class Figure:
    """A picture on the page: what it shows, in words and as an <svg> element."""

    title: str
    note: str
    svg: str


def of_run(record: Record) -> list[Figure]:
    """The pictures of one run."""
    newest = record.evaluation[-1] if record.evaluation else {}
    unigram = _level(newest, "unigram_loss", "unigrams")
    majority = _level(newest, "next_sentence_majority", "majority")
    clip = record.experiment.optimizer
    clipped = [] if clip.clip != "global" else [(clip.clip_norm, "clip")]
    both = _train_and_held_out
    plots = [
        (
            Plot("Masked LM loss, nat", both(record, "masked_lm_loss"), unigram),
            "Below the dashed line the model knows more than how often each piece occurs.",
        ),
        (Plot("Masked LM accuracy", both(record, "masked_lm_accuracy"), scale="percent"), ""),
        (
            Plot(
                "Next-sentence accuracy",
                both(record, "next_sentence_accuracy", "next_sentence_error"),
                majority,
                scale="percent",
            ),
            "Bars are one standard error if held-out pairs were independent; dashed, always "
            "saying the commoner label.",
        ),
        (Plot("Next-sentence loss, nat", both(record, "next_sentence_loss")), ""),
        (
            _probes(record),
            "What a linear layer reads off the encoder as it is; dashed, without it.",
        ),
        (Plot("Learning rate", [_curve(record.train, "learning_rate", "")]), ""),
        (
            Plot(
                "Gradient norm", [_curve(record.train, "gradient_norm", "")], clipped, scale="log"
            ),
            "Mean of the steps' norms before the clip.",
        ),
        (
            Plot(
                "Tokens a second",
                [
                    _curve(record.laps, "tokens_per_second", "all"),
                    _curve(record.laps, "real_tokens_per_second", "without padding", 1),
                ],
            ),
            "Over training steps and their waits for data.",
        ),
        (
            Plot("Utilisation", [_curve(record.laps, "utilisation", "")], scale="percent"),
            "Useful matrix operations, of what the devices can do; on a CPU, of a large product "
            "timed at the start.",
        ),
    ]
    return _drawn(plots, _phase_starts(record))


def of_comparison(records: Sequence[Record]) -> list[Figure]:
    """The same curves of several runs, one colour a run; held-out where there is held-out."""

    def each(lines: Callable[[Record], list[Line]], name: str, style: str = "line") -> list[Curve]:
        return [
            _curve(lines(record), name, record.label, i, style) for i, record in enumerate(records)
        ]

    def evaluation(record: Record) -> list[Line]:
        return record.evaluation

    plots = [
        (Plot("Held-out masked LM loss, nat", each(evaluation, "masked_lm_loss", "points")), ""),
        (
            Plot(
                "Held-out masked LM accuracy",
                each(evaluation, "masked_lm_accuracy", "points"),
                scale="percent",
            ),
            "",
        ),
        (
            Plot(
                "Held-out next-sentence accuracy",
                each(evaluation, "next_sentence_accuracy", "points"),
                scale="percent",
            ),
            "",
        ),
        *_probes_of_each(records),
        (Plot("Masked LM loss in training, nat", each(lambda r: r.train, "masked_lm_loss")), ""),
        (Plot("Learning rate", each(lambda r: r.train, "learning_rate")), ""),
        (Plot("Gradient norm", each(lambda r: r.train, "gradient_norm"), scale="log"), ""),
        (Plot("Tokens a second", each(lambda r: r.laps, "tokens_per_second")), ""),
        (Plot("Utilisation", each(lambda r: r.laps, "utilisation"), scale="percent"), ""),
    ]
    return _drawn(plots, [])


def of_corpus(statistics: Statistics) -> list[Figure]:
    """How long sentences and documents are."""
    return [
        _lengths(f"{what.capitalize()} length", found, f"lengths-{what}")
        for what, found in (
            ("sentence", statistics.sentence_lengths),
            ("document", statistics.document_lengths),
        )
    ]


def _lengths(title: str, found: Histogram, name: str) -> Figure:
    bars = Bars(title, found.edges, found.shares, "pieces")
    note = f"Half have at most {found.median:,.0f} pieces; the longest has {found.largest:,}."
    return Figure(title, note, draw_bars(bars, name))


def _drawn(plots: list[tuple[Plot, str]], marks: list[int]) -> list[Figure]:
    return [
        Figure(plot.title, note, draw(plot, f"plot-{number}", marks))
        for number, (plot, note) in enumerate(plots)
        if not plot.empty
    ]


def _curve(
    lines: list[Line], name: str, label: str, colour: int = 0, style: str = "line", error: str = ""
) -> Curve:
    there = [line for line in lines if name in line]
    return Curve(
        [line["step"] for line in there],
        [line[name] for line in there],
        label,
        colour,
        style,
        [line[error] for line in there] if error else (),
    )


def _train_and_held_out(record: Record, name: str, error: str = "") -> list[Curve]:
    return [
        _curve(record.train, name, "training"),
        _curve(record.evaluation, name, "held-out", 1, "points", error),
    ]


def _probes(record: Record) -> Plot:
    """The scores of all probes of a run."""
    newest = record.probes[-1] if record.probes else {"scores": {}, "majority": {}}
    curves = [
        _curve(_of_probe(record, name), "score", name, number, "points")
        for number, name in enumerate(newest["scores"])
    ]
    levels = [(value, f"{name}: commonest") for name, value in newest["majority"].items()]
    return Plot("Probes", curves, levels)


def _probes_of_each(records: Sequence[Record]) -> list[tuple[Plot, str]]:
    """A plot for each probe of any run."""
    names = dict.fromkeys(
        name for record in records for line in record.probes for name in line["scores"]
    )
    return [
        (
            Plot(
                f"Probe {name}",
                [
                    _curve(_of_probe(record, name), "score", record.label, number, "points")
                    for number, record in enumerate(records)
                ],
            ),
            "",
        )
        for name in names
    ]


def _of_probe(record: Record, name: str) -> list[Line]:
    return [
        {"step": line["step"], "score": line["scores"][name]}
        for line in record.probes
        if name in line["scores"]
    ]


def _level(line: Line, name: str, label: str) -> list[tuple[float, str]]:
    return [(line[name], label)] if name in line else []


def _phase_starts(record: Record) -> list[int]:
    """Steps at which a phase begins, but for the first, as far as the run has come."""
    starts, first = [], 0
    for phase in record.experiment.phases[:-1]:
        first += phase.steps
        if first < record.done:
            starts.append(first)
    return starts
