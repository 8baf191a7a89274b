"""Small deterministic text and prepared folders for tests and dry runs."""

import random
from pathlib import Path

from data_pipeline.config import PrepareConfig
from data_pipeline.manifest import MANIFEST_NAME
from data_pipeline.prepare import run_prepare

WORDS = 600
SYLLABLES = [f"{consonant}{vowel}" for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]


def generate_text(seed: int, *, words: int = 120) -> str:
    """Return prose of made-up words: Zipf frequencies, each word likely followed by one of three, so that a model
    can learn."""
    language = random.Random(7)
    vocabulary = ["".join(language.choices(SYLLABLES, k=language.randint(1, 4))) for _ in range(WORDS)]
    followers = [[int(WORDS * language.random() ** 3) for _ in range(3)] for _ in range(WORDS)]
    chooser = random.Random(seed)
    current, text = 0, ""
    for _ in range(words):
        likely = chooser.random() < 0.8
        current = chooser.choice(followers[current]) if likely else int(WORDS * chooser.random() ** 3)
        text += vocabulary[current] + chooser.choices([" ", ", ", ".\n"], weights=[10, 1, 1])[0]
    return text


def write_synthetic_text(folder: Path, *, documents: int, seed: int, words: int = 120) -> Path:
    """Write `folder`/alpha.txt and `folder`/beta.txt, a document a paragraph, three in four documents in alpha."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [generate_text(seed * 1_000_003 + index, words=words) for index in range(documents)]
    (folder / "alpha.txt").write_text("\n\n".join(text for index, text in enumerate(texts) if index % 4))
    (folder / "beta.txt").write_text("\n\n".join(text for index, text in enumerate(texts) if not index % 4))
    return folder


def write_synthetic_dataset(
    folder: str | Path,
    *,
    vocab_size: int = 512,
    row_tokens: int = 64,
    documents: int = 200,
    seed: int = 0,
    shard_mib: float = 1.0,
    held_out_fraction: float = 0.1,
) -> Path:
    """Write a complete prepared folder (sources alpha and beta, all three splits, tokenizer.model) and return it.

    The same arguments give the same bytes; a folder that is there already is left as it is. vocab_size: 300 to about
    1,000. A document has about 120 words, 200 to 500 tokens.
    """
    folder = Path(folder)
    if (folder / MANIFEST_NAME).exists():
        return folder
    text = write_synthetic_text(folder.with_name(f"{folder.name}-text"), documents=documents, seed=seed)
    config = PrepareConfig(
        output=str(folder),
        inputs={"alpha": str(text / "alpha.txt"), "beta": str(text / "beta.txt")},
        text_document="paragraph",
        vocab_size=vocab_size,
        row_tokens=row_tokens,
        validation_fraction=held_out_fraction,
        test_fraction=held_out_fraction,
        shard_mib=shard_mib,
        workers=1,
    )
    run_prepare(config, report=lambda line: None)
    return folder
