"""`prism train CONFIG [key=value ...]`: train a model, or go on with the run whose folder exists.

One process, `torchrun --nproc-per-node N -m launcher train CONFIG`, or `srun` with one task a rank.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.config import RunConfig, dump_config, fingerprint_model, load_config
from launcher.environment import ProcessEnvironment, apply_environment, detect_environment
from launcher.help_text import describe_config

if TYPE_CHECKING:
    from prism_lm.train.state import Status, TrainRun

EXIT_PREEMPTED = 75


def main(arguments: list[str]) -> int:
    """Train; 0 when the budget is spent, 75 (PRISM_PREEMPTED_EXIT) when a stop signal ended it with a checkpoint."""
    parsed = build_parser().parse_args(arguments)
    config = load_config(RunConfig, parsed.config, parsed.overrides)
    environment = detect_environment(os.environ)
    apply_environment(environment)
    preempted = int(os.environ.get("PRISM_PREEMPTED_EXIT") or EXIT_PREEMPTED)
    return 0 if train(config, environment) == "finished" else preempted


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="keys (write key=value after CONFIG):\n" + describe_config(RunConfig),
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file; the shipped ones are in configs/train/")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="override one key of the file")
    return parser


def train(config: RunConfig, environment: ProcessEnvironment) -> "Status":
    """Check everything that can be checked before a process group starts, then run to a status."""
    from prism_lm.train.loop import run_training

    run = build_run(config, environment)
    if environment.ranks.is_main:
        kernels = f"kernels: {run.environment['kernels']} (parallel.kernels={config.parallel.kernels})"
        print(f"ranks: {run.ranks}, {kernels}", flush=True)
    return run_training(run)


def build_run(config: RunConfig, environment: ProcessEnvironment) -> "TrainRun":
    """What the trainer is given. Raises ValueError or DataError for data that does not fit the run."""
    from launcher.provenance import describe_environment
    from launcher.run_data import open_loader, open_manifest, read_tokenizer
    from launcher.task_scorer import open_task_scorer
    from prism_lm.model.cost import flops_per_token
    from prism_lm.model.kernels import choose_kernels, select_operators
    from prism_lm.model.lm import build_model
    from prism_lm.model.peer_rules import check_peer_installed, refuse_peer
    from prism_lm.parallel.apply import apply_to_operators, check_alignment
    from prism_lm.parallel.mesh import choose_device, cut_rows
    from prism_lm.train.config import compute_accumulation_steps
    from prism_lm.train.state import TrainRun

    check_peer_installed(config.model)
    if config.train.tasks.every_steps:
        asked = f"train.tasks.every_steps={config.train.tasks.every_steps}"
        refuse_peer(config.model, asked, "use train.tasks.every_steps=0")
    flops = flops_per_token(config.model, config.data.row_tokens)
    ranks = cut_rows(environment.ranks, config.parallel.sequence_degree, row_tokens=config.data.row_tokens)
    device_type = choose_device(ranks).type
    kernels = choose_kernels(config.parallel.kernels, device_type)
    operators = select_operators(device_type, kernels)
    compute_accumulation_steps(config.train, ranks)
    if config.parallel.compile and config.train.zero_stage in (1, 2):
        bytes_each = {"fp32": 4, "bf16": 2}[config.train.precision]
        check_alignment(build_model(config.model, seed=config.seed, device="meta"), bytes_each=bytes_each)
    manifest = open_manifest(config)
    train_loader = open_loader(config, ranks, split="train")
    validation_loader = open_loader(config, ranks, split="validation") if config.train.eval_every_steps else None
    return TrainRun(
        run_dir=Path(config.run_dir),
        train=config.train,
        parallel=config.parallel,
        ranks=ranks,
        seed=config.seed,
        build_model=lambda: build_model(config.model, seed=config.seed, operators=apply_to_operators(operators, ranks)),
        build_train_loader=lambda: train_loader,
        build_validation_loader=None if validation_loader is None else lambda: validation_loader,
        validation_sources=() if validation_loader is None else tuple(manifest.sources("validation")),
        task_scorer=open_task_scorer(config, operators, ranks),
        flops_per_token=flops,
        config_yaml=dump_config(config),
        environment={**describe_environment(environment), "kernels": kernels},
        files={"tokenizer.model": read_tokenizer(config)},
        fingerprints={
            "model": fingerprint_model(config.model),
            "data": manifest.describe(),
        },
    )
