"""Corpus, batches, the shared prefix and the optimizer."""

from __future__ import annotations

import re
from random import Random

import pytest
import torch

from openforgerl.demo import bundle, corpus, families, pretrain, tiny
from openforgerl.demo.phrasing import PHRASINGS


@pytest.fixture(scope="module")
def tokenizer() -> pretrain.Tokenizer:
    return tiny.train_tokenizer(corpus.tokenizer_texts(0))


def test_pretraining_text_holds_no_task() -> None:
    asked = {
        families.instruction(p.family, families.build(p.family, p.split, p.seed), p.phrasing) for p in bundle.plan()
    }
    wordings = [re.compile(re.sub(r"\\\{.\\\}", ".+", re.escape(w))) for ws in PHRASINGS.values() for w in ws]
    rng = Random(3)
    for _ in range(3000):
        for turn in corpus.conversation(rng, "pi"):
            said = turn["content"] or ""
            assert said not in asked
            assert not any(wording.fullmatch(said) for wording in wordings), said
        text = "".join(piece for piece, _ in corpus.plain_document(rng))
        assert not any(wording.search(text) for wording in wordings), text


def test_copied_pieces_stand_earlier_in_the_document() -> None:
    rng = Random(1)
    for _ in range(500):
        before = ""
        for text, kind in corpus.plain_document(rng):
            assert kind != corpus.COPIED or text in before
            before += text


def test_assistant_tokens_and_only_they_are_trained(tokenizer: pretrain.Tokenizer) -> None:
    batch = pretrain.chat_batch(tokenizer, Random(2), 4, "react")
    for ids, loss in zip(batch.ids, batch.loss, strict=True):
        said = tokenizer.decode(ids[loss].tolist(), skip_special_tokens=False)
        turn = r'<tool_call>\n\{"name": "bash", "arguments": \{"command": "[^"]+"\}\}\n</tool_call><\|im_end\|>'
        assert re.fullmatch(rf"({turn}){{1,2}}Done\.<\|im_end\|>", said)


def test_the_shared_prefix_gives_the_gradients_of_whole_rows(tokenizer: pretrain.Tokenizer) -> None:
    batch = pretrain.chat_batch(tokenizer, Random(2), 3, "pi")
    rows = torch.cat([batch.prefix.expand(3, -1), batch.ids], 1)
    blank = torch.zeros(3, batch.prefix.numel())
    whole = pretrain.Batch(batch.prefix[:0], rows, torch.cat([blank, batch.loss], 1).bool(), rows * 0)
    gradients: list[torch.Tensor] = []
    for form in (batch, whole):
        model = pretrain.fresh_model(0)
        loss, _ = pretrain.loss_of(model, form)
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 1e-4


def test_batches_repeat_with_the_seed_and_stop_at_the_budget(tokenizer: pretrain.Tokenizer) -> None:
    settings = pretrain.Settings(tokens=60_000)
    first, again = list(pretrain.batches(settings, tokenizer)), list(pretrain.batches(settings, tokenizer))
    assert all(torch.equal(a.ids, b.ids) for (_, _, a), (_, _, b) in zip(first, again, strict=True))
    stage, seen, last = first[-1]
    assert (first[0][0], stage) == ("plain", "chat")
    assert seen < 60_000 <= seen + last.tokens


def test_learning_rate_warms_up_holds_and_falls() -> None:
    settings = pretrain.Settings(tokens=1000, lr=0.01, warmup_steps=10, decay_share=0.5)
    assert settings.learning_rate(0, 0) == pytest.approx(0.001)
    assert settings.learning_rate(20, 500) == pytest.approx(0.01)
    assert settings.learning_rate(30, 750) == pytest.approx(0.005)
    assert settings.learning_rate(40, 999) == pytest.approx(0.0002)
