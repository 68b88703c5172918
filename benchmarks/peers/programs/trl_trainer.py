"""A GRPO trainer of TRL that trains like ours: the same adapter, loss, clipping and optimiser.

It runs in an environment that has TRL and nothing that our packages need.
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
    **arguments: Any,
) -> Any:
    """The trainer.

    Args:
        settings: see `benchmarks.peers.trl_step.trl_settings`.
        rows: the prompts, each with the columns that `reward` receives.
        arguments: further arguments of TRL's `GRPOConfig`.
    """
    # Only the benchmark's own environment has these.
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings():
        # TRL looks at the installed vLLM while it is imported; it is not used here.
        warnings.filterwarnings("ignore", "TRL currently supports vLLM", UserWarning)
        from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

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
    )
