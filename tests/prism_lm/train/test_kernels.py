"""Training on Triton kernels, interpreted on the CPU, where weights exist only inside their owner's forward."""

from pathlib import Path

import pytest

from kernels.checks import is_interpreted
from prism_lm.model.kernels import build_triton_operators
from prism_lm.model.lm import LanguageModel
from prism_lm.model.operators import build_plain_operators
from prism_lm.parallel.apply import ParallelConfig
from prism_lm.train.config import TrainConfig
from prism_lm.train.loop import run_training
from prism_lm.train.schedule import ScheduleConfig
from tests.harness import build_language_config, build_run, read_records, run_on

BUILDERS = {"plain": build_plain_operators, "triton": build_triton_operators}
pytestmark = pytest.mark.skipif(not is_interpreted(), reason="on a GPU tests/launcher/test_train.py says this")


def train(folder: str, kernels: str) -> None:
    """Two updates at stage 3, checkpointed, so that weights are gathered a second time in the backward."""
    config = TrainConfig(
        steps=2,
        global_batch_rows=2,
        micro_batch_rows=1,
        zero_stage=3,
        log_every_steps=1,
        schedule=ScheduleConfig(warmup_steps=1),
    )
    model = build_language_config(layer_pattern=["prism", "gated_delta"])
    run = build_run(
        Path(folder) / kernels,
        config,
        parallel=ParallelConfig(activation_checkpointing=True),
        build_model=lambda: LanguageModel(model, operators=BUILDERS[kernels]()),
    )
    run_training(run)


@pytest.mark.timeout(200)
def test_kernels_train_as_plain_torch_does_where_weights_are_split(tmp_path: Path) -> None:
    """In fp32: each operator is right to 1e-5."""
    records = {}
    for kernels in BUILDERS:
        run_on(2, train, str(tmp_path), kernels)
        records[kernels] = read_records(tmp_path / kernels)
    for actual, expected in zip(records["triton"], records["plain"], strict=True):
        for tag in ("train/loss_nats", "optim/grad_norm"):
            assert actual[tag] == pytest.approx(expected[tag], rel=1e-4)
