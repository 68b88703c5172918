"""Settings of prompts: place of the own line, chat format, legal orders, facts, spelling of an answer, and thinking first."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

ChatSetting = Literal["auto", "template", "none"]
OrderNotation = Literal["full", "slot"]
OwnLine = Literal["in_place", "last"]


class PromptSettings(BaseModel, frozen=True):  # so that type checkers know that it can be hashed
    """How prompts and answers are written; a model is trained for one way, so it is part of a tiny model's recipe."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    own_line: OwnLine = "last"
    """Where the board names the units and centres of the power that orders: 'last', so that forks of a position share the other
    lines; 'in_place', so that its powers share the whole board: the default where rollouts.policy_powers is 'all'."""
    chat: ChatSetting = "auto"
    """Whether the tokenizer's chat template is put around a prompt: 'auto', if it has one; 'template', it must have one;
    'none', a prompt is plain text. The rules are the system part, board and power the user's. A tiny model has no template."""
    legal_orders: Literal["none", "factored", "lines"] = "none"
    """What a prompt says of legal orders: 'none', since the decoder allows no others anyway; 'factored', each unit's
    options by kind on one line; 'lines', every order on a line of its own (long: raise inference.max_model_length)."""
    facts: Literal["none", "neighbours", "threats"] = "none"
    """What a prompt says of the map around the power: 'neighbours', the provinces beside each unit and what is there;
    'threats', the own places that others can move to, and how many own units can move to each other centre. Prompts grow by
    about half; in long games raise inference.max_model_length."""
    order_notation: OrderNotation = "full"
    """How an order is answered: 'full', as "A PAR - BUR"; 'slot', only what the unit does, as "BUR" or "S MAR BUR": half
    the tokens to draw, none of them forced by the unit's name."""
    thinking_tokens: Annotated[int, Field(ge=0)] = 0
    """Most tokens of free text that the model may write before its orders, until it ends the thought itself; 0: it orders at
    once."""


DEFAULT_PROMPTS = PromptSettings()
