"""What a plan says of prompts: the chat format, the tokens that prompts share, and what moved seams cost."""

from typing import Any

from decoding.prompt_form import Seam, sample_prompts
from rollouts.deciders import Tokens


def plan_prompts(tokens: Tokens, *, is_known: bool) -> dict[str, Any]:
    """The section of a plan.

    Args:
        is_known: the model is here, or it is a tiny one, so its chat format is known.
    """
    if not is_known and tokens.prompts.chat != "none":
        return {"chat_format": "unknown: the model is not here yet"}
    form = tokens.form
    plan: dict[str, Any] = {"chat_format": form.chat.description}
    if tokens.codec.folder is None:
        return plan
    pieces = [form.pieces(sample.board, sample.power) for sample in sample_prompts(tokens.prompts)]
    return plan | {
        "tokens_shared_by_all_prompts": len(pieces[0][0]),
        "tokens_shared_by_a_position_about": round(sum(len(shared) for _, shared, _ in pieces) / len(pieces)),
        "tokens_of_a_power_about": round(sum(len(rest) for _, _, rest in pieces) / len(pieces)),
        "end_of_the_rules": _place(form.after_rules),
        "end_of_the_board": _place(form.after_board),
    }


def _place(seam: Seam) -> str:
    if not seam.moved:
        return "cut there"
    characters, tokens = (
        f"{count} {word}{'s' * (count > 1)}" for count, word in ((seam.moved, "character"), (seam.lost_tokens, "token"))
    )
    return f"cut {characters} earlier, because the tokenizer merges across it: {tokens} less shared in a prompt"
