"""The fast tokenizer gives the pieces of the SentencePiece model for any text, and the text back."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.hf_tokenizer import (
    HARD_TEXTS,
    compare_on,
    convert_tokenizer,
    find_padding,
    list_merges,
    write_hf_tokenizer,
)
from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import SPACE_MARK, Tokenizer, iterate_sentences, train_tokenizer

TEXTS = [generate_text(seed) for seed in range(60)]
RUNS = "   aaaa  aaaaaa aaa\n\n\n--------\n  --- ======== .... "
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
crowded_text = st.text(st.sampled_from([*"ab<s/>x0A1._- \n\t", SPACE_MARK, "é", "🙂"]), max_size=60)


def train_other(model_type: str) -> Tokenizer:
    from sentencepiece import SentencePieceTrainer

    model, settings = io.BytesIO(), {"byte_fallback": True, "user_defined_symbols": ["\n"]}
    SentencePieceTrainer.train(
        sentence_iterator=iterate_sentences([*TEXTS, *["< / > 0 x 4 1 A u n k"] * 20]),
        model_writer=model,
        model_type=model_type,
        vocab_size=500,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
        hard_vocab_limit=False,
        character_coverage=1.0,
        **settings,
    )
    return Tokenizer(model.getvalue(), name="test")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Texts with runs of one character, whose pieces can be cut in several ways."""
    return Tokenizer(train_tokenizer([*TEXTS, *[RUNS] * 20], vocab_size=600), name="test")


@pytest.fixture(scope="module")
def converted(tokenizer):
    return convert_tokenizer(tokenizer)


@given(text=any_text | crowded_text | st.sampled_from(HARD_TEXTS))
def test_any_text_has_the_same_pieces_and_comes_back(tokenizer, converted, text) -> None:
    assert compare_on(tokenizer, converted, [text]).num_equal == 1
    back = converted.decode(converted.encode(text).ids, skip_special_tokens=True)
    assert back == text.replace(SPACE_MARK, " ")


def test_pieces_of_runs_that_can_be_cut_in_several_ways_are_cut_alike(tokenizer, converted) -> None:
    merges = list(list_merges({"aa": -1.0, "aaa": -2.0, "a": -3.0}))
    assert merges == [("a", "a"), ("aa", "a"), ("a", "aa")]
    texts = [character * length for character in "a -=." for length in range(1, 40)]
    assert compare_on(tokenizer, converted, [*texts, *TEXTS]).num_equal == len(texts) + len(TEXTS)


def test_bos_stands_before_a_text_and_once_before_a_pair(tokenizer, converted) -> None:
    pieces = tokenizer.encode("ba")
    assert converted.encode("ba").ids == [tokenizer.bos_id, *pieces]
    assert converted.encode("ba", "ba").ids == [tokenizer.bos_id, *pieces, *pieces]


@given(text=any_text)
def test_unigram_gives_text_back_and_cuts_what_spells_control_pieces_as_text(unigram, text) -> None:
    tokenizer, converted = unigram
    for one in (text, "<s>x</s><unk><0x41>"):
        assert not {0, 1, 2} & set(converted.encode(one, add_special_tokens=False).ids)
        assert compare_on(tokenizer, converted, [one]).num_texts == 1


@pytest.fixture(scope="module")
def unigram():
    tokenizer = train_other("unigram")
    return tokenizer, convert_tokenizer(tokenizer)


def test_unigram_texts_have_the_same_pieces_but_where_two_cuts_are_as_likely(unigram) -> None:
    texts = [line for text in TEXTS for line in text.splitlines()]
    found = compare_on(*unigram, texts)
    assert found.num_texts == len(texts) and found.num_equal >= 0.98 * len(texts)


def test_tokenizers_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="of type CHAR must be BPE or UNIGRAM"):
        convert_tokenizer(train_other("char"))


def test_the_first_text_that_is_cut_otherwise_is_shown(tokenizer) -> None:
    other = convert_tokenizer(Tokenizer(train_tokenizer(TEXTS, vocab_size=400), name="other"))
    with pytest.raises(ValueError, match=r"but after \d+ pieces of 'kaluvo ba' come \[.*\] instead of \["):
        compare_on(tokenizer, other, ["", "kaluvo ba"])


def test_folder_holds_the_original_and_pads_with_what_no_text_uses(tokenizer, converted, tmp_path: Path) -> None:
    write_hf_tokenizer(tmp_path, tokenizer, converted, row_tokens=64)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (tmp_path / "tokenizer.model").read_bytes() == tokenizer.model
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "<unk>")
    assert config["model_max_length"] == 64 and find_padding(tokenizer) == 0
