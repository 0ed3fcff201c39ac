"""TRL's own SFTTrainer on our `trl` file: the ids and the mask arrive, and the loss is our learner's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # other people's code
]


def test_trl_trains_on_the_tokens_that_the_file_says(tmp_path: Path, records: Any, tiny: Path) -> None:
    pytest.importorskip("trl", reason="pip install trl==1.16.0, with datasets and accelerate")
    import torch  # noqa: PLC0415  (slow to import)
    from datasets import load_dataset  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
    from trl import SFTConfig, SFTTrainer  # noqa: PLC0415

    from openforgerl.formats import open_writer  # noqa: PLC0415
    from openforgerl.training.learner import Learner  # noqa: PLC0415
    from openforgerl.training.objectives import Likelihood  # noqa: PLC0415
    from openforgerl.training.options import LearnerOptions  # noqa: PLC0415

    file = tmp_path / "rows.jsonl"
    with open_writer("trl", file, None) as writer:
        for record in records:
            writer.add(record)
        writer.close()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    options = SFTConfig(
        output_dir=str(tmp_path / "out"), completion_only_loss=True, max_steps=1, learning_rate=0.0, use_cpu=True,
        per_device_train_batch_size=len(rows), report_to=[], max_length=None, bf16=False, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32),
        args=options,
        train_dataset=load_dataset("json", data_files=str(file), split="train"),
        processing_class=AutoTokenizer.from_pretrained(tiny),
    )
    (batch,) = list(trainer.get_train_dataloader())
    got = {
        tuple(ids[mask.bool()].tolist()): tuple((labels[mask.bool()] != -100).int().tolist())
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    }
    assert got == {tuple(row["input_ids"]): tuple(row["completion_mask"]) for row in rows}
    loss = trainer.train().training_loss
    ours = [sample for record in records for sample in record.samples.samples if sample.trained_tokens]
    learner = Learner(tiny, LearnerOptions())
    assert loss == pytest.approx(learner.step(ours, Likelihood()).loss, rel=1e-4)
