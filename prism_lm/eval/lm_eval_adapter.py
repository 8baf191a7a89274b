"""A language model as EleutherAI's harness asks for it, and tasks scored with it.

Rows are cut and texts ended as the harness does for Hugging Face models with add_bos_token=True, so that numbers agree.
The harness sees one process; the ranks share the requests below it, and each gets all the answers.
"""

import io
import logging
import os
import random
import zlib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache, partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from prism_lm.eval.loglikelihood import Likelihood, ScoredRow, score_rows
from prism_lm.eval.progress import Progress
from prism_lm.eval.until import Prompt, Settings, TextTokenizer, generate_until
from prism_lm.model.lm import LanguageModel
from prism_lm.parallel.mesh import Ranks

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.tasks import TaskManager

DEFAULT_NEW_TOKENS = 256
GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
Encoded = tuple[tuple[str, str] | str, list[int], list[int]]
"A request as the harness names it, the tokens of its context and those of its continuation."


class PrismLM(TemplateLM):
    """Answers to the harness's three kinds of request."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: TextTokenizer,
        *,
        max_length_tokens: int,
        batch_tokens: int,
        ranks: Ranks | None = None,
        progress: Progress | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """All ranks pass the same; each holds the whole model. `info` joins the harness's record of the model."""
        super().__init__()
        if max_length_tokens < 2:
            raise ValueError(f"max_length_tokens={max_length_tokens} must be at least 2; for example 2048")
        self.model = model
        self.text_tokenizer = tokenizer
        self.max_length = max_length_tokens
        self._info = dict(info or {})
        # The answers to one question come one after another, each with the question as its context.
        self._encode = lru_cache(maxsize=16)(tokenizer.encode)
        self._score_rows = partial(score_rows, model, batch_tokens=batch_tokens, ranks=ranks, progress=progress)
        self._generate = partial(
            generate_until, model, tokenizer, batch_tokens=batch_tokens, ranks=ranks, progress=progress
        )

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.text_tokenizer.bos_id

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes about the model."""
        first = next(self.model.parameters())
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"model_num_parameters": num_parameters, "model_dtype": str(first.dtype), **self._info}

    def tok_encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, string: str, add_special_tokens: bool | None = None
    ) -> list[int]:
        """The text's tokens after BOS, with which every row begins; without it where that is asked for."""
        tokens = self._encode(string)
        return [*tokens] if add_special_tokens is False else [self.prefix_token_id, *tokens]

    def loglikelihood(self, requests: list["Instance"], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation in nats, and whether it is the greedy one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, requests: Sequence[Encoded], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return [(one.log_likelihood, one.is_greedy) for one in self._score(requests)]

    def loglikelihood_rolling(self, requests: list["Instance"], disable_tqdm: bool = True) -> list[float]:
        """Log-likelihood of each whole text, cut in rows of at most max_length that each see one token before."""
        encoded: list[Encoded] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            text = str(request.args[0])
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                encoded.append((text, context, continuation))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, one in zip(owners, self._score(encoded), strict=True):
            sums[owner] += one.log_likelihood
        return sums

    def _score(self, requests: Sequence[Encoded]) -> list[Likelihood]:
        return self._score_rows([self._cut_row(*request) for request in requests])

    def _cut_row(self, name: tuple[str, str] | str, context: list[int], continuation: list[int]) -> ScoredRow:
        """The last max_length + 1 tokens, the last of which is only predicted. Raises ValueError for a continuation
        that is no token or does not fit."""
        if not context or not 0 < len(continuation) <= self.max_length:
            text = name[-1] if isinstance(name, tuple) else name
            raise ValueError(
                f"continuation {text[-60:]!r} has {len(continuation)} tokens, which must be at least 1 and at most "
                f"max_length_tokens={self.max_length}; give a larger one, or change the task"
            )
        return ScoredRow([*context, *continuation][-(self.max_length + 1) :], len(continuation))

    def generate_until(self, requests: list["Instance"], disable_tqdm: bool = True) -> list[str]:
        """The text that continues each context up to a stop string, EOS or the largest number of new tokens."""
        seen: Counter[str] = Counter()
        prompts: list[Prompt] = []
        for request in requests:
            context, generation_kwargs = cast(tuple[str, dict[str, Any]], request.args)
            settings = read_settings(generation_kwargs, self.max_length)
            tokens = self.tok_encode(context)[-(self.max_length - settings.max_new_tokens) :]
            # Repeats of a request draw other numbers; which ones does not depend on the requests around it.
            prompts.append(Prompt(tokens, settings, seed=zlib.crc32(context.encode()) + seen[context]))
            seen[context] += 1
        return self._generate(prompts)


def read_settings(generation_kwargs: Mapping[str, Any], max_length_tokens: int) -> Settings:
    """A task's own settings of generation. Raises ValueError for what a model of that length cannot do."""
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(dict(generation_kwargs), DEFAULT_NEW_TOKENS))
    unknown = sorted(kwargs.keys() - GENERATION_KEYS)
    if unknown:
        raise ValueError(
            f"generation_kwargs.{unknown[0]}={kwargs[unknown[0]]} must be one of "
            f"{', '.join(sorted(GENERATION_KEYS))}; take it out of the task's YAML"
        )
    if not 0 < kwargs["max_gen_toks"] < max_length_tokens:
        raise ValueError(
            f"max_gen_toks={kwargs['max_gen_toks']} must be above 0 and below max_length_tokens={max_length_tokens}, "
            "so that some of the context fits before the new tokens; use a larger length"
        )
    return Settings(
        max_new_tokens=kwargs["max_gen_toks"],
        until=tuple(kwargs["until"]),
        temperature=float(kwargs.get("temperature", 0.0)) if kwargs["do_sample"] else 0.0,
        top_k=int(kwargs.get("top_k", 0)),
        top_p=float(kwargs.get("top_p", 1.0)),
    )


