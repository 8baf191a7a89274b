"""Run as a file by a Python without our package (-S -P): exported folders through transformers alone.

Arguments: a folder of exchange, then what stands in sys.path. For each folder named in request.json it answers, in
answer.json and answer.safetensors, with what a user would get. No import of ours: it must not be there.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def answer(folder: str, request: dict[str, Any], exchange: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model of a folder gives: plain values, and tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {"trust_remote_code": True, "dtype": "auto"}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    ids, prompts = torch.tensor(request["input_ids"]), request["prompts"]
    padded, mask = pad(torch, prompts)
    length = padded.shape[1]

    def generate(ids, **more):
        new = {"max_new_tokens": request["max_new_tokens"], "do_sample": False, "eos_token_id": None}
        return model.generate(ids, **new, **more)

    with torch.no_grad():
        logits = model(ids).logits
        masked = model(padded, attention_mask=mask).logits
    batched = {use_cache: generate(padded, attention_mask=mask, use_cache=use_cache) for use_cache in (True, False)}
    beams = [generate(padded, attention_mask=mask, num_beams=3, use_cache=use_cache) for use_cache in (True, False)]
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.eval().save_pretrained(exchange / "again")
    again = AutoModelForCausalLM.from_pretrained(exchange / "again", **settings)
    with torch.no_grad():
        again_logits = again(ids).logits
    values = {
        "load_problems": [name for names in info.values() for name in names],
        "dtype": str(model.dtype),
        "is_tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
        "loss": loss.item(),
        "batched": batched[True][:, length:].tolist(),
        "batched_without_cache": batched[False][:, length:].tolist(),
        "alone": [generate(torch.tensor([prompt]))[0, len(prompt) :].tolist() for prompt in prompts],
        "beams": beams[0].tolist(),
        "beams_without_cache": beams[1].tolist(),
    }
    tensors = {"logits": logits, "masked": masked, "again": again_logits, **gradients}
    return values, {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def pad(torch: Any, prompts: list[list[int]]) -> tuple[Any, Any]:
    """Prompts with padding on the left, and its mask."""
    length = max(map(len, prompts))
    rows = [[0] * (length - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)


def encode(folder: str, texts: list[str]) -> dict[str, Any]:
    """What the tokenizer of a folder gives."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    padded = tokenizer(["a", "a b c d"], padding=True)
    return {
        "ids": ids,
        "texts": [tokenizer.decode(one, skip_special_tokens=True) for one in ids],
        "keys": sorted(padded),
        "mask": padded["attention_mask"],
    }


def main(exchange: Path, paths: list[str]) -> None:
    """Answer the request."""
    sys.path[:0] = paths
    request = json.loads((exchange / "request.json").read_text(encoding="utf-8"))
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    answers: dict[str, Any] = {"version": transformers.__version__}
    answers["ours"] = [name for name in ("prism_lm", "launcher") if importlib.util.find_spec(name)]
    tensors: dict[str, Any] = {}
    for name, folder in request["folders"].items():
        answers[name], held = answer(folder, request, exchange)
        tensors |= {f"{name}/{key}": tensor for key, tensor in held.items()}
    answers["tokenizer"] = encode(request["tokenizer"], request["texts"])
    save_file(tensors, exchange / "answer.safetensors")
    (exchange / "answer.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
