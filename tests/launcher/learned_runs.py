"""Run folders of small models that have learned half of the local tasks' answers by heart, beside other text."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from data_pipeline.packing import RowPacker
from data_pipeline.synthetic import generate_text
from data_pipeline.tokenizer import Tokenizer
from launcher.config import RunConfig
from launcher.imported_run import write_imported_run
from prism_lm.model.config import ModelConfig
from prism_lm.model.lm import LanguageModel, build_model
from tests.launcher.trained_folders import VOCAB, train_small_tokenizer

ROW_TOKENS = 128
BATCH_ROWS = 8
NUM_OTHER_TEXTS = 20
MODEL = ModelConfig(
    vocab_size=VOCAB,
    model_width=64,
    num_layers=2,
    num_heads=2,
    key_width=32,
    value_width=32,
    mlp_width=128,
    solver_rank=8,
    chunk_tokens=32,
)


def write_learned_run(run_dir: Path, tasks: dict[str, Any], *, model: ModelConfig = MODEL, steps: int) -> Path:
    """The folder of a run whose model was trained for so many steps, in fp32 and by the same seed every time.

    tasks: as lm-eval loads them, with their data.
    """
    tokenizer = Tokenizer(train_small_tokenizer(), name="tokenizer.model")
    texts = [*list_answered_texts(tasks), *map(generate_text, range(NUM_OTHER_TEXTS))]
    documents = [tokenizer.encode(text)[-ROW_TOKENS:] for text in texts]
    trained = train(model, draw_batches(documents, tokenizer), steps)
    weights = {name: weight.detach() for name, weight in trained.named_parameters()}
    base = RunConfig(run_dir=str(run_dir), model=model)
    config = replace(base, data=replace(base.data, row_tokens=ROW_TOKENS), train=replace(base.train, precision="fp32"))
    write_imported_run(run_dir, config, weights, tokenizer.model, origin={"source": "test"})
    return run_dir


def list_answered_texts(tasks: dict[str, Any]) -> Iterator[str]:
    """Prompt and right answer of every other document, as lm-eval would show them to a model."""
    for task in tasks.values():
        task.build_all_requests()
        for request in task.instances:
            if request.doc_id % 2 == 0 and (text := _answer(task, request)):
                yield text


def _answer(task: Any, request: Any) -> str:
    match task.OUTPUT_TYPE:
        case "multiple_choice":
            gold = task.doc_to_text(request.doc) if task.multiple_input else task.doc_to_target(request.doc)
            return "".join(request.args) if request.idx == int(gold) else ""
        case "generate_until":
            return f"{request.args[0]}{task.config.target_delimiter}{task.doc_to_target(request.doc)}\n"
        case _:
            return request.args[0]


def draw_batches(documents: list[list[int]], tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    """Batches of packed rows of ROW_TOKENS + 1, without end."""
    chooser = random.Random(0)
    packer = RowPacker(row_tokens=ROW_TOKENS, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, dtype="uint16")
    rows: list[torch.Tensor] = []
    while True:
        for document in chooser.sample(documents, len(documents)):
            rows += [torch.from_numpy(row.astype("int64")) for row in packer.add(document)]
        while len(rows) >= BATCH_ROWS:
            yield torch.stack(rows[:BATCH_ROWS])
            del rows[:BATCH_ROWS]


def train(config: ModelConfig, batches: Iterator[torch.Tensor], steps: int) -> LanguageModel:
    """AdamW, ten steps of warm-up, then down to nothing."""
    model = build_model(config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / steps))
    bos_id = Tokenizer(train_small_tokenizer(), name="tokenizer.model").bos_id
    for rows in islice(batches, steps):
        inputs_BT, labels_BT = rows[:, :-1], rows[:, 1:]
        (model(inputs_BT, inputs_BT == bos_id, labels_BT) / labels_BT.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()
