"""An exported folder on a CUDA device beside our package: Triton kernels, and what our own model computes with them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from prism_lm.export.folder import SpecialTokens, write_model
from prism_lm.model.generate import generate
from prism_lm.model.kernels import build_triton_operators
from prism_lm.model.lm import LanguageModel, build_model
from prism_lm.model.sizes import named_size

pytestmark = pytest.mark.gpu
CONFIG = replace(named_size("tiny"), num_layers=4, layer_pattern=["prism", "gated_delta", "prism", "attention"])
PROMPTS = [[1, 5, 7, 9], [1, 3], [1, 8, 8, 8, 8, 20, 30]]


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place for the code that transformers copies: the package it makes of it remembers its first place."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def pair(request, tmp_path: Path, modules: Path, monkeypatch):
    """Ours on Triton, and the exported one."""
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.syspath_prepend(str(modules))
    ours = build_model(CONFIG, seed=3, device="cuda", dtype=request.param, operators=build_triton_operators()).eval()
    folder = tmp_path / f"exported_{str(request.param).removeprefix('torch.')}"
    folder.mkdir()
    ids = SpecialTokens(bos=1, eos=2, pad=0)
    write_model(folder, ours, CONFIG, tokens=ids, row_tokens=64, max_shard_bytes=10**9)
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto").cuda().eval()
    return ours, theirs


def count_kernels(model) -> list[str]:
    """Which forms its code finds from now on, by name."""
    module, found = sys.modules[type(model).__module__], []
    find = module._find_form

    def note(name, plain, first):
        form = find(name, plain, first)
        found.extend([name] if form is not plain else [])
        return form

    module._find_form = note
    return found


def test_kernels_run_and_give_our_logits_loss_and_gradients(pair) -> None:
    ours, theirs = pair
    used = count_kernels(theirs)
    ids = torch.randint(3, CONFIG.vocab_size, (2, 100), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours.logits(ids)[0])
    output = theirs(ids, labels=ids)
    output.loss.backward()
    loss = ours(ids[:, :-1], None, ids[:, 1:].contiguous()) / ids[:, 1:].numel()
    loss.backward()
    assert {"scan", "short_conv", "gated_rms_norm", "unit_keys", "swiglu", "add_rms_norm"} < set(used)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.model.named_parameters():
        expected = gradients[name].grad.float()
        # Sums over the batch's tokens in another order: rows of T here, of T - 1 there.
        bound = 2e-2 if parameter.dtype == torch.bfloat16 else 1e-4
        assert (parameter.grad.float() - expected).norm() <= bound * expected.norm(), name


def test_generated_text_is_ours_step_by_step(pair) -> None:
    ours, theirs = pair
    used = count_kernels(theirs)
    length = max(map(len, PROMPTS))
    rows = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in PROMPTS], device="cuda")
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS], device="cuda")
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    found = theirs.generate(rows, attention_mask=mask, **settings)[:, length:].tolist()
    assert found == generate(ours, PROMPTS, max_new_tokens=12, temperature=0)
    assert "step" in used and isinstance(ours, LanguageModel)
