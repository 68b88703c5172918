"""Settings of prompts: place of the own line, chat format, legal orders, and thinking first."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ChatSetting = Literal["auto", "template", "none"]
OwnLine = Literal["in_place", "last"]


class PromptSettings(BaseModel, frozen=True):  # so that type checkers know that it can be hashed
    """How prompts and answers are written; a model is trained for one way, so it is part of a tiny model's recipe."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    own_line: OwnLine = "last"
    """Where the board names the units and centres of the power that orders: 'last', so that forks share the other lines;
    'in_place', so that powers share the board (the default where rollouts.policy_powers is 'all')."""
    chat: ChatSetting = "auto"
    """Whether the tokenizer's chat template is put around a prompt: 'auto', if it has one; 'template', it must have one;
    'none'."""
    legal_orders: Literal["none", "lines"] = "none"
    """Legal orders in a prompt: 'none', or 'lines', every order on a line."""
    examples: Annotated[int, Field(ge=0, le=24)] = 0
    """Worked examples before the board, with the aim of the game and a key to its notation, for a model that was not trained on
    the game; all prompts share them; 0: none."""
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens of free text that the model may write before its orders; 0: none."""


DEFAULT_PROMPTS = PromptSettings()
