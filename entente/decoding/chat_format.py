"""The text that a model's chat template puts around a prompt.

The rules are the system message, board and power the user message. The text that the template writes before, between and after
them is the same in every prompt, so the template is rendered once, on sample prompts. This module does not tokenise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from entente.decoding.model_files import chat_template
from entente.game.prompts import ChatSetting
from entente.telemetry.errors import InputError, first_line

Messages = list[dict[str, str]]
Render = Callable[[Messages, bool], str]
"""Renders messages; the second argument is `add_generation_prompt`."""

_DAY = datetime(2025, 1, 1)
"""The date for templates that write today's, so that the prompts of a run do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """A prompt is `before`, rules, `between`, board and power, `after`, cue. Rules and power end without a line break."""

    before: str
    between: str
    after: str
    description: str
    is_plain: bool = False


PLAIN = ChatFormat(before="", between="\n", after="\n", description="none: prompts are plain text", is_plain=True)


def chat_format(
    folder: Path | None,
    setting: ChatSetting,
    samples: Sequence[tuple[str, str]],
    examples: Sequence[tuple[str, str]] = (),
    *,
    special_tokens: Mapping[str, str],
    thinks: bool = False,
) -> ChatFormat:
    """The format of the model in `folder`.

    Args:
        folder: None: plain text.
        samples: (rules, board with power) of some prompts, without white space at their ends.
        examples: (question, answer) pairs, which become turns before the board.
        special_tokens: text of each special token, such as `bos_token`, for the template.
        thinks: value of `enable_thinking` for the template.

    Raises:
        InputError: the template fails, or drops or changes a part of the prompt.
    """
    plain = replace(PLAIN, between="\n" + "".join(f"{asked}\n{answer}\n\n" for asked, answer in examples))
    if setting == "none" or folder is None:
        return plain
    template = chat_template(folder)
    if template is None:
        return plain
    try:
        return read_format(_renderer(template, {**special_tokens, "enable_thinking": thinks}), samples, examples)
    except InputError as error:
        raise InputError(
            f"the chat template of model '{folder}' {error}: correct the template, or set prompts.chat to 'none'"
        ) from error


def read_format(render: Render, samples: Sequence[tuple[str, str]], examples: Sequence[tuple[str, str]] = ()) -> ChatFormat:
    """Raises InputError, with a message that starts with a verb, if the template drops or changes a part of the prompt."""
    rules, body = samples[0]
    turns = [
        {"role": role, "content": content} for pair in examples for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    messages_of = _system_and_user
    try:
        text = render(messages_of(rules, turns, body), True)
    except InputError:
        # Some templates reject a system message; if that was not the cause, this raises again.
        messages_of = _user_alone
        text = render(messages_of(rules, turns, body), True)
    before, is_there, rest = text.partition(rules)
    if not is_there:
        raise InputError("drops or changes the system part, which holds the rules")
    between, is_there, after = rest.partition(body)
    if not is_there:
        raise InputError("drops or changes the user's part, which holds the board")
    for rules, body in samples:
        if render(messages_of(rules, turns, body), True) != before + rules + between + body + after:
            raise InputError("changes the text of a message")
    after += _space_before_answer(render, messages_of(rules, turns, body))
    where = "the rules are its system part" if between.strip() else "it has no system part, so the rules begin the user's part"
    return ChatFormat(before=before, between=between, after=after, description=f"the model's chat template; {where}")


def _system_and_user(rules: str, turns: Messages, body: str) -> Messages:
    return [{"role": "system", "content": rules}, *turns, {"role": "user", "content": body}]


def _user_alone(rules: str, turns: Messages, body: str) -> Messages:
    first, *others = [*turns, {"role": "user", "content": body}]
    return [{"role": "user", "content": f"{rules}\n{first['content']}"}, *others]


def _space_before_answer(render: Render, messages: Messages) -> str:
    """White space between generation prompt and answer; none if the user message ends with the marker of the model's turn. Raises
    InputError if there is other text."""
    asked, answer = render(messages, True), "A PAR - BUR"
    if asked != render(messages, False):
        return ""
    answered = render([*messages, {"role": "assistant", "content": answer}], False)
    space = answered.removeprefix(asked).partition(answer)[0]
    if space.strip():
        raise InputError("writes no generation prompt, the head of the model's turn")
    return space


def _renderer(template: str, values: Mapping[str, Any]) -> Render:
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Messages, with_generation_prompt: bool) -> str:
        try:
            (text,), _ = render_jinja_template(
                [messages],
                chat_template=template,
                add_generation_prompt=with_generation_prompt,
                strftime_now=_DAY.strftime,
                **values,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template is a program, so it may raise any of these.
            raise InputError(f"cannot be used ({first_line(error)})") from error
        return text

    return render
