"""The orders API over a real policy: a game by the official client through the board, and log-probabilities computed apart."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from entente.decoding.codec import Codec
from entente.decoding.model_files import recipe_prompts
from entente.game.board import Board
from entente.game.legal import OrderKind
from entente.game.prompts import DEFAULT_PROMPTS, PromptSettings, board_text, power_text, rules_text
from entente.inference.settings import InferenceSettings
from entente.inference.torch_engine import TorchEngine
from entente.players.policy import Tokens
from tests.live_games.api_here import MODEL, PUBLISHED, ApiHere

FORM = PromptSettings(own_line="in_place")


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(Codec(PUBLISHED), recipe_prompts(PUBLISHED) or DEFAULT_PROMPTS)


@pytest.fixture(scope="module")
def api(tokens: Tokens) -> Iterator[ApiHere]:
    engine = TorchEngine(PUBLISHED, InferenceSettings(model=str(PUBLISHED), engine="torch"), device=torch.device("cpu"))
    served = ApiHere(engine, tokens, most=512)
    yield served
    served.stop()


def ask(client: Any, model: str, board: Board, power: str, **how: Any) -> Any:
    """The answer to the prompt of one power."""
    text = rules_text(FORM) + board_text(board, power, FORM) + power_text(board.legal_orders()[power], board, FORM)
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **how)


def play_years(client: Any, model: str, last_year: int) -> tuple[Board, set[OrderKind]]:
    """A game in which the client orders for every power that has something to order; all orders are legal and accepted."""
    board, kinds = Board.start(), set[OrderKind]()
    with ThreadPoolExecutor(7) as pool:
        while not board.is_over and board.year <= last_year:
            legal = board.legal_orders()
            answers = pool.map(lambda power, now=board: ask(client, model, now, power, seed=now.year), legal)
            orders = {power: answer.choices[0].message.content.split("\n") for power, answer in zip(legal, answers, strict=True)}
            assert all(legal[power].admits(own) for power, own in orders.items())
            assert not any(board.step(orders).rejected.values())
            kinds |= {own.kind for own in legal.values()}
    return board, kinds


def test_two_years_are_played_by_a_client_and_every_order_is_legal(api):
    with api.client() as client:
        board, kinds = play_years(client, MODEL, 1902)
    assert board.year == 1903 and {OrderKind.MOVEMENT, OrderKind.BUILD} <= kinds


@pytest.mark.parametrize("temperature", [0.6])
def test_logprobs_add_up_to_the_policys_own_under_the_mask(api, tokens: Tokens, positions, temperature: float):
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(PUBLISHED, dtype=torch.float64)
    with api.client() as client:
        for snapshot in positions[:3]:
            board = Board.restore(snapshot)
            power, legal = next(iter(board.legal_orders().items()))
            for choice in ask(client, MODEL, board, power, n=4, logprobs=True, temperature=temperature).choices:
                orders = choice.message.content.split("\n")
                prompt, completion = tokens.prompt_ids(board, legal), tokens.tables.spell(orders, legal)
                with torch.no_grad():
                    logits = policy(torch.tensor([prompt + completion])).logits[0] / temperature
                ids, offsets = tokens.tables.table(legal).legal_sets(completion)
                expected = 0.0
                for place, token in enumerate(completion):
                    allowed = ids[offsets[place] : offsets[place + 1]].tolist()
                    over = torch.log_softmax(logits[len(prompt) + place - 1, allowed], 0)
                    expected += float(over[allowed.index(token)])
                entries = choice.logprobs.content
                assert len(entries) == len(completion)
                assert sum(entry.logprob for entry in entries) == pytest.approx(expected, abs=1e-4)


@pytest.mark.in_turn
@pytest.mark.system
def test_the_command_serves_a_published_folder_until_a_signal(entente):
    (entente.folder / "models").symlink_to(PUBLISHED.parent)
    process = entente.start("serve", "--openai", "--model", "models/whole-192", "--port", "0", ENTENTE_KEY="the-key")
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("serving "))
        from openai import OpenAI

        with OpenAI(base_url=line.split()[-1], api_key="the-key", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["models/whole-192"]
            board, _ = play_years(client, "models/whole-192", 1901)
        assert board.year == 1902
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
