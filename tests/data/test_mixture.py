"""Sources mixed by weight: shares, seeking, several hosts, and what users get wrong."""

import contextlib
import dataclasses
import itertools
import pickle
import types
from fractions import Fraction

import numpy as np
import pytest
import test_batches as alone
from compare import assert_identical
from etils import epath
from test_corpus import SIZE, quiet, write_texts, write_vocab
from test_epoch_plans import write_stream

from bert_jax import config
from bert_jax.config import Corpus, Data
from bert_jax.data import batches, corpus, draws, mixture, plans, stream
from bert_jax.errors import InputError
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.tools.report.run_record import corpus_statistics

WEIGHTS = (6.0, 3.0, 1.0)
NAMES = (5, "train", 0)
SIZE_OF_BATCH = 16


def three(documents=(20, 30, 4)):
    """A stream of three sources, and the documents that each ends with."""
    rng = np.random.default_rng(0)
    text = [
        [rng.integers(low, low + 30, rng.integers(1, 25)).tolist() for _ in range(7)]
        for low, count in zip((5, 36, 67), documents, strict=True)
        for _ in range(count)
    ]
    return stream.make_stream(text), np.cumsum([0, *documents]).tolist()


def make(data=None, weights=WEIGHTS):
    data, (whole, ends) = data or Data(), three()
    shape = batches.BatchShape(alone.LENGTH, alone.PREDICTIONS, SIZE_OF_BATCH)
    sources = []
    for number in range(3):
        part = whole.part(ends[number], ends[number + 1])
        names = (*NAMES, "source", number)
        source = plans.Plans(
            part, plans.PlanSpec(names, alone.LENGTH, data.short_seq_prob, data.row_kind)
        )
        sources.append(batches.TrainBatches(source, alone.IDS, data, shape))
    return mixture.MixedBatches(sources, mixture.SourceOrder(weights, NAMES))


def source_of(batch):
    """The source of each row, by the pieces that are in its text and were not masked."""
    ids = np.where(batch["input_ids"] < 5, 0, batch["input_ids"])
    votes = [((ids >= low) & (ids < low + 30)).sum(axis=1) for low in (5, 36, 67)]
    return np.argmax(votes, axis=0)


@pytest.mark.parametrize("data", [Data(), Data(objective="mlm")])
def test_sources_have_their_shares_within_a_draws_error(data):
    train, steps = make(data), 60
    found = np.concatenate([source_of(alone.whole(train, s, SIZE_OF_BATCH)) for s in range(steps)])
    rows, share = len(found), np.array(WEIGHTS) / 10
    counts = np.bincount(found, minlength=3)
    assert (abs(counts - rows * share) < 4 * np.sqrt(rows * share * (1 - share))).all()
    # And no pattern: neighbours are of one source as often as independent draws are.
    same = (found[1:] == found[:-1]).mean()
    assert abs(same - (share**2).sum()) < 4 * np.sqrt(0.25 / rows)


def test_of_a_block_of_rows_shares_are_exact_and_numbers_follow_each_other():
    order = mixture.SourceOrder(WEIGHTS, NAMES)
    sources, numbers = order.locate(np.arange(3 * mixture.BLOCK_ROWS))
    for source, share in enumerate(np.array(WEIGHTS) / 10):
        assert abs(order.counts[source] - share * mixture.BLOCK_ROWS) < 1
        assert numbers[sources == source].tolist() == list(range(3 * order.counts[source]))
    other, _ = mixture.SourceOrder(WEIGHTS, (6, "train", 0)).locate(np.arange(mixture.BLOCK_ROWS))
    assert (other != sources[: mixture.BLOCK_ROWS]).any()


def test_a_row_is_that_of_its_source_by_itself():
    train = make()
    whole, ends = three()
    part = whole.part(ends[1], ends[2])
    source = plans.Plans(
        part, plans.PlanSpec((*NAMES, "source", 1), alone.LENGTH, Data().short_seq_prob)
    )
    shape = batches.BatchShape(alone.LENGTH, alone.PREDICTIONS, 1)
    single = batches.TrainBatches(source, alone.IDS, Data(), shape)
    batch = alone.whole(train, 7, SIZE_OF_BATCH)
    of, numbers = train.order.locate(batch["rows"].astype(np.int64))
    assert (of == 1).any()
    assert batch["rows"].tolist() == list(range(7 * SIZE_OF_BATCH, 8 * SIZE_OF_BATCH))
    for row in np.flatnonzero(of == 1):
        expected = single.batch(int(numbers[row]), np.arange(1))
        for name in batch.keys() - {"rows"}:
            np.testing.assert_array_equal(batch[name][row], expected[name][0], err_msg=name)


