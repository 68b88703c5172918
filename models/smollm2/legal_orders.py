"""Draws the opening orders of each power from the model beside this file: `python legal_orders.py`.

The policy was trained under the legal mask; without it the model writes illegal orders. Takes transformers, peft and Entente,
whose package writes prompts and knows legal orders. `entente export` copies this program; Entente itself plays with its engines.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from entente.decoding.codec import Codec
from entente.decoding.legal_table import END
from entente.decoding.model_files import recipe_prompts, resolve_model
from entente.decoding.open_set import nth_id, set_size
from entente.decoding.prompt_form import PromptForm
from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import thinking_of
from entente.game.board import POWERS, Board
from entente.game.prompts import ANSWER_CUE, DEFAULT_PROMPTS, board_text, power_text


class LegalPlayer:
    def __init__(self, folder: Path) -> None:
        config = folder / "adapter_config.json"
        base = folder
        if config.is_file():
            named = json.loads(config.read_text())["base_model_name_or_path"]
            base = resolve_model(folder / named if (folder / named).is_dir() else named)
        model: Any = AutoModelForCausalLM.from_pretrained(base)
        self.model = PeftModel.from_pretrained(model, str(folder)) if config.is_file() else model
        codec, self.prompts = Codec(base), recipe_prompts(folder) or DEFAULT_PROMPTS
        thinking = thinking_of(codec, self.prompts.thinking_tokens)
        self.form = PromptForm(codec, self.prompts, ANSWER_CUE if thinking is None else thinking.cue)
        self.tables = TableBuilder(codec, thinking=thinking)

    @torch.inference_mode()
    def sample(self, board: Board, power: str, rng: np.random.Generator) -> tuple[list[str], float]:
        """A legal order set of the power, and its log-probability under the mask."""
        legal = board.legal_orders()[power]
        table = self.tables.table(legal)
        prompt = self.form.ids(board_text(board, power, self.prompts), power_text(legal, board, self.prompts, cue=""))
        place, sampled, logprob, cache, fresh = table.start, list[int](), 0.0, DynamicCache(), prompt
        while place != END:
            logits = self.model(torch.tensor([fresh]), past_key_values=cache, use_cache=True).logits[0, -1].float()
            allowed = table.allowed(place)
            ids = torch.tensor([nth_id(allowed, number) for number in range(set_size(allowed))])
            probabilities = torch.softmax(logits[ids].double(), 0).numpy()  # over legal tokens alone
            chosen = int(rng.choice(len(ids), p=probabilities))
            logprob += float(np.log(probabilities[chosen]))
            sampled.append(int(ids[chosen]))
            place, fresh = table.advance(place, sampled[-1]), sampled[-1:]
        return self.tables.read(sampled, legal), logprob


def main() -> None:
    player, rng = LegalPlayer(Path(__file__).resolve().parent), np.random.default_rng(0)
    for power in POWERS:
        orders, logprob = player.sample(Board.start(), power, rng)
        sys.stdout.write(f"{power}: {'; '.join(orders)} (log-probability {logprob:.3f})\n")


if __name__ == "__main__":
    main()
