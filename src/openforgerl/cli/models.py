"""A model's tokenizer and chat template as a verb opens them, and what it says of them."""

from __future__ import annotations

from pathlib import Path

from openforgerl.proxy.options import ProxyOptions
from openforgerl.rendering import ChatRenderer, load_renderer


def open_renderer(directory: Path, options: ProxyOptions) -> ChatRenderer:
    """The renderer of the model directory, as `[proxy]` chooses it. InputError naming what the directory lacks."""
    return load_renderer(directory, answer_form=options.answer_form, package=options.prompt_package)


def chosen_words(renderer: ChatRenderer, options: ProxyOptions) -> str:
    """Which form of answers and which writer of prompts were chosen, from what, and how to choose others."""
    writer = "" if options.prompt_package else "; prompts by the model's own chat template"
    return (
        f"answers are read as {renderer.answer_form}{writer} "
        "[others: -s proxy.answer_form=NAME, -s proxy.prompt_package=NAME]"
    )
