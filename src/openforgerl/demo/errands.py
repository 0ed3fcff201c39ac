"""Terminal work that the demo does not ask for: what the base model learns to follow instructions on.

None of these commands solves a demo family, and none of the wordings is one of theirs.
"""

from __future__ import annotations

from random import Random

ERRANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "head -n {k} {a} > {b}",
        ("Take the first {k} lines of {a} and write them to {b}.", "Save the first {k} lines of {a} in {b}."),
    ),
    (
        "tail -n {k} {a} > {b}",
        ("Write the last {k} lines of {a} to {b}.", "Take the last {k} lines of {a} and save them in {b}."),
    ),
    (
        "tac {a} > {b}",
        ("Turn the lines of {a} around and write them to {b}.", "Save the lines of {a} in {b}, last line first."),
    ),
    (
        "uniq {a} > {b}",
        ("Save the lines of {a} in {b} without repeats.", "Write the lines of {a} to {b}, but each line only once."),
    ),
    (
        "nl {a} > {b}",
        ("Number the lines of {a} and write them to {b}.", "Put a number before every line of {a}, save it in {b}."),
    ),
    ("cat {a} {b} > {c}", ("Join {a} and {b} into {c}.", "Put {a} and {b} together in the new file {c}.")),
    ("paste {a} {b} > {c}", ("Paste {a} and {b} side by side into {c}.", "I need {a} next to {b} in {c}.")),
    ("cmp {a} {b}", ("Compare {a} and {b}.", "Are the files {a} and {b} the same?")),
    ("diff {a} {b} > {c}", ("Write to {c} what is new in {b} and not in {a}.", "Save how {a} and {b} differ in {c}.")),
    ("ln -s {a} {b}", ("Make a link to {a} named {b}.", "Give {a} a link {b}.", "I need a link {b} to the file {a}.")),
    ("touch {a}", ("Create the file {a} with no text.", "I need an empty file {a}, make it.")),
    ("touch {a} {b}", ("Create the empty files {a} and {b}.", "I need {a} and {b}, make them.")),
    ("chmod +x {a}", ("Make {a} executable.", "I need to run {a}, set its mode.")),
    ("chmod -w {a} {b}", ("Protect {a} and {b}.", "Nobody should write to the files {a} and {b}.")),
    ("du -b {a} > {b}", ("Write the size of {a} to {b}.", "What is the size of {a}? Save it in {b}.")),
    ("cut -c {k} {a} > {b}", ("Take letter {k} of every line of {a} and save it in {b}.", "Cut {a} at {k} into {b}.")),
    (
        "ls {d} > {b}",
        ("List the files in the folder {d} and write them to {b}.", "Which files are in {d}? Save them in {b}."),
    ),
    ("tar cf {b} {a}", ("Pack {a} into {b}.", "Put the file {a} in the archive {b}.")),
    ("gzip {a}", ("Compress {a}.", "Make the file {a} small.")),
    ("rmdir {d}/{w}", ("Take the empty folder {w} out of {d}.", "The folder {d}/{w} is empty, I do not need it.")),
    ("ls {d}/{w}/{v}", ("List the folder {d}/{w}/{v}.", "What is in the folder {d}/{w}/{v}?")),
    ("date > {a}", ("Write the date to {a}.", "What day is it? Save it in {a}.")),
    (
        "fold -w {k} {a} > {b}",
        ("Break the lines of {a} after {k} letters into {b}.", "Fold {a} at {k} and write it to {b}."),
    ),
    (
        "rev {a} > {b}",
        ("Write every line of {a} backwards to {b}.", "Turn each word of {a} around and save it in {b}."),
    ),
    ("shuf {a} > {b}", ("Mix the lines of {a} and save them in {b}.", "Put the lines of {a} in any order in {b}.")),
    (
        "split -l {k} {a} {w}",
        ("Split {a} after every {k} lines, the name is {w}.", "Break {a} into files {w} of {k} lines."),
    ),
    ("md5sum {a} > {b}", ("Write the sum of all bytes of {a} to {b}.", "Save the checksum of {a} in {b}.")),
    (
        "grep -v {w} {a} > {b}",
        ("Save the lines of {a} without {w} in {b}.", "Write to {b} the lines of {a} with no {w}."),
    ),
    ("grep -c {w} {a}", ("How often does {a} have {w}?", "In {a}, find the number of times the word {w} is there.")),
    ("seq {k} > {a}", ("Write the numbers up to {k} to {a}.", "Count from 1 to {k} and save it in {a}.")),
    ("seq {k} >> {a}", ("Write the numbers up to {k} under the text of {a}.", "Add the numbers from 1 to {k} to {a}.")),
    ("tee {b} {c} < {a}", ("Give {b} and {c} the text of {a}.", "Save the lines of {a} in {b} and in {c}.")),
    ("cat {d}/{a} > {b}", ("Take {a} out of the folder {d} and save its text in {b}.", "Write {d}/{a} to {b}.")),
    ("file {a} > {b}", ("What kind of file is {a}? Write it to {b}.", "Look at {a} and save its kind in {b}.")),
    ("echo {w} {v} | tee {a}", ("Say {w} {v} and save it in {a}.", "Say the words {w} {v}, write them to {a} too.")),
    (
        "sed -n s/{w}/{v}/p {a}",
        ("Show the lines of {a} that have {w}, with {v} for {w}.", "In {a}, which lines have {w}? Print {v} for it."),
    ),
    ("sed -i {k}d {a}", ("Take line {k} out of {a}.", "I do not need line {k} of {a}.")),
)
"""(command, its wordings). Slots: a, b, c files; d folder; w, v words; k a digit."""


def errand(rng: Random, slots: dict[str, str]) -> tuple[str, str]:
    """(what the user says, the command) for one errand with these names."""
    command, wordings = rng.choice(ERRANDS)
    return rng.choice(wordings).format_map(slots), command.format_map(slots)