def test_seeking_equals_walking_and_hosts_equal_one():
    walked = make()
    steps = [alone.whole(walked, step, SIZE_OF_BATCH) for step in range(300)]
    assert steps[-1]["rows"][-1] > mixture.BLOCK_ROWS  # in the second block
    for step in (299, 0, 257, 100):
        sought = pickle.loads(pickle.dumps(make()))
        assert_identical(alone.whole(sought, step, SIZE_OF_BATCH), steps[step])
        for host in range(4):
            rows = np.arange(host, SIZE_OF_BATCH, 4)[::-1]
            assert_identical(sought.batch(step, rows), alone.take(steps[step], rows))


def test_a_part_is_planned_as_the_same_documents_by_themselves():
    whole, ends = three()
    part = whole.part(ends[1], ends[2])
    first = int(part.sentence_offsets[0])
    own = dataclasses.replace(
        part,
        ids=whole.ids[first : first + part.tokens],
        sentence_offsets=part.sentence_offsets - np.uint64(first),
    )
    for units in ("pairs", "swapped_pairs", "sentences"):
        for epoch in range(2):
            made = [
                plans.Plans(one, plans.PlanSpec(NAMES, alone.LENGTH, 0.1, units)).wait(epoch)
                for one in (part, own)
            ]
            np.testing.assert_array_equal(*made)
    assert draws.key_of(*NAMES) != draws.key_of(*NAMES, "source", 1)


@pytest.mark.long
def test_large_sources_are_planned_as_small_ones(tmp_path, monkeypatch):
    """Each by a process of its own, even if there are more sources than a host keeps plans of."""
    count = plans._PLANS_KEPT + 1
    whole = write_stream(tmp_path / "train", 10 * count)

    def of_parts():
        sources = []
        for number in range(count):
            part = whole.part(10 * number, 10 * (number + 1))
            names = (*NAMES, "source", number)
            source = plans.Plans(part, plans.PlanSpec(names, alone.LENGTH, 0.1), "a")
            shape = batches.BatchShape(alone.LENGTH, alone.PREDICTIONS, SIZE_OF_BATCH)
            sources.append(batches.TrainBatches(source, alone.IDS, Data(), shape))
        order = mixture.SourceOrder([*range(1, count + 1)], NAMES)
        return mixture.MixedBatches(sources, order)

    steps = (0, 31, 3)
    small = of_parts()
    expected = [alone.whole(small, step, SIZE_OF_BATCH) for step in steps]
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plans, "_IN_MEMORY", 0)
    large = of_parts()
    try:
        for step, batch in zip(steps, expected, strict=True):
            assert_identical(alone.whole(large, step, SIZE_OF_BATCH), batch)
    finally:
        large.close()
    assert list((tmp_path / "cache" / "plans").glob("*.plan"))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A prepared corpus of two sources, and an experiment on it."""
    root = tmp_path_factory.mktemp("mixed")
    names = [write_texts(root / name, count) for name, count in (("a", 30), ("b", 12))]
    (names[1] / "000.txt").write_text((names[1] / "000.txt").read_text() * 3)
    settings = Corpus(
        sources=tuple(f"text:{name}" for name in names),
        mixture=(3.0, 1.0),
        layout="sentences_by_line",
        tokenizer=str(write_vocab(root / "vocab.txt")),
        validation_share=0.2,
    )
    folder = epath.Path(root / "corpus")
    return settings, folder, corpus.prepare(settings, SIZE, folder, quiet)


def test_a_corpus_knows_which_documents_are_of_which_source(mixed):
    settings, folder, manifest = mixed
    of_a, of_b = manifest["documents_of_sources"]
    assert of_a + of_b == manifest["splits"]["train"]["documents"]
    opened = corpus.open_stream(folder, "train")
    plain = dataclasses.replace(settings, sources=settings.sources[:1], mixture=())
    alone_ = folder.parent / "alone"
    corpus.prepare(plain, SIZE, alone_, quiet)
    same = [corpus.open_stream(alone_, split) for split in ("train", "validation")]
    known = {one.ids.tobytes() for each in same for one in documents_of(each)}
    parts = opened.part(0, of_a), opened.part(of_a, of_a + of_b)
    assert all(one.ids.tobytes() in known for one in documents_of(parts[0]))
    assert parts[0].tokens + parts[1].tokens == len(opened.ids)
    again = pickle.loads(pickle.dumps(parts[1]))
    np.testing.assert_array_equal(again.sentence_offsets, parts[1].sentence_offsets)
    np.testing.assert_array_equal(again.document_offsets, parts[1].document_offsets)


def documents_of(part):
    bounds = part.sentence_offsets[part.document_offsets.astype(np.int64)].tolist()
    for first, last in itertools.pairwise(bounds):
        yield dataclasses.replace(part, ids=np.asarray(part.ids[first:last]))


def test_weights_may_change_without_preparing_again(mixed):
    settings, folder, manifest = mixed
    for weights, temperature in (((1.0, 1.0), 0.0), ((), 0.0), ((), 0.5)):
        changed = dataclasses.replace(settings, mixture=weights, temperature=temperature)
        assert corpus.prepare(changed, SIZE, folder, quiet) == manifest


def test_a_corpus_that_is_not_divided_by_source_is_refused(mixed, tmp_path):
    settings, _, _ = mixed
    folder = epath.Path(tmp_path / "corpus")
    corpus.prepare(dataclasses.replace(settings, mixture=()), SIZE, folder, quiet)
    with pytest.raises(InputError, match=r"prepared with temperature=0\.0, now 0\.5"):
        changed = dataclasses.replace(settings, mixture=(), temperature=0.5)
        corpus.prepare(changed, SIZE, folder, quiet)


def experiment_of(settings, **phase):
    tiny = config.load("experiments/tiny.py")
    phases = tuple(dataclasses.replace(p, **phase) for p in tiny.phases)
    model = dataclasses.replace(tiny.model, max_position_embeddings=4096)
    return dataclasses.replace(tiny, model=model, corpus=settings, phases=phases)


def test_a_run_is_given_the_mixture_and_too_small_a_source_is_named(mixed):
    settings, folder, _ = mixed
    prepared = PreparedCorpus.open(folder)
    experiment = experiment_of(settings)
    train = prepared.train_batches(experiment, 0)
    batch = train.batch(3, np.arange(4))
    assert isinstance(train, mixture.MixedBatches)
    assert batch["input_ids"].shape == (4, experiment.phases[0].sequence_length)
    train.close()
    long = experiment_of(settings, sequence_length=4096, max_predictions_per_seq=1229)
    with pytest.raises(InputError, match=r"corpus\.mixture: text:.*/[ab] has \d+ tokens"):
        corpus.require_enough_text(folder, long)


def test_sources_of_equal_size_have_draws_of_their_own(mixed, monkeypatch):
    """Even of the same documents: else the rows of one would be cut and masked as the other's."""
    settings, folder, _ = mixed
    monkeypatch.setattr(mixture, "split_sources", lambda manifest, train: [train, train])
    train = PreparedCorpus.open(folder).train_batches(experiment_of(settings), 0)
    rows = np.arange(64)
    sources, numbers = train.order.locate(rows)
    batch = train.batch(0, rows)
    train.close()
    one, other = (dict(zip(numbers[sources == n], rows[sources == n], strict=True)) for n in (0, 1))
    both = [(one[number], other[number]) for number in one.keys() & other.keys()]
    assert len(both) > 8
    assert not any(np.array_equal(*batch["input_ids"][[*pair]]) for pair in both)


