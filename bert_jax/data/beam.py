"""Tasks of `prepare` as an Apache Beam pipeline, on whatever Beam runs on (the [beam] extra).

`prepare --beam 'RUNNER OPTIONS'`: the runner and Beam's own options, e.g.

    DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
    DataflowRunner --project=P --region=R --temp_location=gs://BUCKET/tmp --sdk_container_image=I

Workers must see the sources and the place of the results: the corpus folder, or, where Beam is
given a --temp_location in a bucket, a folder there. They need bert_jax, by Beam's own means.
"""

import functools
import shlex
from collections.abc import Sequence
from typing import Any

from etils import epath

from bert_jax.data import workers
from bert_jax.errors import InputError
from bert_jax.storage import buckets
from bert_jax.storage.retry import again


def run(tasks: Sequence[workers.Task], options: str) -> list[dict[str, Any]]:
    """Runs the tasks that are not done yet; returns the record that each left."""
    left = [task for task in tasks if workers.record_of(task) is None]
    if left:
        _run_pipeline(left, options)
    records = [workers.record_of(task) for task in tasks]
    for task, record in zip(tasks, records, strict=True):
        if record is None:
            raise InputError(
                f"--beam: its workers left no {task.place}/{task.name}; they must "
                "see the place of the corpus (see --temp_location)"
            )
    return [record for record in records if record is not None]


def shared_place(options: str) -> str:
    """Returns a folder in the bucket of --temp_location, if there is one; else empty."""
    place = _parsed(options).get_all_options().get("temp_location") or ""
    return f"{place.rstrip('/')}/bert_jax" if "://" in place and buckets.is_bucket(place) else ""


def _run_pipeline(tasks: Sequence[workers.Task], options: str) -> None:
    import apache_beam as beam

    place = epath.Path(tasks[0].place)
    place.mkdir(parents=True, exist_ok=True)
    for path in place.glob("*.error"):
        path.unlink()
    try:
        pipeline = beam.Pipeline(options=_parsed(options))
    except ValueError as error:  # a runner that Beam does not know
        raise InputError(f"--beam {options!r}: {error}") from error
    with pipeline:
        _ = (
            pipeline
            | "Parts" >> beam.Create(list(tasks))
            | "Spread" >> beam.Reshuffle()
            | "Do" >> beam.Map(_do)
        )
    for path in sorted(place.glob("*.error")):
        raise InputError(path.read_text())


def _do(task: Any) -> None:  # Beam reads the types of functions, and knows no protocols
    """Does a task; what is wrong with the text is left for `run`, since no retry would mend it."""
    try:
        workers.do(task)
    except InputError as error:
        path = epath.Path(task.place) / f"{task.name}.error"
        again(functools.partial(path.write_text, str(error)), str(path))


def _parsed(options: str) -> Any:
    try:
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise InputError("--beam: needs the [beam] extra: pip install 'bert-jax[beam]'") from error
    try:
        runner, *others = shlex.split(options)
    except ValueError as error:  # no word, or a quotation mark without its other
        raise InputError(f"--beam {options!r}: name a runner and its options") from error
    return PipelineOptions([f"--runner={runner}", *others])
