"""The n-gram floors of the demo's table, scored on the same rows as the models."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.evaluate import write_figures

if TYPE_CHECKING:
    from data_pipeline.manifest import Split
    from launcher.trained_run import TrainedRun


def score_floors(run: "TrainedRun", folder: Path) -> dict[str, dict[str, Any]]:
    """Figures of the unigram and the bigram model by name; kept in floors.json and read from there the next time."""
    file = folder / "floors.json"
    if not file.is_file():
        write_figures(file, _count_and_score(run))
    return json.loads(file.read_text(encoding="utf-8"))


def _count_and_score(run: "TrainedRun") -> dict[str, dict[str, Any]]:
    from data_pipeline.tokenizer import compute_token_bytes
    from launcher.evaluate import describe_score
    from prism_lm.eval.ngram import count_ngrams, score_bigram, score_unigram

    token_bytes_V = compute_token_bytes(run.tokenizer)
    train, validation, test = _read_pairs(run, "train"), _read_pairs(run, "validation"), _read_pairs(run, "test")
    counts = count_ngrams(train, run.tokenizer.vocab_size)
    unigram = describe_score(score_unigram(counts, test, token_bytes_V))
    bigram = describe_score(score_bigram(counts, test, token_bytes_V, validation_pairs=validation))
    return {
        "unigram": {"parameters": counts.vocab_size, "tokens": len(train), **unigram},
        "bigram": {"parameters": len(counts.pair_codes), "tokens": len(train), **bigram},
    }


def _read_pairs(run: "TrainedRun", split: "Split") -> Any:
    """One pass over a split, in the largest batches that cost no memory to speak of."""
    from launcher.run_data import open_one_pass
    from prism_lm.eval.ngram import collect_pairs

    return collect_pairs(open_one_pass(run.config, split=split, micro_batch_rows=64))
