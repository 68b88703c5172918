"""`entente label`: whole games of a policy with a search's labels, as files that a base model learns from."""

import asyncio
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from entente.cli.options import RunsRoot
from entente.rollouts.label_games import GAMES_A_FILE, LabelSettings, check_label_settings, label_file, made_by
from entente.telemetry.errors import InputError

_Flags = Annotated[LabelSettings | None, Parameter(name="*")]


def label(
    name: Annotated[str, Parameter(help="Folder of the labels, in runs/_labels.")],
    *,
    player: Annotated[str, Parameter(help="The policy: the folder of a model or adapter, such as models/whole-192.")],
    runs_root: RunsRoot = Path("runs"),
    settings: _Flags = None,
) -> None:
    """Label every decision of a policy in whole games by search, for `entente model imitate --labels`.

    It uses one core: start the same command once for each core; the processes share the work. After an interruption, run it
    again. Machines take different --first-game numbers; copy their files into one folder of the same name. Labels can be
    removed at any time.

    Examples

        entente label round-1 --player models/whole-192 --games 2000

        entente label round-1 --player models/whole-192 --games 2000 --first-game 2000

        entente label quick --player models/whole-192 --games 8 --years 3 --search.playouts 20
    """
    from entente.evaluation.contestants import needs_run, resolve_contestant
    from entente.evaluation.settings import PlaySettings
    from entente.players.policy import PolicyPlayer
    from entente.telemetry.progress import reporter
    from flows.open_players import open_players
    from storage.labels import LABEL_FOLDER, check_made_alike
    from storage.runs import check_name

    settings = settings or LabelSettings()
    check_label_settings(settings)
    folder = runs_root / LABEL_FOLDER / check_name(name, "The folder of labels")
    if needs_run([player]) or (contestant := resolve_contestant(player, "", runs_root)).model is None or contestant.searches:
        raise InputError(f"--player '{player}' is no folder of a model or adapter: name one, such as models/whole-192")
    from entente.cli.terminal import show_progress
    from entente.telemetry.machine import apply_threads

    apply_threads(1)

    async def make() -> int:
        made = 0
        async with open_players([contestant], runs_root, PlaySettings()) as opened:
            policy = PolicyPlayer(*opened.served[contestant.name])
            about = made_by(settings, contestant.identity)
            check_made_alike(folder, about)
            for done in range(0, settings.games, GAMES_A_FILE):
                reporter().stage("label games", done, settings.games)
                made += await opened.host.run(label_file(folder, settings.first_game + done, settings, policy, about))
        return made

    with show_progress():
        made = asyncio.run(make())
    print(f"{made} labels more in {folder}")
