"""One config for both trainers: what `train grpo` and `train sft` mean in veRL's words. Imports nothing of veRL.

A veRL run is a command with Hydra overrides. Ours come first and the `[verl]` table after them, so that the table
wins; veRL refuses a key that it does not know. A key that veRL's files do not list, though its code reads it, is
written with a `+`, as in Hydra: `"+attn_implementation" = "sdpa"`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openforgerl.errors import ConfigError
from openforgerl.training.configs import GrpoConfig, SftConfig
from openforgerl.training.options import GrpoOptions, LearnerOptions, LoraOptions
from openforgerl.training.verl.runs import CHECKPOINTS, METRICS
from openforgerl.types import JsonValue

MODULE = "openforgerl.training.verl.main"
"""veRL's `main_ppo` with the check of served weights; run as `python -m`."""
SFT_MODULE = "verl.trainer.sft_trainer"
_AGGREGATION = {"token_mean": "token-mean", "rollout_mean": "seq-mean-token-mean"}
"""Ours → veRL's. veRL's weighs rows alike where ours weighs rollouts alike: the same while a rollout is one row."""

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
"""Text that Hydra takes without quotes..."""
_NOT_TEXT = ("true", "false", "null", "nan", "inf")
"""...unless it would be read as one of these."""

Overrides = dict[str, JsonValue]
"""Dotted key, maybe with a leading `+`, → value."""


def grpo_overrides(config: GrpoConfig, folder: Path, *, tasks: int) -> Overrides:
    """Everything that a GRPO run passes to veRL. `tasks`: how many there are to train on.

    Raises ConfigError naming the option that veRL has no word for.
    """
    options = config.train
    context = config.engine.context_length or _context_length(Path(config.engine.path))
    if options.groups_per_step > tasks:
        raise ConfigError(f"train.groups_per_step is {options.groups_per_step}, but there are only {tasks} tasks")
    if options.shuffle_rewards:
        raise ConfigError("train.shuffle_rewards is the embedded trainer's; veRL cannot do it")
    ours: Overrides = {
        "+openforgerl.run": str(folder.resolve()),
        "+openforgerl.served_difference": options.served_difference,
        "data.train_files": str(folder.resolve() / "config.json"),
        "data.val_files": str(folder.resolve() / "config.json"),
        "data.custom_cls.path": "pkg://openforgerl.training.verl.dataset",
        "data.custom_cls.name": "TaskPrompts",
        "data.train_batch_size": options.groups_per_step,
        "data.seed": config.seed + options.seed,
        "data.dataloader_num_workers": 0,
        "data.max_prompt_length": max(1, context - config.rollout.max_output_tokens),
        "data.max_response_length": min(context, config.rollout.max_output_tokens),
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class": (
            "openforgerl.training.verl.agent_loops.AgentLoops"
        ),
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": options.group_size,
        "actor_rollout_ref.rollout.temperature": options.learner.temperature,
        "actor_rollout_ref.rollout.calculate_log_probs": True,
        "actor_rollout_ref.rollout.max_model_len": context,
        "actor_rollout_ref.model.path": config.engine.path,
        "trainer.total_training_steps": options.steps,
        "trainer.total_epochs": options.steps,  # never the shorter bound: a step is at most an epoch
        "trainer.default_local_dir": str(folder.resolve() / CHECKPOINTS),
        "trainer.max_actor_ckpt_to_keep": options.keep_checkpoints,
        "trainer.resume_mode": "auto",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": 1,
        "trainer.logger": ["console", "file"],
        "trainer.project_name": "openforgerl",
        "trainer.experiment_name": folder.name,
        # The file logger's place is read where veRL's task runner is, which may be another machine.
        "+ray_kwargs.ray_init.runtime_env.env_vars": {"VERL_FILE_LOGGER_PATH": str(folder.resolve() / METRICS)},
        # A group that could not be completed is replaced by another task's, never trained with what there is of it.
        "trainer.v1.sampler.sync_refill_failed_groups": True,
    }
    ours |= _policy_loss(options) | _rows(options.learner, context)
    ours |= _adapter(options.learner.lora, "actor_rollout_ref.model")
    return _merged(ours, config.verl)


