"""What base models made here share: BPE tokenizer, untrained network (a small Qwen3), teacher's thoughts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from entente.decoding.codec import Codec
from entente.decoding.thinking import Thinking
from entente.game.board import Board

_EOS = "<|end|>"


def save_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    # A line break is a token of its own, so that the order separator is one token; a word's token includes its leading space.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS).save_pretrained(str(folder))


def new_model(folder: Path, *, hidden: int, layers: int, longest: int, seed: int) -> Qwen3ForCausalLM:
    """Random weights. `hidden`: width, a multiple of 32; `longest`: tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(_EOS)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=eos,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def wanted_centres(board: Board, power: str, orders: Sequence[str]) -> tuple[str, ...]:
    """A teacher's thought: supply centres of others that the orders move or retreat to."""
    centres = board.centres()
    foreign = {*board.free_centres(), *(centre for own in centres.values() for centre in own)} - {*centres[power]}
    goals = [words[3][:3] for order in orders if (words := order.split(" "))[2:3] in (["-"], ["R"])]
    return tuple(goal for goal in goals if goal in foreign)


def fitting_thought(words: Sequence[str], codec: Codec, thinking: Thinking) -> Sequence[int]:
    """As many words as leave room for the thought's end mark, which the model must learn to write."""
    for count in range(len(words), 0, -1):
        ids = codec.encode_order(" ".join(words[:count]))
        if len(ids) < thinking.rule.budget:
            return ids
    return ()
