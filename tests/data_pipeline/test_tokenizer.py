"""Trained tokenizers give back exactly the text they were given, and know the bytes each piece stands for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import SPACE_MARK, Tokenizer, compute_token_bytes, load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [generate_text(seed) for seed in range(60)]
    return Tokenizer(train_tokenizer(texts, vocab_size=500), name="test")


any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=[SPACE_MARK]), max_size=80)


@given(
    text=any_text | st.sampled_from(["  two  spaces ", "\n\n\t a\r\n", "<s></s><unk><0x41>", "\x00", "naïve 東京 🙂"])
)
def test_decoding_the_encoded_text_gives_it_back(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=any_text)
def test_pieces_stand_for_as_many_bytes_as_the_text_has_and_never_for_control(tokenizer, text) -> None:
    pieces = tokenizer.encode(text)
    assert compute_token_bytes(tokenizer)[pieces].sum() == len(text.encode())
    assert not {0, tokenizer.bos_id, tokenizer.eos_id} & set(pieces)


def test_control_pieces_stand_for_no_text(tokenizer) -> None:
    token_bytes = compute_token_bytes(tokenizer)
    assert len(token_bytes) == tokenizer.vocab_size == 500
    assert token_bytes[tokenizer.bos_id] == token_bytes[tokenizer.eos_id] == 0
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode("ba"), tokenizer.eos_id]) == "ba"


def test_training_twice_gives_the_same_model(tokenizer) -> None:
    assert train_tokenizer([generate_text(seed) for seed in range(60)], vocab_size=500) == tokenizer.model


def test_a_vocabulary_beyond_the_text_names_the_largest_possible() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=5000 must be reachable from the text; use \d+ or less"):
        train_tokenizer(["only a few words"], vocab_size=5000)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="absent cannot be read"):
        load_tokenizer(tmp_path / "absent")


def test_vocabulary_below_the_texts_characters_is_told_the_smallest_that_suffices() -> None:
    texts = ["".join(chr(0x4E00 + number) for number in range(300))] * 50
    with pytest.raises(
        ValueError, match=r"vocab_size=300 must hold every character of the text; use (\d+) or more"
    ) as caught:
        train_tokenizer(texts, vocab_size=300)
    smallest = int(str(caught.value).split("use ")[1].split()[0])
    assert Tokenizer(train_tokenizer(texts, vocab_size=smallest), name="smallest").vocab_size == smallest
