"""`prism sizes`: what every named size is and costs, from its configuration alone."""

import argparse
from collections import Counter

from prism_lm.model.config import ModelConfig
from prism_lm.model.cost import count_parameters, flops_per_token, optimizer_bytes, state_bytes, training_bytes
from prism_lm.model.sizes import named_size, size_names

GIB, MIB = 2**30, 2**20
HEADER = (
    f"{'name':<18}{'layers':>7}{'width':>7}{'heads':>6}{'K':>5}{'V':>5}{'mlp':>7}{'parameters':>16}"
    f"{'FLOPs/token':>13}{'state MiB':>11}{'optim GiB':>11}{'train GiB':>11}"
)


def build_parser() -> argparse.ArgumentParser:
    """The arguments of `prism sizes`."""
    parser = argparse.ArgumentParser(
        prog="prism sizes",
        description="Named model sizes: layers, widths, parameters, FLOPs per token, state and optimizer memory.",
        epilog="A size is used in a run's YAML by writing its values under `model:`; `prism sizes NAME` prints them.",
    )
    parser.add_argument("name", nargs="?", help="one size, with its configuration and where its parameters are")
    parser.add_argument("--row-tokens", type=int, default=2048, help="tokens in a training row (default 2048)")
    return parser


def main(arguments: list[str]) -> int:
    """Print the table, or one size in detail; returns the exit code."""
    options = build_parser().parse_args(arguments)
    if options.row_tokens < 1:
        raise ValueError(f"--row-tokens={options.row_tokens} must be at least 1; use 2048")
    names = size_names() if options.name is None else [options.name]
    print("\n".join(_table(names, options.row_tokens)))
    if options.name is not None:
        print("\n".join(_details(named_size(options.name))))
    return 0


def _table(names: list[str], row_tokens: int) -> list[str]:
    return [HEADER, *(_row(name, named_size(name), row_tokens) for name in names), "", *_legend(row_tokens)]


def _row(name: str, config: ModelConfig, row_tokens: int) -> str:
    return (
        f"{name:<18}{config.num_layers:>7}{config.model_width:>7}{config.num_heads:>6}{config.key_width:>5}"
        f"{config.value_width:>5}{config.mlp_width:>7}{count_parameters(config):>16,}"
        f"{flops_per_token(config, row_tokens):>13.3g}"
        f"{state_bytes(config, context_tokens=row_tokens) / MIB:>11.2f}"
        f"{optimizer_bytes(config) / GIB:>11.2f}{training_bytes(config) / GIB:>11.2f}"
    )


def _legend(row_tokens: int) -> list[str]:
    return [
        f"FLOPs/token: training, forward and backward, in rows of {row_tokens:,} tokens, nothing recomputed.",
        f"state MiB: what one row needs to go on after {row_tokens:,} tokens; of a -transformer it grows with them.",
        "optim GiB: AdamW's two moments and fp32 master weights for bf16 training, over all ranks.",
        "train GiB: the same with weights and fp32 gradients; activations come on top.",
    ]


def _details(config: ModelConfig) -> list[str]:
    """The configuration as the YAML of a run, then the parameters of the built model by part."""
    yaml = [f"  {key}: {_spell(value)}" for key, value in vars(config).items()]
    parts = [f"  {part:<12}{count:>16,}" for part, count in _count_by_part(config).items()]
    return ["", "model:", *yaml, "", "parameters of the built model:", *parts]


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def _count_by_part(config: ModelConfig) -> Counter[str]:
    """Parameters by part, from the model built without memory (torch's meta device)."""
    import torch

    from prism_lm.model.lm import LanguageModel

    with torch.device("meta"):
        model = LanguageModel(config)
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[_part_of(name)] += parameter.numel()
    counts["total"] = counts.total()
    return counts


def _part_of(name: str) -> str:
    """`blocks.3.mixer.query.weight` is part of the mixers; norms are counted together."""
    names = name.split(".")
    if names[-2].endswith("norm"):
        return "norms"
    part = names[2] if names[0] == "blocks" else names[0]
    return {"mixer": "mixers", "mlp": "MLPs"}.get(part, part)
