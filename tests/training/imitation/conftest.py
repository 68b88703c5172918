"""Small games of teachers, and the examples of some of their positions."""

from pathlib import Path

import pytest

from entente.decoding.codec import Codec
from entente.game.prompts import DEFAULT_PROMPTS
from entente.training.imitation.examples import Example, Examples
from entente.training.imitation.positions import Positions
from entente.training.imitation.teacher_games import make_games
from tests.training.imitation.small import SMALL, quiet


@pytest.fixture(scope="session")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the games of SMALL."""
    return make_games(tmp_path_factory.mktemp("teacher"), SMALL, 1, quiet)


@pytest.fixture(scope="session")
def examples(games: Path, model: Path) -> list[Example]:
    """Examples of a few positions with their legal sets, some of them with equal prompts: two games begin alike."""
    maker, positions = Examples(Codec(model), DEFAULT_PROMPTS), Positions(games)
    numbers = [0, 1, int(positions.training[0])]
    return [each for number in numbers for each in maker.of(*positions.board(number), legal_sets=True)]
