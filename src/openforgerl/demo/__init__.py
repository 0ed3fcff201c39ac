"""The shipped demonstration: terminal task families, their bundled tasks, and a tiny base model.

Importing this package or its task modules needs neither torch nor transformers; only `pretrain` and
`optim` import torch.
"""
