"""`prism export RUN OUT`: a run's newest checkpoint as a Hugging Face folder, proved by loading it back.

OUT holds safetensors, config.json, a fast tokenizer, a model card and the trainer's own model code, so that
AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True) needs no package of ours; where prism-lm is installed,
CUDA tensors use its Triton kernels. The weights are those that `prism evaluate` reads. Before OUT appears, whole or not
at all, another process loads it and must find the trainer's logits and the trainer's tokens.
"""

import argparse
import importlib.util
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from launcher.help_text import Precision

if TYPE_CHECKING:
    from torch import Tensor

    from data_pipeline.hf_tokenizer import Comparison
    from launcher.trained_run import SavedRun, TrainedRun

EXAMPLE = """\
example:
  prism export runs/tiny exported/tiny
  prism export runs/tiny exported/tiny --precision bf16 --max-shard-size 2GB --overwrite
"""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
COMPARED_ROWS, COMPARED_TOKENS = 2, 256
MOST_TEST_TOKENS = 20_000_000
"Of the test split, for the tokenizer's comparison: about a minute."


class ExportFailed(RuntimeError):
    """The folder that was written is not the run's model; nothing stands at OUT."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was compared before OUT appeared."""

    logits_difference: float
    "The largest, as a share of the largest logit."
    num_compared_tokens: int
    comparison: "Comparison"
    texts_name: str
    "Which texts the tokenizers were compared on."


def main(arguments: list[str]) -> int:
    """Export and print one line."""
    parsed = build_parser().parse_args(arguments)
    out = Path(parsed.out)
    max_shard_bytes = parse_size(parsed.max_shard_size)
    check_out(out, overwrite=parsed.overwrite)
    check_transformers()
    proof = export_run(Path(parsed.run), out, precision=parsed.precision, max_shard_bytes=max_shard_bytes)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(
        f"{out}: {size / 1e9:.3f} GB; logits of {proof.num_compared_tokens} tokens differ from the run's by "
        f"{proof.logits_difference:.1e} of the largest; {proof.comparison.num_equal} of {proof.comparison.num_texts} "
        f"texts of {proof.texts_name} have the same tokens"
    )
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prism export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXAMPLE,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run that has saved a checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder to make")
    words = "of the weights; auto is that of the run's training (default %(default)s)"
    parser.add_argument("--precision", choices=get_args(Precision), default="auto", help=words)
    words = "of one safetensors file, in KB, MB or GB (default %(default)s)"
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help=words)
    parser.add_argument("--overwrite", action="store_true", help="replace an exported folder at OUT")
    return parser


