"""How each family's instruction may be worded.

The first three wordings of a family are for training and for the ordinary held-out tasks; the last one
is held out: it appears in the split `heldout-phrasing` only. It uses no word that the others never use, for
a model of this size cannot act on a word that it never saw.
"""

from __future__ import annotations

PHRASINGS: dict[str, tuple[str, str, str, str]] = {
    "copy": (
        "Copy {a} to {b}.",
        "Make a copy of {a} named {b}.",
        "Put a copy of {a} in {b}.",
        "I need a copy of {a} named {b}.",
    ),
    "rename": (
        "Rename {a} to {b}.",
        "Change the name of {a} to {b}.",
        "Give {a} the new name {b}.",
        "Give the file {a} the name {b}.",
    ),
    "move": (
        "Move {a} into the folder {d}.",
        "Put {a} in the folder {d}.",
        "Take {a} and move it to the folder {d}.",
        "Move the file {a} to the folder {d}.",
    ),
    "delete": (
        "Delete {a} and {b}.",
        "Remove the files {a} and {b}.",
        "I do not need {a} and {b}, delete them.",
        "I do not need the files {a} and {b}, delete them.",
    ),
    "tree": (
        "Create the folder {p}.",
        "Make a new folder {p}.",
        "I need the folder {p}, create it.",
        "I need a new folder {p}, create it.",
    ),
    "write": (
        "Write the text {t} to {a}.",
        "Create {a} with the text {t}.",
        "Save the words {t} in a new file {a}.",
        "Make a new file {a} with the words {t}.",
    ),
    "append": (
        "Append the word {w} to {a}.",
        "Add a line {w} at the end of {a}.",
        "Put the word {w} at the end of {a}.",
        "Put a line {w} at the end of {a}.",
    ),
    "count": (
        "Count the lines of {a} and write the number to {b}.",
        "How many lines does {a} have? Write the number to {b}.",
        "Save the number of lines of {a} in {b}.",
        "Find the number of lines of {a} and save it in {b}.",
    ),
    "line": (
        "Write line {k} of {a} to {b}.",
        "Copy line {k} of {a} into {b}.",
        "Take line {k} of {a} and save it in {b}.",
        "Put line {k} of {a} in the new file {b}.",
    ),
    "replace": (
        "Replace {x} with {y} in {a}.",
        "In {a}, change the word {x} to {y}.",
        "Change every {x} in {a} to {y}.",
        "Change the word {x} to {y} in {a}.",
    ),
    "sort": (
        "Sort the lines of {a} and save them in {b}.",
        "Write the sorted lines of {a} to {b}.",
        "Put the lines of {a} in order and write them to {b}.",
        "Sort {a} and write the lines to {b}.",
    ),
    "find": (
        "Which file has the word {w}? Write its name to {b}.",
        "Find the file with the word {w} and save its name in {b}.",
        "Look for the word {w} in the files and write the name of the file to {b}.",
        "Find the word {w} in the files. Which file has it? Write the name to {b}.",
    ),
    "sum": (
        "Add the numbers in {a} and write the sum to {b}.",
        "Write the sum of the numbers in {a} to {b}.",
        "What is the sum of {a}? Save it in {b}.",
        "Find the sum of the numbers in {a} and save it in {b}.",
    ),
    "lookup": (
        "Read {a} and write the value of {k} to {b}.",
        "What is the value of {k} in {a}? Save it in {b}.",
        "Look up {k} in {a} and write its value to {b}.",
        "Find the value of {k} in {a} and write it to {b}.",
    ),
    "copy-into": (
        "Copy {a} into the folder {d}.",
        "Put a copy of {a} in the folder {d}.",
        "Make a copy of {a} in the folder {d}.",
        "I need a copy of {a} in the folder {d}.",
    ),
    "append-count": (
        "Append the number of lines of {a} to {b}.",
        "Put the number of lines of {a} at the end of {b}.",
        "Count the lines of {a} and save the number at the end of {b}.",
        "Add a line at the end of {b}: the number of lines of {a}.",
    ),
}
HELD_OUT_PHRASING = 3
"""Index of the wording that training never shows."""
