"""veRL as the trainer: the only door to verl, ray and hydra. They live in an environment of their own (docs/verl.md).

`engine`, `rows`, `command` and `verify` import none of them; the other modules are imported by veRL's processes.
"""
