"""OpenForgeRL: train language-model agents inside the real harness they ship in (arXiv 2607.21557)."""

__version__ = "0.1.0"
