"""The mask and the legal tables with the vocabulary of a real model: Tekken's 131,072 ids, which `mistral_common` ships.

The model is a small Qwen3 with random weights. A head of this size makes each pass longer, and orders have more tokens than with
the tokenizer of the tiny model.
"""

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, quantiles

from benchmarks.decode_cases import PROMPTS, SHAPES, SHORT_PROMPT, played_positions, rollout_cases
from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from decoding.model_files import make_whole
from game.legal import LegalOrders
from inference.settings import InferenceSettings
from inference.vllm_arguments import may_jump
from rollouts.fork import Tokens

_FILE = "tekken_240911.json"
_HIDDEN, _LAYERS, _HEAD_WIDTH = 128, 4, 32


def make_large_vocabulary_model(root: Path) -> Path:
    """The folder of the model under `root`; a missing one is made, which takes about 20 seconds.

    Returns:
        a folder in the layout of `save_pretrained`.
    """
    import mistral_common
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    def make(folder: Path) -> None:
        convert_tekken_tokenizer(str(Path(mistral_common.__file__).parent / "data" / _FILE)).save_pretrained(str(folder))
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=131_072,
            hidden_size=_HIDDEN,
            intermediate_size=3 * _HIDDEN,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HIDDEN // _HEAD_WIDTH,
            num_key_value_heads=_HIDDEN // _HEAD_WIDTH // 2,
            head_dim=_HEAD_WIDTH,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=None,
            dtype="float32",
        )
        Qwen3ForCausalLM(config).save_pretrained(str(folder))

    return make_whole(root / "random-tekken-131k", "config.json", make)


async def large_vocabulary_figures(settings: InferenceSettings, root: Path, *, rounds: int, seed: int) -> dict[str, float]:
    """Cost of the mask with 131,072 ids, with prefill and for decoding alone, and times of a legal table."""
    from benchmarks.decode import masked_over_unmasked
    from inference.embedded import EmbeddedEngine

    folder = make_large_vocabulary_model(root)
    tokens = Tokens(Codec(folder), PROMPTS)
    engine = EmbeddedEngine(folder, settings, name="large-vocabulary")
    await engine.start()
    try:
        if may_jump(settings):
            await engine.jump_forced(False)
        shape, rounds_of_b32 = SHAPES["b32"], 4 * rounds
        found = {
            "masked_over_unmasked_131k_b32": masked_over_unmasked(engine, tokens, shape, rounds=rounds_of_b32, seed=seed),
            "masked_over_unmasked_131k_b32_decode_only": masked_over_unmasked(
                engine, tokens, shape, rounds=rounds_of_b32, seed=seed, prompt_tokens=SHORT_PROMPT
            ),
        }
    finally:
        await engine.close()
    return found | table_figures(folder, rounds=rounds, seed=seed)


def table_figures(folder: Path, *, rounds: int, seed: int) -> dict[str, float]:
    """CPU milliseconds of a table from the legal orders to its bytes: mean and 95th percentile, each the median over rounds.

    Every round begins with a tokenizer that knows no order. The tables of the first positions fill its cache of encoded orders;
    those of the others are measured, each once.
    """
    by_position = [
        list(dict.fromkeys(case.legal for case in rollout_cases([snapshot], forks=2, phases=3)))
        for snapshot in played_positions(12, seed)
    ]
    warm_up = [legal for own in by_position[:6] for legal in own]
    asked = [legal for own in by_position[6:] for legal in own]
    measured = [_table_times(TableBuilder(Codec(folder)), warm_up, asked) for _ in range(rounds)]
    return {
        "table_131k_ms": median(mean(times) for times in measured),
        "table_131k_ms_p95": median(quantiles(times, n=20)[-1] for times in measured),
    }


def _table_times(builder: TableBuilder, warm_up: Sequence[LegalOrders], asked: Sequence[LegalOrders]) -> list[float]:
    for legal in warm_up:
        builder.table(legal).to_bytes()
    gc.collect()
    times = []
    for legal in asked:
        began = time.thread_time()
        builder.table(legal).to_bytes()
        times.append(1e3 * (time.thread_time() - began))
    return times
