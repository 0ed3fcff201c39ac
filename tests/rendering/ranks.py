"""A byte-level BPE tokenizer from a tiktoken file, which lists tokens by rank and names no merges."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_SHOWN = [*chain(range(33, 127), range(161, 173), range(174, 256))]
"""Bytes that byte-level BPE writes as the character of their own number; the others come after 255, in order."""
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_LETTERS = {**{byte: chr(byte) for byte in _SHOWN}, **{byte: chr(256 + at) for at, byte in enumerate(_HIDDEN)}}


def tokenizer_of_ranks(file: Path, pattern: str, added: Iterable[tuple[str, bool]]) -> Tokenizer:
    """`pattern` splits text first (NFC). `added`: tokens behind the ranked ones, in order, and whether each is special.

    A token can be made of any two others whose bytes are its own, as far as their ranks allow: all these are merges,
    in the order of what they make.
    """
    lines = [line.split() for line in file.read_bytes().splitlines() if line]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    merges: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    names = {token: "".join(_LETTERS[byte] for byte in token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, [(names[a], names[b]) for a, b in merges], ignore_merges=True))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in added])
    return made
