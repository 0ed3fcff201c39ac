"""A model's tokenizer and chat template as a verb opens them, and what it says of them."""

from __future__ import annotations

from pathlib import Path

from openforgerl.errors import TemplateError
from openforgerl.proxy.options import ProxyOptions
from openforgerl.rendering import ChatRenderer, load_renderer
from openforgerl.types import Conversation, Message, Role, Text, ToolSpec


def open_renderer(directory: Path, options: ProxyOptions) -> ChatRenderer:
    """The renderer of the model directory, as `[proxy]` chooses it. InputError naming what the directory lacks."""
    return load_renderer(directory, answer_form=options.answer_form, package=options.prompt_package)


def chosen_words(renderer: ChatRenderer, options: ProxyOptions) -> str:
    """Which form of answers and which writer of prompts were chosen, from what, and how to choose others."""
    writer = "" if options.prompt_package else "; prompts by the model's own chat template"
    blind = "" if shows_tools(renderer) else ", which never tells the model of its tools"
    return (
        f"answers are read as {renderer.answer_form}{writer}{blind} "
        "[others: -s proxy.answer_form=NAME, -s proxy.prompt_package=NAME]"
    )


def shows_tools(renderer: ChatRenderer) -> bool:
    """Whether a prompt says which tools are on offer. Some templates leave that to whoever writes the system prompt."""
    name = "open_the_pod_bay_doors"
    raw = {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
    asked = (Message(role=Role.USER, parts=(Text("Hello."),)),)
    conversation = Conversation(messages=asked, tools=(ToolSpec(name=name, description=name, raw=raw),))
    try:
        prompt = renderer.render(conversation, restored={}, clock=0.0, kwargs={})
    except TemplateError:  # it refuses them
        return False
    return name in renderer.decode(prompt.ids)
