"""The parameters that a few sentences are asked of."""

import dataclasses

import jax
import numpy as np
import pytest
import samples
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from bert_jax import config
from bert_jax.data import corpus
from bert_jax.pretraining import evaluators, loaded_model
from bert_jax.pretraining.prepared_corpus import PreparedCorpus


@pytest.fixture
def compiled():
    """Grows with each program that is compiled."""
    found = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    experiment, folder = samples.small_corpus(tmp_path_factory.mktemp("held_out"))
    return experiment, PreparedCorpus.open(folder), samples.mesh_of(1)


def test_seeds_of_an_experiment_share_their_held_out_rows(prepared):
    experiment, corpus_of_it, mesh = prepared

    def drawn(*settings):
        found = evaluators.HeldOutRows.of(corpus_of_it, config.override(experiment, settings), mesh)
        return [{name: array.tolist() for name, array in one.items()} for one in found.batches]

    assert drawn("seed=7") == drawn() != drawn("data.eval_seed=7")


def test_guessers_are_those_that_have_counted_alone(prepared):
    """Pieces of the training split, one added to each; labels of the held-out pairs."""
    experiment, corpus_of_it, mesh = prepared
    held_out = evaluators.HeldOutRows.of(corpus_of_it, experiment, mesh)
    train = corpus.open_stream(corpus_of_it.folder, "train")
    counts = np.bincount(train.ids, minlength=len(train.unigrams)) + 1
    nats, predicted, random = 0.0, 0.0, 0.0
    for batch in held_out.batches:
        weights = batch["masked_lm_weights"]
        nats += (weights * np.log(counts.sum() / counts[batch["masked_lm_ids"]])).sum()
        predicted += weights.sum()
        random += (batch["next_sentence_labels"] * batch["row_weights"]).sum()
    assert held_out.unigram_loss == pytest.approx(nats / predicted)
    share = random / held_out.count
    assert held_out.majority == pytest.approx(max(share, 1 - share)) and held_out.majority > 0.5


def test_cut_parameters_are_gathered_on_one_device_and_compiled_for_once(compiled):
    mesh = jax.make_mesh((4,), ("data_0",))
    trees = []
    for factor in (1, 2):
        whole = {"a": np.arange(24.0).reshape(8, 3) * factor, "b": np.arange(4.0) * factor}
        cut = jax.device_put(whole, NamedSharding(mesh, P("data_0")))
        programs = len(compiled)
        found = evaluators.gather_on_primary(cut, mesh)
        trees.append((found, len(compiled) - programs))
        for name, array in found.items():
            assert array.devices() == {mesh.devices[0]}
            np.testing.assert_array_equal(array, whole[name])
    assert [programs for _, programs in trees] == [2, 0]


def test_later_phases_go_on_with_the_share_of_masks(prepared):
    experiment, corpus_of_it, _ = prepared
    phase = dataclasses.replace(experiment.phases[0], steps=10, max_predictions_per_seq=10)
    data = dataclasses.replace(experiment.data, masked_lm_prob=0.5, final_masked_lm_prob=0.12)
    experiment = dataclasses.replace(experiment, phases=(phase, phase), data=data)
    batch = corpus_of_it.train_batches(experiment, 1).batch(0, np.arange(phase.batch_size))
    expected = np.maximum(1, np.rint(batch["input_mask"].sum(axis=1) * (0.5 - 0.02 * 10)))
    assert batch["masked_lm_weights"].sum(axis=1).tolist() == expected.tolist()


def test_the_probability_that_b_follows_a_is_that_of_label_0(prepared):
    """As in the paper's data, in which 0 is the label of a B that follows."""
    experiment, corpus_of_it, _ = prepared
    predictor = loaded_model.Predictor(experiment.model, corpus_of_it.tokenizer)
    logits = np.zeros((1, 8, experiment.model.vocab_size), np.float32)
    predictor._logits = lambda params, batch: (logits, np.log([[0.8, 0.2]]))
    assert predictor.predict({}, "wa", "wb", 1).is_next == pytest.approx(0.8)
