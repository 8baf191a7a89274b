"""SentencePiece tokenizers: load, train, and how many bytes of text each piece stands for.

Trained models are BPE with byte fallback and identity normalisation, without a dummy prefix and with spaces kept as
they are, so that decode(encode(text)) == text. One character is the exception: U+2581, SentencePiece's own mark for a
space, is read as one.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError

SPACE_MARK = "\u2581"
PROBE = "  Two  spaces,\ta tab \n\n a ﬁne naïve cafe\u0301 № ½ \uff21 東京 \u0000 🙂 "
MAX_SENTENCE_BYTES = 4000


class Tokenizer:
    """A SentencePiece model. Attributes: vocab_size, bos_id, eos_id, sha256 (of the model file)."""

    def __init__(self, model: bytes, *, name: str) -> None:
        """Raises DataError naming `name` when the bytes are no SentencePiece model or lack BOS or EOS."""
        from sentencepiece import SentencePieceProcessor

        try:
            self.processor: Any = SentencePieceProcessor(model_proto=model)
            self.vocab_size = int(self.processor.vocab_size())
        except RuntimeError as error:
            raise DataError(f"{name} is not a SentencePiece model; give the .model file of one") from error
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.bos_id = int(self.processor.bos_id())
        self.eos_id = int(self.processor.eos_id())
        if self.bos_id < 0 or self.eos_id < 0:
            raise DataError(f"{name} has no BOS or no EOS piece; train it with --bos_id and --eos_id of 0 or more")

    def encode(self, text: str) -> list[int]:
        """Return the pieces of `text`, without BOS and EOS."""
        return self.processor.encode(text, out_type=int)

    def explain_difference(self, text: str) -> str | None:
        """Say how the pieces of `text` differ from it, or None where they stand for it byte by byte."""
        text = text.replace(SPACE_MARK, " ")
        pieces = self.encode(text)
        decoded = self.decode(pieces)
        if decoded != text:
            place = next((at for at, (a, b) in enumerate(zip(text, decoded, strict=False)) if a != b), len(decoded))
            return f"{text[place : place + 12]!r} comes back as {decoded[place : place + 12]!r}"
        piece_bytes, text_bytes = int(self.token_bytes_V[pieces].sum()), len(text.encode())
        if piece_bytes != text_bytes:
            return f"the pieces of {text[:12]!r}... stand for {piece_bytes} bytes instead of {text_bytes}"
        return None

    @cached_property
    def token_bytes_V(self) -> NDArray[np.int64]:
        """compute_token_bytes of this tokenizer, computed once."""
        return compute_token_bytes(self)

    def decode(self, pieces: list[int]) -> str:
        """Return the text of `pieces`; control pieces (BOS, EOS) stand for nothing."""
        return self.processor.decode(pieces)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a SentencePiece model file, or the tokenizer.model of a prepared folder."""
    file = Path(path)
    file = file / "tokenizer.model" if file.is_dir() else file
    try:
        model = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); give a SentencePiece .model file") from error
    return Tokenizer(model, name=str(file))


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """Train a BPE model on `texts` and return its bytes.

    Raises ValueError when the texts are too few for `vocab_size` pieces, and any DataError that reading them raises.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    failures: list[DataError] = []
    try:
        SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=note_failure(iterate_sentences(texts), failures),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            character_coverage=0.99995,
            user_defined_symbols=["\n"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            max_sentence_length=2 * MAX_SENTENCE_BYTES,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        if failures:
            raise failures[0] from error
        raise ValueError(describe_training_error(str(error), vocab_size)) from error
    return model.getvalue()


def note_failure(sentences: Iterator[str], failures: list[DataError]) -> Iterator[str]:
    """Pass sentences on; keep a DataError, of which the trainer would leave only a text."""
    try:
        yield from sentences
    except DataError as error:
        failures.append(error)
        raise


def describe_training_error(message: str, vocab_size: int) -> str:
    """Turn SentencePiece's message into one that names the key, the rule and the remedy."""
    largest = re.search(r"value <= (\d+)", message)
    if largest:
        return f"vocab_size={vocab_size} must be reachable from the text; use {largest[1]} or less, or give more text"
    fewest = re.search(r"\d+ vs (\d+)", message)
    if fewest:
        return f"vocab_size={vocab_size} must hold every character of the text; use {fewest[1]} or more"
    return f"vocab_size={vocab_size} must be trainable on the text ({message.strip()}); give text, and more of it"


def iterate_sentences(texts: Iterable[str]) -> Iterator[str]:
    """Cut texts at line ends into sentences that the trainer does not drop for their length."""
    for text in texts:
        for line in text.splitlines():
            for begin in range(0, len(line), MAX_SENTENCE_BYTES // 4):
                yield line[begin : begin + MAX_SENTENCE_BYTES // 4]


def check_gives_text_back(tokenizer: Tokenizer, texts: Iterable[str], *, name: str) -> None:
    """Raise ValueError when the tokenizer from file `name` changes one of the texts, or text of rare characters."""
    for text in (PROBE, *texts):
        difference = tokenizer.explain_difference(text)
        if difference is not None:
            raise ValueError(
                f"tokenizer={name} must stand for its text byte by byte, or bits per byte would be wrong, but "
                f"{difference}; leave tokenizer out to train one, or train yours with byte_fallback=true, "
                "normalization_rule_name=identity, remove_extra_whitespaces=false and add_dummy_prefix=false"
            )


def compute_token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return for each id (V of them) how many bytes of UTF-8 text it stands for; control pieces such as BOS and EOS
    0."""
    return np.asarray(
        [count_piece_bytes(tokenizer.processor, piece) for piece in range(tokenizer.vocab_size)], dtype=np.int64
    )


def count_piece_bytes(processor: Any, piece: int) -> int:
    """Return the bytes of text of one id."""
    if processor.is_control(piece) or processor.is_unknown(piece) or processor.is_unused(piece):
        return 0
    if processor.is_byte(piece):
        return 1
    return len(str(processor.id_to_piece(piece)).replace(SPACE_MARK, " ").encode())
