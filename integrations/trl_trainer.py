"""A GRPO trainer of TRL that trains like ours: the same adapter, loss, clipping and optimiser.

This module imports nothing of the project, because the benchmark's programs use it in an environment that has TRL alone.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch


def trainer_of(
    settings: dict[str, Any],
    rows: list[dict[str, Any]],
    reward: Callable[..., Any],
    folder: str,
    *,
    roll_out: Callable[..., dict[str, Any]] | None = None,
    **arguments: Any,
) -> Any:
    """The trainer.

    Args:
        settings: see `integrations.trl_grpo.trl_settings`.
        rows: the prompts, each with the columns that `reward` receives.
        roll_out: TRL's `rollout_func`; None: TRL samples completions itself, without a mask.
        arguments: further arguments of TRL's `GRPOConfig`.
    """
    # Only the extra `trl` and the benchmark's own environment have TRL.
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        # TRL looks at the installed vLLM while it is imported; it is not used here.
        warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # its default recomputes activations, which costs a third more
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings["max_gradient_norm"],
        beta=0.0,
        loss_type="bnpo",  # the mean over all tokens, as ours
        epsilon=settings["clip_low"],
        epsilon_high=settings["clip_high"],
        delta=settings["dual_clip"],
        scale_rewards="none",
        temperature=1.0,
        disable_dropout=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=settings["seed"],
        **arguments,
    )
    adapter = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=0.0,
        target_modules=settings["layers"],
        task_type="CAUSAL_LM",
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapter,
        rollout_func=roll_out,
    )