def parse_size(text: str) -> int:
    """Bytes of 5GB, 500MB or 40KB. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB)", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"--max-shard-size={text} must be a positive number of KB, MB or GB; for example 5GB")
    return int(float(match[1]) * UNITS[match[2]])


def check_out(out: Path, *, overwrite: bool) -> None:
    """Raises ValueError where something stands at OUT that may not be replaced."""
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ValueError(f"OUT={out} must not exist, so that nothing is lost; name another folder or give --overwrite")
    if out.is_symlink() or not (out / "config.json").is_file() or not (out / "modeling_prism.py").is_file():
        raise ValueError(f"OUT={out} must be an exported folder for --overwrite to replace it; name another folder")


def check_transformers() -> None:
    """Raises ValueError where the folder could not be loaded back."""
    for name in ("transformers", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"prism export must have {name} to prove the folder; pip install 'prism-lm[export]'")


def export_run(run_dir: Path, out: Path, *, precision: Precision, max_shard_bytes: int) -> Proof:
    """Write the folder beside OUT, prove it, and give it its name, in place of a former one.

    Raises ValueError as find_run does and for a shard size below the largest weight, ExportFailed where the folder is
    not the run's model.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    trained = _load(run_dir, precision)
    try:
        partial.mkdir(parents=True)
        proof = _write(partial, trained, run_dir, max_shard_bytes)
        _publish(partial, out)
    except OSError as error:
        raise ExportFailed(f"OUT={out} is not written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return proof


def _load(run_dir: Path, precision: Precision) -> "TrainedRun":
    """In plain torch on the CPU, as the folder is loaded back."""
    import torch

    from launcher.trained_run import choose_dtype, find_run, load_model
    from prism_lm.model.peer_rules import refuse_peer

    run = replace(find_run(run_dir, kernels="plain"), device=torch.device("cpu"))
    refuse_peer(run.config.model, f"prism export {run_dir}", "export a run of another mixer")
    return load_model(run, dtype=choose_dtype(run, run.config.train.precision if precision == "auto" else precision))


def _write(folder: Path, trained: "TrainedRun", run_dir: Path, max_shard_bytes: int) -> Proof:
    from data_pipeline.hf_tokenizer import convert_tokenizer, find_padding, write_hf_tokenizer
    from launcher.model_card import write_card
    from prism_lm.export.folder import SpecialTokens, write_model

    tokenizer, row_tokens = trained.tokenizer, trained.config.data.row_tokens
    converted = convert_tokenizer(tokenizer)
    tokens = SpecialTokens(bos=tokenizer.bos_id, eos=tokenizer.eos_id, pad=find_padding(tokenizer))
    write_model(
        folder,
        trained.model,
        trained.config.model,
        tokens=tokens,
        row_tokens=row_tokens,
        max_shard_bytes=max_shard_bytes,
    )
    write_hf_tokenizer(folder, tokenizer, converted, row_tokens=row_tokens)
    proof = prove(folder, trained, run_dir, converted)
    write_card(folder, trained, run_dir, proof)
    return proof


def prove(folder: Path, trained: "TrainedRun", run_dir: Path, converted: Any) -> Proof:
    """Compare model and tokenizer of the folder with the run's. Raises ExportFailed where they differ."""
    from data_pipeline.hf_tokenizer import HARD_TEXTS, compare_on
    from prism_lm.export.round_trip import TOLERANCES, load_back, measure_difference

    texts, name = read_texts(trained, run_dir)
    input_ids_BT = build_compared_rows(trained, list(HARD_TEXTS))
    try:
        comparison = compare_on(trained.tokenizer, converted, texts)
        compare_on(trained.tokenizer, converted, HARD_TEXTS)
    except ValueError as error:
        raise ExportFailed(f"OUT is not written: {error}") from error
    loaded = load_back(folder, input_ids_BT, list(HARD_TEXTS))
    difference = measure_difference(trained.model, input_ids_BT, loaded.logits_BTV)
    tolerance = TOLERANCES[next(trained.model.parameters()).dtype]
    if not difference <= tolerance:
        raise ExportFailed(
            f"OUT is not written: its logits must be the run's to {tolerance:.1e} of the largest, but differ by "
            f"{difference:.1e}; report it with the versions of torch and transformers"
        )
    for text, ids, again in zip(HARD_TEXTS, loaded.ids, loaded.texts, strict=True):
        _check_text(trained, converted, text, ids, again)
    return Proof(
        logits_difference=difference,
        num_compared_tokens=input_ids_BT.numel(),
        comparison=comparison,
        texts_name=name,
    )


def _check_text(trained: "TrainedRun", converted: Any, text: str, ids: list[int], again: str) -> None:
    """transformers must use tokenizer.json as it stands, with BOS before each text and nothing tidied up."""
    pieces = converted.encode(text, add_special_tokens=False).ids
    expected = [trained.tokenizer.bos_id, *pieces], trained.tokenizer.decode(pieces)
    if (ids, again) != expected:
        raise ExportFailed(
            f"OUT is not written: AutoTokenizer must give {text[:20]!r} the ids {expected[0][:6]} and back, not "
            f"{ids[:6]} and {again[:20]!r}; report it with the versions of tokenizers and transformers"
        )


def build_compared_rows(trained: "TrainedRun", texts: list[str]) -> "Tensor":
    """Rows BT of the texts' tokens, again and again until they are full."""
    import torch

    tokenizer = trained.tokenizer
    tokens = torch.tensor([piece for text in texts for piece in (tokenizer.bos_id, *tokenizer.encode(text))])
    row_tokens = min(COMPARED_TOKENS, trained.config.data.row_tokens)
    places = torch.arange(COMPARED_ROWS * row_tokens) % len(tokens)
    return tokens[places].view(COMPARED_ROWS, row_tokens)


def read_texts(run: "SavedRun", run_dir: Path) -> tuple[Iterator[str], str]:
    """The test split's documents, as far as they lie in one row, and what to call them; a built-in set of hard texts
    where the data cannot be read from here."""
    from data_pipeline.errors import DataError
    from data_pipeline.hf_tokenizer import HARD_TEXTS
    from launcher.run_data import open_evaluated_data, open_one_pass

    try:
        config, _ = open_evaluated_data(run.config, run_dir, None, tokenizer=run.tokenizer)
        rows = open_one_pass(config, split="test", micro_batch_rows=1)
    except (DataError, ValueError):
        return iter(HARD_TEXTS), "a built-in set"
    texts = _cut_documents(run, (batch["input_ids_BT"][0] for batch in rows))
    return texts, f"the test split (of its first {MOST_TEST_TOKENS:,} tokens, if it is longer)"


def _cut_documents(run: "SavedRun", rows: "Iterator[Tensor]") -> Iterator[str]:
    """The texts between the BOS tokens of each row; of a long split the first MOST_TEST_TOKENS."""
    num_tokens = 0
    for row_T in rows:
        starts = (row_T == run.tokenizer.bos_id).nonzero().flatten().tolist()
        for begin, end in zip([0, *starts], [*starts, len(row_T)], strict=True):
            pieces = [piece for piece in row_T[begin:end].tolist() if piece not in (run.tokenizer.bos_id,)]
            if pieces:
                yield run.tokenizer.decode(pieces)
        num_tokens += len(row_T)
        if num_tokens >= MOST_TEST_TOKENS:
            return


def _publish(partial: Path, out: Path) -> None:
    """OUT is the new folder, or the former one, at every moment but one."""
    former = out.with_name(f".{out.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if out.exists():
        out.rename(former)
    partial.rename(out)
    shutil.rmtree(former, ignore_errors=True)