def test_the_report_has_each_source_with_its_share(mixed):
    settings, folder, manifest = mixed
    experiment, prepared = experiment_of(settings), PreparedCorpus.open(folder)
    mixture = corpus_statistics(experiment, prepared)["mixture"]
    one, other = (types.SimpleNamespace(**source) for source in mixture)
    assert (one.name, other.name) == settings.sources
    assert [one.documents, other.documents] == manifest["documents_of_sources"]
    assert one.tokens + other.tokens == manifest["splits"]["train"]["tokens"]
    assert (one.share_of_rows, other.share_of_rows) == pytest.approx((0.75, 0.25), rel=1e-12)
    # Positions that one source fills, whichever way they are reckoned.
    assert one.epochs * one.tokens == pytest.approx(3 * other.epochs * other.tokens)
    phase = experiment.phases[0]
    positions = phase.steps * phase.batch_size * phase.sequence_length
    assert 0.5 < (one.epochs * one.tokens + other.epochs * other.tokens) / positions <= 1
    plain = dataclasses.replace(experiment, corpus=dataclasses.replace(settings, mixture=()))
    assert corpus_statistics(plain, prepared)["mixture"] == []


def test_too_few_documents_of_a_source_are_refused(mixed, tmp_path):
    settings, _, _ = mixed
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("abc def.\nghi abc.\n")
    sources = (*settings.sources, f"text:{tmp_path / 'one'}")
    changed = dataclasses.replace(settings, sources=sources, mixture=(1.0, 1.0, 1.0))
    with pytest.raises(InputError, match=r"corpus\.mixture: text:.*/one has [01] documents? to"):
        corpus.prepare(changed, SIZE, epath.Path(tmp_path / "corpus"), quiet)


