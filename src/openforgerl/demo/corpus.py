"""Synthetic text for pre-training: shell-like documents and tool calls, none of them a demo task.

A document is a list of (text, kind): `GIVEN` cannot be foretold and carries no loss, `DUE` follows from
the form, `COPIED` repeats a name that stands earlier in the document. What the base model is to learn
here is to carry names over, and to follow an instruction with a tool call behind a harness's prompt, on errands that
are in no demo family. What "copy", "rename" or "count" ask for is left to the demo's own fine-tuning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from openforgerl.demo import tiny
from openforgerl.demo.errands import errand
from openforgerl.demo.phrasing import HELD_OUT_PHRASING, PHRASINGS
from openforgerl.demo.words import EXTENSIONS, NOUNS, syllable_name

GIVEN, DUE, COPIED = 0, 1, 2
Document = list[tuple[str, int]]

_SYLLABLE_SHARE = 0.2
"""Share of names made of syllables, so that copying does not hang on the nouns alone."""


def name(rng: Random) -> str:
    """A noun, or now and then a made-up name."""
    return syllable_name(rng) if rng.random() < _SYLLABLE_SHARE else rng.choice(NOUNS)


def file_name(rng: Random) -> str:
    """A name with an extension."""
    return f"{name(rng)}.{rng.choice(EXTENSIONS)}"


def _names(rng: Random, low: int, high: int) -> list[str]:
    return [name(rng) for _ in range(rng.randint(low, high))]


def _joined(parts: list[str], kind: int, separator: str = " ") -> Document:
    document: Document = []
    for place, part in enumerate(parts):
        if place:
            document.append((separator, DUE if kind else GIVEN))
        document.append((part, kind))
    return document


def _repeated_list(rng: Random) -> Document:
    names, separator = _names(rng, 2, 6), rng.choice((" ", "\n", ", "))
    head = rng.choice(("list", "echo", "names"))
    return [
        (f"{head} ", GIVEN),
        *_joined(names, GIVEN, separator),
        ("\nagain ", DUE),
        *_joined(names, COPIED, separator),
    ]


def _key_values(rng: Random) -> Document:
    table = {name(rng): name(rng) for _ in range(rng.randint(2, 5))}
    document: Document = [(f"{key}={value}\n", GIVEN) for key, value in table.items()]
    for key in rng.choices(list(table), k=rng.randint(1, 3)):
        document += [(f"get {key}", GIVEN), (" -> ", DUE), (table[key], COPIED), ("\n", DUE)]
    return document


def _transcript(rng: Random) -> Document:
    texts = {file_name(rng): _names(rng, 1, 3) for _ in range(rng.randint(2, 3))}
    document: Document = [("$ ls\n", GIVEN), *_joined(list(texts), GIVEN, "\n")]
    for path, words in texts.items():
        document += [("\n$ ", DUE), (f"cat {path}\n", GIVEN), *_joined(words, GIVEN, "\n")]
    for path in rng.choices(list(texts), k=rng.randint(1, 2)):
        word = rng.choice(texts[path])
        holder = next(path for path, words in texts.items() if word in words)
        document += [("\n$ ", DUE), (f"grep -l {word} *", GIVEN), ("\n", DUE), (holder, COPIED)]
    return document


def _echo_and_cat(rng: Random) -> Document:
    path, words = file_name(rng), _names(rng, 1, 3)
    return [
        ("$ echo ", GIVEN),
        *_joined(words, GIVEN),
        (f" > {path}", GIVEN),
        ("\n$ cat ", DUE),
        (path, COPIED),
        ("\n", DUE),
        *_joined(words, COPIED),
    ]


def _sentence_to_json(rng: Random) -> Document:
    keys = rng.sample(("item", "from", "old", "place", "key", "owner", "part", "size"), 2)
    values = [rng.choice((name, file_name))(rng) for _ in keys]
    document: Document = [(f"The {keys[0]} is {values[0]} and the {keys[1]} is {values[1]}.\n", GIVEN)]
    order = [0, 1] if rng.random() < 0.5 else [1, 0]
    document += [('{"', DUE), (keys[order[0]], GIVEN), ('": "', DUE), (values[order[0]], COPIED)]
    return [*document, ('", "', DUE), (keys[order[1]], COPIED), ('": "', DUE), (values[order[1]], COPIED), ('"}', DUE)]


def _numbered_lines(rng: Random) -> Document:
    names = _names(rng, 2, 6)
    document: Document = []
    for number, word in enumerate(names, 1):
        document += [(f"{number} ", DUE), (f"{word}\n", GIVEN)]
    for place in (rng.randrange(len(names)) for _ in range(rng.randint(1, 3))):
        document += [(f"line {place + 1}", GIVEN), (": ", DUE), (names[place], COPIED), ("\n", DUE)]
    return document


def _slots(rng: Random) -> Document:
    """Two or three named places in a sentence, then a pattern to fill: what every command line needs."""
    letters = rng.sample("ABC", rng.randint(2, 3))
    values = {letter: rng.choice((name, file_name))(rng) for letter in letters}
    verb = rng.choice(("let", "set", "take"))
    sentence = ", ".join(f"{letter} is {value}" for letter, value in values.items())
    document: Document = [(f"{verb} {sentence}.\n", GIVEN)]
    for _ in range(rng.randint(1, 2)):
        order = rng.sample(letters, rng.randint(1, len(letters)))
        wanted = [values[letter] for letter in order]
        document += [(f"{' '.join(order)}:", GIVEN), (" ", DUE), *_joined(wanted, COPIED), ("\n", DUE)]
    return document


_PLAIN: tuple[Callable[[Random], Document], ...] = (
    _repeated_list,
    _repeated_list,
    _repeated_list,
    _key_values,
    _transcript,
    _echo_and_cat,
    _sentence_to_json,
    _numbered_lines,
    _slots,
)


def plain_document(rng: Random) -> Document:
    """One shell-like document, closed by the end-of-text token."""
    return [*rng.choice(_PLAIN)(rng), ("<|endoftext|>", DUE)]


_COMMANDS: tuple[str, ...] = (
    "ls {0}",
    "cat {0} {1}",
    "diff {0} {1}",
    "file {0}",
    "stat {0}",
    "du {0} > {1}",
    "cut -c 1 {0} > {1}",
    "tr a b < {0} > {1}",
    "test -f {0}",
    "paste {0} {1} > {2}",
    "ln {0} {1}",
    "echo {0} {1}",
    "tar cf {0} {1}",
    "touch {0} {1}",
    "cmp {0} {1}",
    "nl {0} > {1}",
    "{0} {1} {2}",
    "{0} -{3} {1}",
    "{0} < {1} > {2}",
    "{0} s/{1}/{2}/ {3}",
    "{0} {1}/{2}",
)
"""Command lines for calls dictated word by word; those that solve a demo family are not among them."""

_ASKS: tuple[str, ...] = ("Run {0}", "Please run {0}", "Use the tool: {0}", "{0}", "The command is {0}")


def _call(tool: str, **arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _text(rng: Random) -> str:
    return "".join(f"{word}\n" for word in _names(rng, 1, 3))


def _dictated_command(rng: Random) -> list[dict[str, Any]]:
    parts = [rng.choice((name, file_name))(rng) for _ in range(4)]
    command = rng.choice(_COMMANDS).format(*parts)
    result = rng.choice(("(no output)", "(no output)", _text(rng), "\n\nCommand exited with code 1"))
    return [
        {"role": "user", "content": rng.choice(_ASKS).format(command)},
        _call("bash", command=command),
        {"role": "tool", "content": result},
    ]


def _slotted_command(rng: Random) -> list[dict[str, Any]]:
    """A sentence that names the parts in one order, a call that needs them in another."""
    verb, parts = name(rng), [rng.choice((name, file_name))(rng) for _ in range(2)]
    order = rng.choice(((0, 1), (1, 0)))
    sentence = rng.choice(("{0} with first {1} and second {2}.", "Do {0}: first {1}, second {2}.")).format(
        verb, parts[order[0]], parts[order[1]]
    )
    if order == (1, 0):
        sentence = sentence.replace("first", "third").replace("second", "first").replace("third", "second")
    return [
        {"role": "user", "content": sentence},
        _call("bash", command=f"{verb} {parts[0]} {parts[1]}"),
        {"role": "tool", "content": rng.choice(("(no output)", _text(rng)))},
    ]


_FILLERS: tuple[str, ...] = ("the", "file", "and", "in", "of", "with", "a", "new", "then", "it", "for", "one")
_JOINTS: tuple[tuple[str, str], ...] = (("", " "), ("to", " > "), ("from", " < "))
"""What may stand before a name, and how the command joins that name on."""


def _picked_command(rng: Random) -> list[dict[str, Any]]:
    """Names strewn among small words; the call wants the names alone, in their order."""
    said = [command := name(rng)]
    for place in range(rng.choice((1, 2, 2, 3))):
        part = rng.choice((name, file_name, file_name))(rng)
        word, joint = rng.choice(_JOINTS) if place else _JOINTS[0]
        said += [*rng.choices(_FILLERS, k=rng.randint(0, 3)), word, part]
        command += joint + part
    return [
        {"role": "user", "content": f"{' '.join(filter(None, said))}."},
        _call("bash", command=command),
        {"role": "tool", "content": rng.choice(("(no output)", _text(rng)))},
    ]


def _errand(rng: Random) -> list[dict[str, Any]]:
    """An instruction in plain words for work that is in no demo family."""
    slots = {slot: file_name(rng) for slot in "abc"} | {slot: name(rng) for slot in "dwv"}
    said, command = errand(rng, slots | {"k": str(rng.randint(2, 9))})
    quiet = " > " in command or " >> " in command
    return [
        {"role": "user", "content": said},
        _call("bash", command=command),
        {"role": "tool", "content": "(no output)" if quiet else rng.choice(("(no output)", _text(rng)))},
    ]


def _question_about_a_result(rng: Random, part: str, path: str) -> tuple[str, str, list[str], str]:
    """(what the user says, the first command, its result's lines, the answer that stands in them)."""
    kind = rng.randrange(3)
    if kind == 0:
        words = _names(rng, 2, 3)
        rows = [f"{word} {name(rng)}" for word in words]
        asked = rng.randrange(len(rows))
        said = f"Read {part}. Which word comes after {words[asked]}? Write it to {path}."
        return said, f"cat {part}", rows, rows[asked].split()[1]
    lines = [rng.choice((name, file_name))(rng) for _ in range(rng.choice((1, 2, 3)))]
    answer, which = rng.choice(((lines[0], "first"), (lines[-1], "last")))
    if kind == 1:
        verb = name(rng)
        return f"Do {verb} {part}, then put the {which} answer in {path}.", f"{verb} {part}", lines, answer
    wording = rng.choice(("Read {0} and save its {1} line in {2}.", "Look at {0} and write its {1} line to {2}."))
    return wording.format(part, which, path), f"cat {part}", lines, answer


def _two_calls(rng: Random, harness: str) -> list[dict[str, Any]]:
    """The second call carries a name from the first one's result."""
    part, path = file_name(rng), file_name(rng)
    said, command, lines, answer = _question_about_a_result(rng, part, path)
    first, second, result = (
        _call("bash", command=command),
        _call("bash", command=f"echo {answer} > {path}"),
        "(no output)",
    )
    if harness == "pi":
        first = _call("read", path=part) if command == f"cat {part}" else first
        second, result = _call("write", path=path, content=answer), f"Successfully wrote to {path}"
    return [
        {"role": "user", "content": said},
        first,
        {"role": "tool", "content": "".join(f"{line}\n" for line in lines)},
        second,
        {"role": "tool", "content": result},
    ]


def _dictated_write(rng: Random) -> list[dict[str, Any]]:
    path, text = file_name(rng), " ".join(_names(rng, 1, 3))
    ask = rng.choice(("path {0} content {1}", "content {1} path {0}", "Use the tool: path {0}, content {1}"))
    return [
        {"role": "user", "content": ask.format(path, text)},
        _call("write", path=path, content=text),
        {"role": "tool", "content": f"Successfully wrote to {path}"},
    ]


def _dictated_read(rng: Random) -> list[dict[str, Any]]:
    path = file_name(rng)
    return [
        {"role": "user", "content": rng.choice(("path {0}", "Use the tool: path {0}", "Show {0}")).format(path)},
        _call("read", path=path),
        {"role": "tool", "content": _text(rng)},
    ]


def conversation(rng: Random, harness: str) -> list[dict[str, Any]]:
    """User turn, one or two calls with what the user dictated, their results, and "Done."."""
    if rng.random() < 0.2:
        turns = _two_calls(rng, harness)
    elif rng.random() < 0.55:
        turns = _errand(rng)
    else:
        kinds = [_dictated_command, _slotted_command, _picked_command, _picked_command]
        kinds += [_dictated_write, _dictated_write, _dictated_read] if harness == "pi" else []
        turns = rng.choice(kinds)(rng)
    return [*turns, {"role": "assistant", "content": "Done."}]


def tokenizer_texts(seed: int) -> Iterator[str]:
    """Texts whose words become the vocabulary: documents, prompts, training wordings, and every noun in use."""
    rng = Random(seed)
    for harness in ("pi", "react"):
        prompt = tiny.harness_prompt(harness)
        yield from _without_added_tokens(tiny.render([{"role": "system", "content": prompt["system"]}]) * 50)
    yield from _without_added_tokens(tiny.render([], [{}]) * 50)
    for _ in range(6000):
        yield from _without_added_tokens("".join(text for text, _ in plain_document(rng)))
        yield from _without_added_tokens(tiny.render(conversation(rng, "pi")))
    for wordings in PHRASINGS.values():
        for wording in wordings[:HELD_OUT_PHRASING]:
            yield from [wording] * 20
    yield from [" ".join(NOUNS)] * 20
    yield from ["wc -l < sed -n -i p s echo $(($(paste -sd+ a))) > mkdir -p sort grep rm mv cp ENOENT"] * 20


def _without_added_tokens(text: str) -> list[str]:
    return re.split("|".join(map(re.escape, tiny.ADDED_TOKENS)), text)