def sft_overrides(config: SftConfig, data: Path, out: Path, model: Path) -> Overrides:
    """Everything that an SFT run passes to veRL. `data`: a `verl-sft` file."""
    options = config.sft
    optimizer = options.learner.optimizer
    if optimizer.kind != "adamw":
        raise ConfigError("sft.learner.optimizer.kind: veRL has no muon; set it to adamw, and lr with it (1e-3, say)")
    if options.aggregation != "token_mean":
        raise ConfigError(f"sft.aggregation: veRL's SFT weighs tokens alike (token_mean), not {options.aggregation}")
    context = _context_length(model)
    ours: Overrides = {
        "data.train_files": str(data.resolve()),
        "data.custom_cls.path": "pkg://openforgerl.training.exact_rows",
        "data.custom_cls.name": "ExactRows",
        "data.train_batch_size": options.batch_samples,
        "data.max_length": context,
        "data.max_token_len_per_gpu": max(context, options.learner.micro_batch_tokens),
        "data.pad_mode": "no_padding",
        "data.num_workers": 0,
        "model.path": str(model),
        "optim.lr": optimizer.lr,
        "optim.weight_decay": optimizer.weight_decay,
        "optim.betas": list(optimizer.betas),
        "optim.lr_warmup_steps": optimizer.warmup_steps,
        "optim.clip_grad": optimizer.max_grad_norm,
        "trainer.total_training_steps": options.steps,
        "trainer.total_epochs": options.steps,
        "trainer.save_freq": options.validate_every,
        "trainer.test_freq": -1,
        "trainer.seed": options.seed,
        "trainer.default_local_dir": str(out.resolve()),
        "trainer.logger": ["console", "file"],
        "trainer.project_name": "openforgerl",
        "trainer.experiment_name": out.name,
        "trainer.resume_mode": "auto",
    }
    return _merged(ours | _adapter(options.learner.lora, "model"), config.verl, cpu=_SFT_CPU)


def arguments(overrides: Overrides) -> list[str]:
    """Hydra's words for the overrides, one a key."""
    return [f"{key}={_word(value)}" for key, value in overrides.items()]


def environment(overrides: Overrides, folder: Path) -> dict[str, str]:
    """Variables that veRL's processes need besides our own."""
    from_file = {"VERL_FILE_LOGGER_PATH": str(folder.resolve() / METRICS), "RAY_USAGE_STATS_ENABLED": "0"}
    if overrides.get("trainer.device") == "cpu":
        from_file |= {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}
    return from_file


def _policy_loss(options: GrpoOptions) -> Overrides:
    aggregation = _AGGREGATION.get(options.aggregation)
    if aggregation is None:
        raise ConfigError(
            f"train.aggregation: veRL has no {options.aggregation}; use {' or '.join(_AGGREGATION)}, or our own trainer"
        )
    optimizer = options.learner.optimizer
    if optimizer.kind != "adamw":
        raise ConfigError("train.learner.optimizer.kind: veRL has no muon; set it to adamw")
    if options.groups_per_step % options.updates_per_step:
        raise ConfigError("train.updates_per_step must divide train.groups_per_step when veRL trains")
    actor = "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": options.normalise_std,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": 2.0,
        f"{actor}.ppo_mini_batch_size": options.groups_per_step // options.updates_per_step,
        f"{actor}.clip_ratio_low": options.clip_low,
        f"{actor}.clip_ratio_high": options.clip_high,
        f"{actor}.clip_ratio_c": options.clip_dual,
        f"{actor}.loss_agg_mode": aggregation,
        f"{actor}.use_kl_loss": False,
        f"{actor}.grad_clip": optimizer.max_grad_norm,
        f"{actor}.optim.lr": optimizer.lr,
        f"{actor}.optim.weight_decay": optimizer.weight_decay,
        f"{actor}.optim.betas": list(optimizer.betas),
        f"{actor}.optim.lr_warmup_steps": optimizer.warmup_steps,
    }


