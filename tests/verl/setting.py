"""A run of veRL's in a folder: tasks, a tiny model, and the one config file for both trainers."""

from __future__ import annotations

from pathlib import Path

from openforgerl.testing.tiny_model import write_tiny_model

TASK = """
schema_version = "1.4"
[task]
name = "{name}"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 30.0
[environment]
workdir = "/workspace"
"""
GRADE = """#!/bin/sh
# The share of vowels in what pi said: any model can say more of them.
all=$(tr -d '\\n' </workspace/answer.txt | wc -c)
vowels=$(tr -cd 'aeiou' </workspace/answer.txt | wc -c)
awk "BEGIN { print ($all > 0) ? $vowels / $all : 0 }" >/logs/verifier/reward.txt
"""
CONFIG = """
trainer = "verl"
seed = 5
[tasks]
path = "{tasks}"
[engine]
path = "{model}"
context_length = 2048
[harness]
name = "twice:TwicePi"
[harness.pi]
tools = ["bash"]
system_prompt = "You are an agent."
[rollout]
max_output_tokens = 24
calls = 6
[run]
concurrency = 2
refill_limit = 1
[train]
steps = {steps}
groups_per_step = 2
group_size = 4
aggregation = "token_mean"
keep_checkpoints = 3
served_difference = 1e-4
[train.learner.optimizer]
lr = 1e-3
warmup_steps = 0
[verl.trainer]
device = "cpu"
save_freq = 2
"""


def write_tasks(folder: Path, names: tuple[str, ...]) -> Path:
    """Task directories whose reward is the share of vowels in /workspace/answer.txt."""
    for name in names:
        task = folder / name.rpartition("/")[2]
        for part in ("environment/workspace", "tests", "solution"):
            (task / part).mkdir(parents=True)
        (task / "task.toml").write_text(TASK.format(name=name))
        (task / "instruction.md").write_text(f"Say a word, as in {name}.\n")
        (task / "environment" / "Dockerfile").write_text(
            "FROM scratch\nWORKDIR /workspace\nCOPY workspace /workspace\n"
        )
        (task / "environment" / "workspace" / "note.txt").write_text("nothing\n")
        (task / "tests" / "test.sh").write_text(GRADE)
        (task / "solution" / "solve.sh").write_text("#!/bin/sh\necho aeiou >/workspace/answer.txt\n")
    return folder


def write_setting(folder: Path, *, steps: int, tasks: tuple[str, ...]) -> Path:
    """The config file of a run; beside it the model and the tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tasks(folder / "tasks", tasks)
    write_tiny_model(folder / "model", seed=1)
    config = folder / "train.toml"
    config.write_text(CONFIG.format(tasks=folder / "tasks", model=folder / "model", steps=steps))
    return config
