"""A model's chat template and tokenizer as ids, both ways: token-in/token-out (DESIGN §5). Pure."""

from openforgerl.rendering.loading import load_renderer
from openforgerl.rendering.renderer import ChatRenderer

__all__ = ["ChatRenderer", "load_renderer"]
