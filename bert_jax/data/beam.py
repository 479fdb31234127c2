"""Work items of `prepare` as an Apache Beam pipeline, on any runner of Beam (the [beam] extra).

`prepare --beam 'RUNNER OPTIONS'`: the runner and Beam's own options, e.g.

    DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing
    DataflowRunner --project=P --region=R --temp_location=gs://BUCKET/tmp --sdk_container_image=I

Workers must see the sources and the folder of the results: the corpus folder, or, with a
--temp_location in a bucket, a folder in that bucket. Beam's options install bert_jax on them.
"""

import functools
import shlex
from collections.abc import Sequence
from typing import Any

from etils import epath

from bert_jax.data import work_items
from bert_jax.errors import InputError
from bert_jax.storage import buckets
from bert_jax.storage.retry import call_with_retries


def run(items: Sequence[work_items.WorkItem], options: str) -> list[dict[str, Any]]:
    """Runs the items that are not done yet; returns the records of all."""
    unfinished = [item for item in items if work_items.read_record(item) is None]
    if unfinished:
        _run_pipeline(unfinished, options)
    records = [work_items.read_record(item) for item in items]
    for item, record in zip(items, records, strict=True):
        if record is None:
            raise InputError(
                f"--beam: its workers left no {item.location}/{item.name}; give Beam a "
                "--temp_location in a bucket that all workers see"
            )
    return [record for record in records if record is not None]


def shared_folder(options: str) -> str:
    """Returns a folder in the bucket of --temp_location; "" if that names no bucket."""
    folder = _parse_options(options).get_all_options().get("temp_location") or ""
    return (
        f"{folder.rstrip('/')}/bert_jax" if "://" in folder and buckets.is_in_bucket(folder) else ""
    )


def _run_pipeline(items: Sequence[work_items.WorkItem], options: str) -> None:
    import apache_beam as beam

    folder = epath.Path(items[0].location)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.error"):
        path.unlink()
    try:
        pipeline = beam.Pipeline(options=_parse_options(options))
    except ValueError as error:  # a runner that Beam does not know
        raise InputError(f"--beam {options!r}: {error}") from error
    with pipeline:
        _ = (
            pipeline
            | "Parts" >> beam.Create(list(items))
            | "Spread" >> beam.Reshuffle()
            | "Do" >> beam.Map(_run_item)
        )
    for path in sorted(folder.glob("*.error")):
        raise InputError(path.read_text())


def _run_item(item: Any) -> None:  # Any: Beam inspects annotations and rejects protocols
    """Runs an item; writes an InputError to a file for `run`, since a retry would not help."""
    try:
        work_items.run_item(item)
    except InputError as error:
        path = epath.Path(item.location) / f"{item.name}.error"
        call_with_retries(functools.partial(path.write_text, str(error)), str(path))


def _parse_options(options: str) -> Any:
    try:
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise InputError("--beam: needs the [beam] extra: pip install 'bert-jax[beam]'") from error
    try:
        runner, *others = shlex.split(options)
    except ValueError as error:  # no words, or an unclosed quotation mark
        raise InputError(f"--beam {options!r}: name a runner and its options") from error
    return PipelineOptions([f"--runner={runner}", *others])
