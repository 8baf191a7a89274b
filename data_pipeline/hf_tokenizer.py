"""A SentencePiece model as a fast tokenizer of Hugging Face: the same pieces for the same text.

The text is one word to it: spaces become U+2581 and nothing is split before merging, as in SentencePiece. BOS comes
from the post-processor. The words <s> and </s> in a text are text, as they were in training. Bytes that are no UTF-8,
which only a model can write, may be shown by more replacement characters than SentencePiece shows.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.tokenizer import PROBE, SPACE_MARK, Tokenizer

HARD_TEXTS = (
    PROBE,
    "",
    " ",
    "\n",
    "   indented\n\n\n    more\t\ttabs\r\nend   ",
    "a" * 70 + " " * 33 + "-" * 41 + "=" * 64 + "\n" * 9,
    "<s>struck</s> <unk> <0x0A> <pad> [INST] <|endoftext|>",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # 100%\n",
    f"{SPACE_MARK}marked{SPACE_MARK}{SPACE_MARK}twice",
    "naïve café cafe\u0301 ﬁne №½ \u00a0nbsp\u200bzero\ufeffbom\u2028line",
    "東京 Ελλάδα Москва עברית العربية हिन्दी ไทย 한국어",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 \U0010ffff \x00\x01\x7f",
    "https://example.org/a_b?c=1&d=%20#e 3.14159e-10 1,000,000 $5 ½",
)
BATCH_TEXTS = 256
# A log probability below that of any text: control and byte pieces are found in no text, whatever it spells.
NEVER = -1000.0


def convert_tokenizer(tokenizer: Tokenizer) -> Any:
    """The `tokenizers.Tokenizer` of a SentencePiece model. Raises ValueError for a model that is neither BPE nor
    unigram."""
    import tokenizers
    from tokenizers import decoders, normalizers, processors

    pieces, kind = _read_pieces(tokenizer)
    converted: Any = tokenizers.Tokenizer(_build_bpe(pieces) if kind == "BPE" else _build_unigram(pieces))
    converted.normalizer = normalizers.Replace(" ", SPACE_MARK)
    converted.decoder = decoders.Sequence([decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    bos = pieces[tokenizer.bos_id].piece
    converted.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, tokenizer.bos_id)]
    )
    special = [piece.piece for piece in pieces if piece.type in (piece.CONTROL, piece.UNKNOWN)]
    converted.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in special])
    own = [piece.piece for piece in pieces if piece.type == piece.USER_DEFINED]
    converted.add_tokens([tokenizers.AddedToken(text, normalized=False, special=False) for text in own])
    converted.encode_special_tokens = True
    return converted


def _read_pieces(tokenizer: Tokenizer) -> tuple[list[Any], str]:
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.model)  # pyright: ignore[reportAttributeAccessIssue]
    kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type)
    if kind not in ("BPE", "UNIGRAM"):
        raise ValueError(f"tokenizer of type {kind} must be BPE or UNIGRAM to become a Hugging Face one; train such")
    return list(proto.pieces), kind


def _build_bpe(pieces: list[Any]) -> Any:
    from tokenizers import models

    vocabulary = {piece.piece: number for number, piece in enumerate(pieces)}
    unknown = next(piece.piece for piece in pieces if piece.type == piece.UNKNOWN)
    merges = list(list_merges({piece.piece: piece.score for piece in pieces if piece.type == piece.NORMAL}))
    return models.BPE(
        vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=_has_bytes(pieces)
    )


def list_merges(scores: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that makes a third, those of the best score first: SentencePiece merges any two neighbours
    whose sum is a piece, whichever they are."""
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        for cut in range(len(piece) - 1, 0, -1):
            if piece[:cut] in scores and piece[cut:] in scores:
                yield piece[:cut], piece[cut:]


def _build_unigram(pieces: list[Any]) -> Any:
    from tokenizers import models

    unknown = next(number for number, piece in enumerate(pieces) if piece.type == piece.UNKNOWN)
    is_text = [piece.type in (piece.NORMAL, piece.USER_DEFINED) for piece in pieces]
    scores = [(piece.piece, piece.score if text else NEVER) for piece, text in zip(pieces, is_text, strict=True)]
    return models.Unigram(scores, unk_id=unknown, byte_fallback=_has_bytes(pieces))


def _has_bytes(pieces: list[Any]) -> bool:
    return any(piece.type == piece.BYTE for piece in pieces)


def write_hf_tokenizer(folder: Path, tokenizer: Tokenizer, converted: Any, *, row_tokens: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and tokenizer.model, the original, into an existing folder."""
    converted.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.model").write_bytes(tokenizer.model)
    names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    unknown = find_padding(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: converted.id_to_token(number) for name, number in names.items()},
        "unk_token": converted.id_to_token(unknown),
        "pad_token": converted.id_to_token(unknown),
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": row_tokens,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_padding(tokenizer: Tokenizer) -> int:
    """The id to pad with: that of unknown text, which byte fallback leaves no other use."""
    return int(tokenizer.processor.unk_id())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison of two tokenizers found; both gave every text back alike."""

    num_texts: int
    num_equal: int
    "Texts cut into the same pieces: all of them for BPE."


def compare_on(tokenizer: Tokenizer, converted: Any, texts: Iterable[str]) -> Comparison:
    """Compare the two on every text. Unigram cuts may differ where two are equally likely.

    Raises ValueError showing the first text that BPE cuts into other pieces, or that comes back otherwise.
    """
    is_exact = _read_pieces(tokenizer)[1] == "BPE"
    num_texts = num_equal = 0
    remaining = iter(texts)
    while batch := list(itertools.islice(remaining, BATCH_TEXTS)):
        for text, encoding in zip(batch, converted.encode_batch(batch, add_special_tokens=False), strict=True):
            expected, found = tokenizer.encode(text), list(encoding.ids)
            num_equal += found == expected
            if found != expected and is_exact:
                raise ValueError(_explain(converted, text, expected, found))
            if converted.decode(found) != tokenizer.decode(expected):
                raise ValueError(f"tokenizer.json must give {text[:40]!r} back as tokenizer.model does; report it")
        num_texts += len(batch)
    return Comparison(num_texts=num_texts, num_equal=num_equal)


def _explain(converted: Any, text: str, expected: list[int], found: list[int]) -> str:
    place = next((at for at, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), 0)
    theirs, ours = ([converted.id_to_token(piece) for piece in ids[place : place + 3]] for ids in (found, expected))
    return (
        f"tokenizer.json must give the pieces of tokenizer.model, but after {place} pieces of {text[:40]!r} come "
        f"{theirs} instead of {ours}; report it with the tokenizer.model"
    )
