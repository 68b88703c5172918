"""TRL's trainer learns from the game: plainly, and with completions that our legal table draws."""

import shlex
from pathlib import Path

import pytest
import torch

from decoding.codec import Codec
from decoding.legal_table import END
from game.snapshot import Snapshot
from integrations import trl_grpo
from integrations.legal_rollouts import LegalMask
from integrations.questions import questions_of
from rollouts.fork import Tokens
from state_cache.settings import CacheSettings
from state_cache.store import write_cache

PUBLISHED = Path(__file__).resolve().parents[2] / "models" / "dumbbot-192"
"""Spells most orders without a mask, so that its rewards differ."""


@pytest.fixture
def cache(positions: list[Snapshot], tmp_path: Path) -> Path:
    """A state cache of the positions."""
    return write_cache(tmp_path, CacheSettings(), positions[:6], positions[6:])


def test_what_the_mask_lets_through_spells_legal_orders_row_by_row(positions: list[Snapshot]):
    tokens = Tokens(Codec(PUBLISHED))
    questions = questions_of(positions, seed=0)[:3]
    tables = [tokens.tables.table(question.legal) for question in questions]
    mask, generator = LegalMask(tables), torch.Generator().manual_seed(0)
    ids, ended = torch.zeros((3, 5), dtype=torch.long), [False] * 3
    for _ in range(max(table.longest for table in tables)):
        scores = torch.randn((3, tokens.codec.vocabulary_size), generator=generator)
        masked = mask(ids, scores)
        drawn = torch.multinomial(masked.softmax(-1), 1, generator=generator)
        # As transformers does: a row that has ended is filled up.
        drawn = torch.where(torch.tensor(ended)[:, None], tokens.codec.eos_id, drawn)
        finite = masked.isfinite()
        assert torch.equal(masked[finite], scores[finite])
        ids = torch.cat([ids, drawn], dim=1)
        ended = [was or token == tokens.codec.eos_id for was, token in zip(ended, drawn[:, 0].tolist(), strict=True)]
    for row, question, table in zip(ids[:, 5:].tolist(), questions, tables, strict=True):
        completion = row[: row.index(tokens.codec.eos_id) + 1]
        assert question.legal.admits(tokens.tables.read(completion, question.legal))
        state = table.start
        for token in completion:
            state = table.advance(state, token)
        assert state == END


@pytest.mark.system
@pytest.mark.parametrize("legal_orders", [False, True], ids=["plainly", "over legal orders"])
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_trl_trains_an_adapter_on_the_game(cache: Path, tmp_path: Path, legal_orders: bool):
    """TRL imports vLLM where it is installed, which takes most of the time."""
    pytest.importorskip("trl", reason="TRL is not installed: the extra `trl` brings it")
    output = tmp_path / "adapter"
    reward = trl_grpo.train(PUBLISHED, cache, steps=2, groups=4, generations=4, years=1, legal_orders=legal_orders, output=output)
    assert len(reward.rewards) == 2
    assert (min(reward.ordered) == 1.0) == legal_orders
    from safetensors.torch import load_file

    changed = {name: value for name, value in load_file(output / "adapter_model.safetensors").items() if "lora_B" in name}
    assert changed and any(value.abs().max() > 0 for value in changed.values())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "nowhere"], "'nowhere' holds no model: give the folder of one, such as models/dumbbot-192"),
        (["--output", "."], "'.' exists: give another --output, or move it away"),
        (["--cache", "nowhere"], "There is no state cache at nowhere. Build it first."),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    words: list[str], sentence: str, cache: Path, capsys: pytest.CaptureFixture[str]
):
    assert trl_grpo.main(["--model", str(PUBLISHED), "--cache", str(cache), *words]) == 2
    assert capsys.readouterr().err == f"trl_grpo: {sentence}\n"


@pytest.mark.parametrize(("words", "sentence"), [(["--steps", "0"], "at least 1"), (["--generations", "1"], "at least 2")])
def test_a_number_that_is_too_small_is_refused_in_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        trl_grpo.main(["--model", "m", "--cache", "c", *words])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


def test_the_commands_that_the_page_shows_can_be_typed():
    page = (PUBLISHED.parents[1] / "docs" / "integrations.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("python -m integrations.trl_grpo")]
    given = [trl_grpo.command_line().parse_args(shlex.split(line)[3:]) for line in shown]
    assert [each.legal_orders for each in given] == [False, True]
    assert all((PUBLISHED.parents[1] / each.model).is_dir() for each in given)
