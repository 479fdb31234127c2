"""Merges learned from counted words, against Hugging Face's trainer."""

import random

import pytest
import tokenizers

from bert_jax.text import merges


def huggingface_pieces(words, counts, alphabet, continuing, size):
    """The pieces of Hugging Face's trainer, which takes no counts: each word is repeated."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    specials = ["[UNK]", *alphabet, *continuing]
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size + len(specials),
        min_frequency=2,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=specials,
        show_progress=False,
    )
    texts = (" ".join([word] * count) for word, count in zip(words, counts, strict=True))
    tokenizer.train_from_iterator(texts, trainer)
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [piece for piece, _ in by_id][len(specials) :]


@pytest.mark.long
@pytest.mark.parametrize("letters", ["a", "abc", "abcdefgh"])
def test_the_same_pieces_in_the_same_order(letters):
    """With few letters, merges overlap, give the same piece in several ways, and tie."""
    for seed in range(40):
        rng = random.Random(seed)
        numbers = range(rng.choice([3, 30, 200]))
        words = sorted({"".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in numbers})
        counts = [rng.randint(1, rng.choice([2, 5, 100])) for _ in words]
        # The alphabet may lack the last letter, which is then ignored in words.
        alphabet = list(letters[: rng.choice([len(letters), max(1, len(letters) - 1)])])
        continuing = [f"##{letter}" for letter in alphabet]
        size = rng.choice([5, 50, 400])
        made = merges.learn(words, counts, alphabet, continuing, size)
        ours = list(dict.fromkeys(left + right.removeprefix("##") for left, right in made))
        assert ours == huggingface_pieces(words, counts, alphabet, continuing, size)