def test_a_source_that_gives_no_row_of_a_later_phase_is_refused_at_once(mixed):
    settings, folder, manifest = mixed
    experiment = dataclasses.replace(config.load("bert_base"), corpus=settings)
    train = corpus.open_stream(folder, "train")
    fits, small = mixture.split_sources(manifest, train)[1].tokens, "text:.*b has .* tokens"
    lengths = ["model.max_position_embeddings=9999", "phases.0.sequence_length=128"]
    for length, refused in ((fits, False), (fits + 1, True)):
        phases = config.override(experiment, [*lengths, f"phases.1.sequence_length={length}"])
        with pytest.raises(InputError, match=small) if refused else contextlib.nullcontext():
            corpus.require_enough_text(folder, phases)
    single = stream.make_stream([[[5, 6, 7]], [[8, 9]]])
    with pytest.raises(InputError, match=r"mlm_sop: no document of text:b has two sentences"):
        mixture.require_row("text:b", single, 2, "swapped_pairs")


def test_rows_left_over_go_to_the_largest_remainders():
    """By the method of Hamilton, in exact fractions."""
    weights = (1, 3, 5, 8)
    exact = [Fraction(weight, sum(weights)) * mixture.BLOCK_ROWS for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])
    for source in by_remainder[: mixture.BLOCK_ROWS - sum(counts)]:
        counts[source] += 1
    assert 0 < mixture.BLOCK_ROWS - sum(map(int, exact)) < len(weights)
    assert list(mixture.SourceOrder(weights, NAMES).counts) == counts


# By phase: its settings, and the exponent and weights that they mean.
PHASES = (
    ({}, 0.7, (3.0, 1.0)),
    ({"mixture": (1.0, 0.0)}, 0.7, (1.0, 0.0)),
    ({"temperature": 0.3}, 0.3, (3.0, 1.0)),
    ({"mixture": (2.0, 2.0), "temperature": 1.0}, 1.0, (1.0, 1.0)),
)


def phased(settings, phases=PHASES, **corpus_settings):
    experiment = experiment_of(dataclasses.replace(settings, temperature=0.7, **corpus_settings))
    phase = experiment.phases[0]
    own = tuple(dataclasses.replace(phase, **given) for given, *_ in phases)
    return dataclasses.replace(experiment, phases=own)


def test_each_phase_draws_by_its_own_weights_and_temperature(mixed):
    """Shares by NumPy: weight times tokens to the power of the temperature."""
    settings, folder, manifest = mixed
    prepared, experiment = PreparedCorpus.open(folder), phased(settings)
    tokens, start = [], 0
    for count in manifest["documents_of_sources"]:
        part = corpus.open_stream(folder, "train").part(start, start + count)
        tokens.append(sum(len(document.ids) for document in documents_of(part)))
        start += count
    lines = prepared.describe_shares(experiment)
    for number, (_, temperature, weights) in enumerate(PHASES):
        expected = np.array(weights) * np.array(tokens, np.float64) ** temperature
        expected /= expected.sum()
        train = prepared.train_batches(experiment, number)
        sources, _ = train.order.locate(np.arange(2 * mixture.BLOCK_ROWS))
        drawn = np.bincount(sources, minlength=2) / len(sources)
        np.testing.assert_allclose(drawn, expected, rtol=0, atol=1 / mixture.BLOCK_ROWS)
        train.batch(0, np.arange(8))
        train.close()
        shown = [line.removesuffix(" of rows").split(": ")[-1].split(", then ") for line in lines]
        assert [each[number] for each in shown] == [f"{share:.2%}" for share in expected]


def test_a_phase_with_the_weights_of_the_corpus_has_the_same_batches(mixed):
    settings, folder, _ = mixed
    prepared, plain = PreparedCorpus.open(folder), experiment_of(settings)
    own = experiment_of(dataclasses.replace(settings, mixture=(1.0, 1.0)), mixture=(6.0, 2.0))
    one, other = (prepared.train_batches(e, 0) for e in (plain, own))
    for step in (0, 5):
        assert_identical(one.batch(step, np.arange(8)), other.batch(step, np.arange(8)))
    for train in (one, other):
        train.close()


def test_a_source_is_examined_only_for_phases_that_use_it(mixed):
    """And a share that is too small for a block of rows is named, with its phase."""
    settings, folder, manifest = mixed
    train = corpus.open_stream(folder, "train")
    sizes = [part.tokens for part in mixture.split_sources(manifest, train)]
    unused = [0.0 if size == min(sizes) else 1.0 for size in sizes]
    longest = min(sizes) + 1
    long = {"sequence_length": longest, "max_predictions_per_seq": round(0.3 * longest)}
    both = phased(settings, (({}, 0, 0), (long, 0, 0)))
    with pytest.raises(InputError, match=f"has {min(sizes)} tokens"):
        corpus.require_enough_text(folder, both)
    long["mixture"] = tuple(unused)
    corpus.require_enough_text(folder, phased(settings, (({}, 0, 0), (long, 0, 0))))
    rare = phased(settings, (({}, 0, 0), ({"mixture": (1.0, 1e-9)}, 0, 0)))
    with pytest.raises(InputError, match=r"phases\.1: with temperature 0\.7, text:.*/b has less"):
        corpus.require_enough_text(folder, rare)