def check_generation(tasks: Mapping[str, Any], max_length_tokens: int) -> None:
    """Raises ValueError, before anything is scored, where one of the loaded tasks asks for texts that a model of that
    length cannot generate."""
    for name, task in tasks.items():
        if task.OUTPUT_TYPE == "generate_until":
            try:
                read_settings(task.config.generation_kwargs, max_length_tokens)
            except ValueError as error:
                raise ValueError(f"task {name}: {error}") from error


def score_tasks(
    lm: PrismLM,
    names: Sequence[str],
    task_manager: "TaskManager",
    *,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    log_samples: bool = False,
    bootstrap_iters: int = 0,
    describes_machine: bool = True,
) -> dict[str, Any]:
    """The harness's whole result for those tasks, the same on every rank.

    limit: documents a task, or their share below 1. bootstrap_iters 0: no error bars. describes_machine: the harness
    adds what pip, nvidia-smi and others say, seconds in processes of their own. The global random generators are left
    as they were.
    """
    from lm_eval.evaluator import simple_evaluate

    with _keeping_generators(), _as_only_process(), _describing_machine(describes_machine), quieting():
        results = simple_evaluate(
            model=lm,
            tasks=list(names),
            task_manager=task_manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=log_samples,
            bootstrap_iters=bootstrap_iters,
        )
    assert results is not None
    return dict(results)


def read_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Every figure of a result but error bars, as `eval/<task>/<metric>`; a filter other than none joins its name."""
    return {
        f"eval/{task}/{_spell_metric(key)}": float(value)
        for task, figures in results["results"].items()
        for key, value in figures.items()
        if "," in key and "_stderr," not in key and isinstance(value, Real)
    }


def _spell_metric(key: str) -> str:
    return key.removesuffix(",none").replace(",", "_")


@contextmanager
def _keeping_generators() -> Generator[None, None, None]:
    """Puts back the states of random's, numpy's and torch's global generators, which the harness seeds."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)


@contextmanager
def _as_only_process() -> Generator[None, None, None]:
    """Lets every rank have the result, which the harness gives to LOCAL_RANK 0 alone, and keeps it from forking a
    process that holds a GPU and a process group to draw error bars."""
    wanted = {"LOCAL_RANK": "0", "DISABLE_MULTIPROC": "1"}
    former = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _describing_machine(is_described: bool) -> Generator[None, None, None]:
    """Lets the harness ask other programs about the machine, or not. The commit it reads from .git itself: `git` says
    on the terminal where there is none."""
    from lm_eval import evaluator
    from lm_eval.loggers.utils import get_commit_from_path

    former = evaluator.add_env_info, evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = partial(get_commit_from_path, Path.cwd())
    if not is_described:
        evaluator.add_env_info = _add_nothing
    try:
        yield
    finally:
        evaluator.add_env_info, evaluator.get_git_commit_hash = former


def _add_nothing(storage: dict[str, Any]) -> None:
    """Leaves a result as it is."""


@contextmanager
def quieting() -> Generator[None, None, None]:
    """Keeps the remarks and progress bars of the harness and of `datasets` from the terminal; errors are raised."""
    import datasets
    import lm_eval.api.task

    logger, bar, was_silent = logging.getLogger("lm_eval"), lm_eval.api.task.tqdm, datasets.are_progress_bars_disabled()
    former = logger.level
    logger.setLevel(logging.ERROR)
    lm_eval.api.task.tqdm = partial(bar, disable=True)
    datasets.disable_progress_bars()
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(former)
        lm_eval.api.task.tqdm = bar
        if not was_silent:
            datasets.enable_progress_bars()
