import contextlib
import gc
import weakref

import pytest
import torch

from prism_lm.model.decoder import EagerDecoder, iterate_tokens
from prism_lm.model.generate import generate
from tests.prism_lm.model.builders import FAMILIES, SMALL, build_small


class Counter:
    """Counts its steps in the memory of the token, as a captured step does."""

    def __init__(self, lag_tokens: int) -> None:
        self.lag_tokens, self.num_steps = lag_tokens, 0
        self.token_B = torch.zeros(2, dtype=torch.int64)

    def start(self, logits_BV, state, sampling, numbers):
        raise NotImplementedError

    def release(self):
        raise NotImplementedError

    def advance(self) -> torch.Tensor:
        self.num_steps += 1
        return self.token_B.add_(torch.tensor([1, 10]))


@pytest.mark.parametrize("lag_tokens", [0, 1, 3, 50])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_tokens_come_in_order_and_as_many_as_were_asked_for(count, lag_tokens):
    decoder = Counter(lag_tokens)
    tokens = list(iterate_tokens(decoder, decoder.token_B, count))
    assert tokens == [[step, 10 * step] for step in range(count)] and decoder.num_steps == count - 1


@pytest.mark.parametrize("lag_tokens", [0, 1, 3])
def test_reader_that_stops_leaves_no_more_steps_than_the_lag(lag_tokens):
    decoder = Counter(lag_tokens)
    for tokens in iterate_tokens(decoder, decoder.token_B, 100):
        if tokens[0] == 20:
            break
    assert decoder.num_steps == 20 + lag_tokens


def test_host_that_computes_the_steps_runs_none_ahead():
    assert EagerDecoder(build_small(SMALL)).lag_tokens == 0


@pytest.mark.parametrize("fails", [False, True])
def test_decoder_that_is_kept_holds_no_state_after_a_text(fails):
    """A cache of keys would otherwise lie beside that of the next prompts."""
    model = build_small(FAMILIES["hybrid"])
    decoder, caches = EagerDecoder(model), []

    def read_prompt(input_ids_BT, document_start_BT):
        logits_B1V, state = model.logits(input_ids_BT, document_start_BT=document_start_BT, last_only=True)
        caches.append(weakref.ref(state))
        return logits_B1V, state

    def on_tokens(row, tokens):
        assert decoder._state is not None
        if fails:
            raise KeyError

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        generate(model, [[1, 2]], max_new_tokens=3, read_prompt=read_prompt, on_tokens=on_tokens, decoder=decoder)
    gc.collect()
    assert decoder._state is None and caches[0]() is None
