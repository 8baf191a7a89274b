"""Tasks of long texts, made here: a number to find far back (passkey) and whole long documents to predict.

Lengths are named in tokens and made in words, since the tokenizer is not known here: English of this kind takes about
1.25 tokens a word from a tokenizer of 32,000 pieces, so that 0.7 words a token leave room; smaller ones take more.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from launcher.demo_text import fetch_demo_text

PASSKEY_TOKENS = {"passkey_1k": 1024, "passkey_4k": 4096, "passkey_16k": 16384, "passkey_32k": 32768}
WORDS_PER_TOKEN = 0.7
PASSKEY_DOCUMENTS = 20
DEPTH_STRIDE = 7
LONG_DOCUMENT_CHARACTERS = 150_000
NUM_LONG_DOCUMENTS = 8

QUESTION = "Somewhere in the text that follows a pass key is given. Find it and keep it in mind.\n\n"
KEY_SENTENCE = "The pass key is {key}. Keep it in mind: {key} is the pass key."
ANSWER = "\n\nWhat is the pass key? The pass key is"
FILLER = (
    "The road goes down to the harbour and comes back by the mill.",
    "A cart stood in the yard with one wheel missing.",
    "In the evening the wind turned and brought rain from the hills.",
    "She put the bread on the table and cut it into thick slices.",
    "Nobody had painted the fence since the old man moved away.",
    "The boats were tied up two by two along the wall.",
    "He read the same page again and heard the clock in the next room.",
    "Apples were stored in the loft, where the air was dry and cool.",
    "The children ran ahead and waited for us at the gate.",
    "A thin line of smoke rose from the houses across the valley.",
    "The teacher wrote the names of the rivers on the board.",
    "By noon the market was empty and the stalls were taken down.",
    "The dog slept under the bench and did not stir when we came in.",
    "Snow lay on the roofs for a week and then was gone in a night.",
    "They spoke about the harvest and the price of wool.",
    "The path through the wood is shorter, but it is wet in spring.",
    "An owl lived in the tower and could be heard after dark.",
    "The baker opened early and closed when the last loaf was sold.",
    "We crossed the bridge on foot and looked down at the brown water.",
    "The letter had been folded so often that it came apart in her hands.",
    "From the window one could see the sea and, on clear days, the island.",
    "The carpenter measured the door twice and shook his head.",
    "Geese came over in a long line and settled on the far field.",
    "It was quiet in the library, and the lamps were lit one after another.",
)

PASSKEY_YAML = """\
# Finds one number of five digits in about {words:,} words of plain sentences (about {tokens:,} tokens with a
# tokenizer of 32,000 pieces), at {documents} depths from the beginning to the end. A prompt that is longer than the
# row is cut at its beginning and may lose the number.
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: ${{task_folder}}/test.jsonl
test_split: test
fewshot_config:
  samples: []
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{key}}}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 16
  do_sample: false
  temperature: 0.0
filter_list:
  - name: first_number
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""

LONG_DOCUMENTS_YAML = """\
# How well each next word of long documents is predicted, in windows of the whole row: a model that uses what stands
# far back does better with a longer row (--max-length) than with a short one. Documents of about {characters:,}
# characters, or those put into this folder as text files.
task: long_documents
dataset_path: json
dataset_kwargs:
  data_files:
    test: ${{task_folder}}/test.jsonl
test_split: test
fewshot_config:
  samples: []
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
  - metric: byte_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
metadata:
  version: 1.0
"""


def describe_passkey(name: str) -> str:
    """The YAML of one passkey task."""
    tokens = PASSKEY_TOKENS[name]
    return PASSKEY_YAML.format(
        name=name, tokens=tokens, words=int(tokens * WORDS_PER_TOKEN), documents=PASSKEY_DOCUMENTS
    )


def make_passkey_documents(name: str) -> list[dict[str, str]]:
    """The documents of one passkey task, `prompt` and `key`, the same on every machine.

    Depths are spread evenly and in a mixed order, so that the first few documents are a sample of them.
    """
    num_words = int(PASSKEY_TOKENS[name] * WORDS_PER_TOKEN)
    generator = random.Random(name)
    depths = [index * DEPTH_STRIDE % PASSKEY_DOCUMENTS / (PASSKEY_DOCUMENTS - 1) for index in range(PASSKEY_DOCUMENTS)]
    return [_make_passkey_document(num_words, depth, generator) for depth in depths]


def _make_passkey_document(num_words: int, depth: float, generator: random.Random) -> dict[str, str]:
    key = str(generator.randrange(10_000, 100_000))
    key_sentence = KEY_SENTENCE.format(key=key)
    num_filler_words = num_words - len(f"{QUESTION} {key_sentence} {ANSWER}".split())
    sentences: list[str] = []
    while num_filler_words >= len((sentence := generator.choice(FILLER)).split()):
        sentences.append(sentence)
        num_filler_words -= len(sentence.split())
    sentences.insert(round(depth * len(sentences)), key_sentence)
    return {"prompt": QUESTION + " ".join(sentences) + ANSWER, "key": key}


def describe_long_documents() -> str:
    """The YAML of the task of long documents."""
    return LONG_DOCUMENTS_YAML.format(characters=LONG_DOCUMENT_CHARACTERS)


def read_long_documents(folder: Path, scratch: Path) -> list[dict[str, str]]:
    """The text files in `folder`, one document each; where there are none, the demo's texts joined to long ones."""
    given = sorted(folder.glob("*.txt"))
    if given:
        return [{"text": read_given_text(file)} for file in given]
    sources = fetch_demo_text(scratch / "text")
    texts = (file.read_text(encoding="utf-8") for source in sources.values() for file in sorted(source.iterdir()))
    joined = list(_join_texts(texts))
    return [{"text": text} for text in _take_evenly(joined, NUM_LONG_DOCUMENTS)]


def read_given_text(file: Path) -> str:
    """The text of a file that the user put there. Raises ValueError for one that is empty or not UTF-8."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text ({error.reason}); write it so, or take it away") from error
    if not text.strip():
        raise ValueError(f"{file} must not be empty; put the text there, or take the file away")
    return text


def _join_texts(texts: Iterable[str]) -> Iterator[str]:
    """Neighbours together, each time until LONG_DOCUMENT_CHARACTERS are reached; a shorter rest is left out."""
    joined: list[str] = []
    for text in texts:
        joined.append(text)
        if sum(map(len, joined)) >= LONG_DOCUMENT_CHARACTERS:
            yield "\n\n".join(joined)
            joined = []


def _take_evenly(items: list[str], count: int) -> list[str]:
    return [items[index * len(items) // count] for index in range(min(count, len(items)))] if items else []