def _rows(learner: LearnerOptions, context: int) -> Overrides:
    """Micro-batches by tokens, because rows of agents differ a hundredfold in length."""
    most = max(context, learner.micro_batch_tokens)
    return {
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": most,
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": most,
    }


def _adapter(lora: LoraOptions | None, model: str) -> Overrides:
    """Servers get the sum of base and adapter, as with our own trainer: the record knows one set of weights."""
    if lora is None:
        return {}
    if not float(lora.alpha).is_integer():
        raise ConfigError(f"learner.lora.alpha: veRL takes whole numbers, not {lora.alpha}")
    return {
        f"{model}.lora_rank": lora.rank,
        f"{model}.lora_alpha": int(lora.alpha),
        f"{model}.target_modules": list(lora.targets) or "all-linear",
        f"{model}.lora.merge": True,
    }


_CPU: Overrides = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "+ray_kwargs.ray_init.num_gpus": 1,  # a logical slot (cpu.CpuPlatform)
    "ray_kwargs.ray_init.num_cpus": 16,  # slots too: veRL's actors ask for one each and mostly wait
    "+ray_kwargs.ray_init.include_dashboard": False,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "actor_rollout_ref.rollout.name": "openforgerl_torch",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.model.use_remove_padding": False,
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
    # The reference model has settings of its own; in bf16 it is another model than the one it is compared with.
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.ref.fsdp_config.model_dtype": "fp32",
    "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
    "+actor_rollout_ref.ref.fsdp_config.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
}
"""What a run without an accelerator needs; all of it in fp32, so that log-probs agree to rounding."""

_SFT_CPU: Overrides = {
    "trainer.n_gpus_per_node": 1,
    "model.use_remove_padding": False,
    "+model.override_config.attn_implementation": "sdpa",
    "model.enable_gradient_checkpointing": False,
    "engine.strategy": "fsdp2",
    "engine.model_dtype": "fp32",
    "engine.dtype": "float32",
    "engine.use_torch_compile": False,
    "+engine.mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
}


def _merged(ours: Overrides, table: Mapping[str, JsonValue], cpu: Overrides = _CPU) -> Overrides:
    """Ours, the CPU's when the table asks for that device, then the table; a key of the table replaces ours."""
    theirs = _flat(table)
    if theirs.get("trainer.device") == "cpu":
        ours = ours | cpu
    bare = {key.lstrip("+") for key in theirs}
    return {key: value for key, value in ours.items() if key.lstrip("+") not in bare} | theirs


def _flat(table: Mapping[str, Any], path: Sequence[str] = ()) -> Overrides:
    """`{"a": {"+b": 1}}` as `{"+a.b": 1}`."""
    flat: Overrides = {}
    for key, value in table.items():
        here = (*path, key)
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, here)
            continue
        plus = "+" if any(part.startswith("+") for part in here) else ""
        flat[plus + ".".join(part.lstrip("+") for part in here)] = value
    return flat


def _word(value: JsonValue) -> str:
    """A value in Hydra's grammar of overrides: `null`, `true`, `3`, `'text'`, `[...]`, `{key:value}`."""
    match value:
        case str() if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
            return value
        case str():
            # In quotes a backslash means itself, unless it stands before a quote or at the end.
            return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
        case list() | tuple():
            return "[" + ",".join(map(_word, value)) + "]"
        case dict():
            return "{" + ",".join(f"{key}:{_word(item)}" for key, item in value.items()) + "}"
        case _:
            return json.dumps(value)


def _context_length(model: Path) -> int:
    """Positions of the model in a directory. ConfigError when its config does not say."""
    try:
        known = json.loads((model / "config.json").read_bytes())
        text = known.get("text_config", known)
        return int(text["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model}/config.json does not say max_position_embeddings ({error!r}): set engine.context_length"
        ) from error
