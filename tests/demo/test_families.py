"""Families, wordings and splits: what is held out is held out."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from openforgerl.demo import bundle, families, words
from openforgerl.demo.phrasing import HELD_OUT_PHRASING, PHRASINGS
from openforgerl.errors import TaskError


def _words(wording: str) -> set[str]:
    return set(re.findall("[A-Za-z]+", re.sub(r"\{.\}", "", wording)))


def test_plan_has_the_promised_size_and_holds_out_what_it_says() -> None:
    places = list(bundle.plan())
    assert len(places) >= 80
    assert len({place.name for place in places}) == len(places)
    assert len(families.TRAINING_FAMILIES) >= 10 and len(families.HELD_OUT_FAMILIES) == 2
    for place in places:
        assert (place.family in families.HELD_OUT_FAMILIES) == (place.split == "heldout-family")
        assert (place.family in families.HARD_FAMILIES) == (place.split == "hard")
        assert (place.phrasing == HELD_OUT_PHRASING) == (place.split == "heldout-phrasing")
    splits = Counter(place.split for place in places)
    assert set(splits) == set(families.SPLIT_POOLS)


def test_no_two_bundled_tasks_ask_for_the_same_thing() -> None:
    asked = [
        families.instruction(p.family, families.build(p.family, p.split, p.seed), p.phrasing) for p in bundle.plan()
    ]
    assert len(set(asked)) == len(asked)


def test_held_out_name_combinations_never_occur_in_training() -> None:
    seen: dict[str, set[tuple[str, ...]]] = {"train": set(), "validation": set(), "heldout": set()}
    for family in families.TRAINING_FAMILIES:
        for split, seed in itertools.product(("sft", "rl", "validation", "heldout"), range(60)):
            names = families.build(family, split, seed).names
            seen[families.SPLIT_POOLS[split]].add((family, *names))
    assert all(seen.values())
    assert not seen["train"] & seen["heldout"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["heldout"]


def test_held_out_wordings_use_no_new_word() -> None:
    known = set[str]().union(*(_words(w) for f in families.TRAINING_FAMILIES for w in PHRASINGS[f][:HELD_OUT_PHRASING]))
    for family, wordings in PHRASINGS.items():
        assert len(set(wordings)) == 4
        if family in families.HARD_FAMILIES:
            continue
        held_out = wordings if family in families.HELD_OUT_FAMILIES else wordings[HELD_OUT_PHRASING:]
        for wording in held_out:
            assert _words(wording) <= known, (family, wording)


def test_a_task_is_the_same_every_time_and_differs_by_seed() -> None:
    first, again = families.build("line", "rl", 7), families.build("line", "rl", 7)
    assert first == again
    assert families.build("line", "rl", 8) != first


def test_pool_is_the_crc_of_the_names() -> None:
    # crc32(b"copy/a.txt/b.txt") = 0xebaf2e35 = 3954126389; its remainder by 20 is 9, below 14.
    assert words.pool_of("copy", ("a.txt", "b.txt")) == "train"


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("nope", "sft"),
        ("copy", "nope"),
        ("copy-into", "rl"),
        ("sum", "sft"),
        ("copy", "hard"),
        ("copy", "heldout-family"),
    ],
)
def test_a_task_that_must_not_exist_is_refused(family: str, split: str) -> None:
    with pytest.raises(TaskError):
        families.build(family, split, 1)


def test_an_unknown_wording_is_refused() -> None:
    puzzle = families.build("copy", "rl", 1)
    with pytest.raises(TaskError, match="phrasing 4"):
        families.instruction("copy", puzzle, 4)


def test_expert_speaks_each_harness_s_tools() -> None:
    write = bundle.bundled_tasks() / "sft-write-00"
    instruction = (write / "instruction.md").read_text("utf-8")
    pi = families.expert_steps(write, "pi")
    assert [step.tool for step in pi.steps] == ["write"]
    assert pi.steps[0].arguments["path"] in instruction and pi.steps[0].arguments["content"] in instruction
    react = families.expert_steps(write, "react")
    path, content = pi.steps[0].arguments["path"], pi.steps[0].arguments["content"]
    assert [(step.tool, step.arguments) for step in react.steps] == [("bash", {"command": f"echo {content} > {path}"})]
    assert pi.final == react.final == "Done."


def test_expert_of_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text('schema_version = "1.4"\n', "utf-8")
    with pytest.raises(TaskError, match="no demo task"):
        families.expert_steps(tmp_path, "pi")
