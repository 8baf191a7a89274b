"""Run as a file, by a Python that can import none of our packages: loads an exported folder as its users will.

Arguments: the folder, and a folder of exchange. Reads request.json there (input_ids, texts), writes logits.safetensors
and answer.json (the tokenizer's ids of each text, and the texts that they decode to).
"""

import json
import sys
from pathlib import Path
from typing import Any

HIDDEN = ("launcher", "prism_lm", "kernels", "data_pipeline")


def main(folder: str, exchange: Path) -> None:
    """Answer the request."""
    for name in HIDDEN:
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    request: dict[str, Any] = json.loads((exchange / "request.json").read_text(encoding="utf-8"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    with torch.no_grad():
        logits = model(torch.tensor(request["input_ids"])).logits
    save_file({"logits": logits.contiguous()}, exchange / "logits.safetensors")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids: list[list[int]] = [tokenizer(text)["input_ids"] for text in request["texts"]]
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    (exchange / "answer.json").write_text(json.dumps({"ids": ids, "texts": texts}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
