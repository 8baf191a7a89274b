"""The rooms on either side of a batch do not know each other; here they are held together."""

import inspect
from typing import get_type_hints

import numpy as np
import pytest
import torch

from data_pipeline.batch import BATCH_DTYPES, NO_SOURCE, Batch, build_batch
from data_pipeline.packing import IGNORED_LABEL as WRITTEN_IGNORED_LABEL
from prism_lm.eval import perplexity
from prism_lm.eval.perplexity import ScoredBatch
from prism_lm.model import lm
from prism_lm.train import step
from prism_lm.train.step import TrainBatch
from tests.harness import TinyModel

BOS = 1


def build_written_batch() -> Batch:
    row = np.array([BOS, 5, 6, BOS, 7], dtype=np.uint16)
    return build_batch([row], [3], batch_rows=2, row_tokens=4, bos_id=BOS)


def test_trainer_asks_for_exactly_what_the_loader_writes() -> None:
    assert get_type_hints(TrainBatch) == get_type_hints(Batch)


@pytest.mark.parametrize("reader", [TrainBatch, ScoredBatch])
def test_every_reader_asks_for_what_the_loader_writes(reader: type) -> None:
    assert get_type_hints(reader).items() <= get_type_hints(Batch).items()


@pytest.mark.parametrize("model", [lm.LanguageModel, TinyModel])
def test_model_is_given_what_its_forward_takes_and_nothing_about_the_rows(model: type) -> None:
    given = step.move_to_device(TrainBatch(**build_written_batch()), torch.device("cpu"))
    assert given.keys() == get_type_hints(Batch).keys() - {"row_hash_B", "source_B"}
    inspect.signature(model.forward).bind(None, **given)


def test_written_batch_has_the_promised_keys_shapes_and_dtypes() -> None:
    batch = build_written_batch()
    assert {key: value.dtype for key, value in batch.items()} == BATCH_DTYPES
    shapes = {"B": torch.Size([2]), "BT": torch.Size([2, 4])}
    assert {key: value.shape for key, value in batch.items()} == {key: shapes[key.split("_")[-1]] for key in batch}


def test_rows_have_the_numbers_of_their_sources_and_padding_has_none() -> None:
    assert build_written_batch()["source_B"].tolist() == [3, NO_SOURCE]


def test_every_room_ignores_the_same_label() -> None:
    assert {WRITTEN_IGNORED_LABEL, step.IGNORED_LABEL, perplexity.IGNORED_LABEL, lm.IGNORED_LABEL} == {-100}


def test_label_is_the_next_input_except_before_a_document_start() -> None:
    batch = build_written_batch()
    assert batch["labels_BT"][0].tolist() == [5, 6, -100, 7]
    assert batch["document_start_BT"][0].tolist() == [True, False, False, True]
    assert (batch["labels_BT"][1] == -100).all()
