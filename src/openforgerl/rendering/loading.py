"""A renderer from a model directory, in the files that Hugging Face models ship."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from openforgerl import plugins
from openforgerl.errors import InputError, TemplateError
from openforgerl.rendering.images import PLACEHOLDER, NoImages, Placeholders, rules_in
from openforgerl.rendering.renderer import ChatRenderer
from openforgerl.rendering.tokenizer import AddedToken, TokenCodec
from openforgerl.types import JsonValue

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_renderer(directory: Path, *, answer_form: str = "auto", package: str = "") -> ChatRenderer:
    """Read tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json; of a
    vision model also preprocessor_config.json (or processor_config.json, which transformers 5 writes instead).

    `chat_template.jinja` wins over the configuration's `chat_template`. An answer ends at the tokenizer's
    `eos_token`, at `eos_token_id` of generation_config.json (of config.json where that names none), and at every token
    that stands between turns. `answer_form` names the form of answers (see `forms`); `auto` reads it off the template.
    `package`: a format of the package `renderers` that writes prompts instead of the chat template (see `packaged`).
    Raises `InputError` naming the file that is missing or wrong.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory; give a model directory with tokenizer.json")
    source = directory / "tokenizer.json"
    if not source.is_file():
        raise InputError(f"{source} is missing: save the model with a fast tokenizer (tokenizer.json)")
    text = _text(source)
    config = _json(directory / "tokenizer_config.json") or {}
    special = _special_tokens(config, _json(directory / "special_tokens_map.json") or {})
    codec = _codec(directory, text, config, special)
    stop_ids = _stop_ids(directory, codec, special)
    added = [msgspec.to_builtins(token) for token in codec.added.values()]
    digest = hashlib.sha256(text.encode() + msgspec.json.encode(added)).hexdigest()
    templates, images = _templates(directory, config), _images(directory, codec)
    try:
        make = partial(plugins.load("renderer", "package"), package=package) if package else ChatRenderer
        return make(
            codec,
            templates,
            special_tokens=special,
            stop_ids=stop_ids,
            tokenizer_digest=digest,
            images=images,
            answer_form=answer_form,
        )
    except TemplateError as error:
        raise TemplateError(f"{directory}: {error}") from error


def _images(directory: Path, codec: TokenCodec) -> Placeholders | NoImages:
    """What this model's prompts hold for images; who refuses them where it takes none, or none that we know of."""
    name = directory.resolve().name
    path = directory / "preprocessor_config.json"
    config = _json(path)
    if config is None:
        path = directory / "processor_config.json"
        inner = (_json(path) or {}).get("image_processor")
        config = inner if isinstance(inner, dict) else None
    if config is None:
        return NoImages(name)
    rules = rules_in(config, path)
    if isinstance(rules, str):
        return NoImages(name, rules)
    token_id = (_json(directory / "config.json") or {}).get("image_token_id")
    if token_id is None:
        token_id = codec.id_of(PLACEHOLDER)
    if not isinstance(token_id, int) or token_id not in codec.added:
        raise InputError(
            f"{path} is a vision model's, but its placeholder for images is no added token of tokenizer.json; set "
            f"image_token_id in config.json, or add {PLACEHOLDER}"
        )
    return Placeholders(rules, token_id)


def _text(path: Path) -> str:
    """The text of one of a model's files. InputError naming it when it cannot be read or is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 (byte {error.start}: {error.reason}): save it as UTF-8, or copy it anew"
        ) from error


def _json(path: Path) -> dict[str, JsonValue] | None:
    if not path.is_file():
        return None
    try:
        value = msgspec.json.decode(_text(path))
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object")
    return value


def _content(token: Any) -> str | None:
    """A token's text; configurations write it as a string or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: dict[str, JsonValue], mapped: dict[str, JsonValue]) -> dict[str, str]:
    found: dict[str, str] = {}
    extra = config.get("extra_special_tokens")
    for where in (mapped, config, extra if isinstance(extra, dict) else {}):
        for name, token in where.items():
            text = _content(token)
            if text is not None and (name in _NAMED or where is extra):
                found[name] = text
    return found


def _codec(directory: Path, source: str, config: dict[str, JsonValue], special: dict[str, str]) -> TokenCodec:
    path = directory / "tokenizer_config.json"
    listed = config.get("added_tokens_decoder") or {}
    extra: list[AddedToken] = []
    try:
        for token_id, token in listed.items():
            extra.append(msgspec.convert({**token, "id": int(token_id)}, AddedToken))
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: added_tokens_decoder cannot be read: {error}") from error
    try:
        codec = TokenCodec(source, extra=extra)
    except InputError as error:
        raise InputError(f"{directory}: {error}") from error
    # A special token that is plain vocabulary in tokenizer.json still is a special token.
    known = {token.content for token in codec.added.values()}
    ids = {text: codec.id_of(text) for text in special.values() if text not in known}
    named = [AddedToken(id=i, content=text, special=True) for text, i in ids.items() if i is not None]
    return TokenCodec(source, extra=[*extra, *named]) if named else codec


def _stop_ids(directory: Path, codec: TokenCodec, special: dict[str, str]) -> tuple[int, ...]:
    found: list[int] = []
    eos = special.get("eos_token")
    if eos is not None:
        eos_id = codec.id_of(eos)
        if eos_id is None:
            raise InputError(f"{directory / 'tokenizer_config.json'}: eos_token {eos!r} is not in tokenizer.json")
        found.append(eos_id)
    generation = (_json(directory / "generation_config.json") or {}).get("eos_token_id")
    if generation is None:
        generation = (_json(directory / "config.json") or {}).get("eos_token_id")
    listed = generation if isinstance(generation, list) else [] if generation is None else [generation]
    for value in listed:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputError(f"{directory}: eos_token_id must be an integer or a list of them; got {value!r}")
        if value not in found:
            found.append(value)
    if not found:
        raise InputError(
            f"{directory}: no end-of-turn token; set eos_token in tokenizer_config.json or eos_token_id in "
            "generation_config.json"
        )
    return tuple(found)


def _templates(directory: Path, config: dict[str, JsonValue]) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    found: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif isinstance(inline, list):
        for entry in inline:
            if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
                raise InputError(f"{directory / 'tokenizer_config.json'}: chat_template entries need name and template")
            found[str(entry.get("name", "default"))] = entry["template"]
    if path.is_file():
        found["default"] = _text(path)
    if "default" not in found:
        raise InputError(f"{path} is missing and tokenizer_config.json has no chat_template: add one of them")
    return found
