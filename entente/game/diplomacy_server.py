"""Starts the `diplomacy` package's own server with the standard map alone, saved every second.

    python -m entente.game.diplomacy_server FOLDER --port 8432

The package's own command computes the convoys of every map first, which takes longer than anybody waits, and saves every ten
minutes: a kill loses what was played since. NOTICE says what people who reach such a server over a network are owed.
"""

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diplomacy import Server
from diplomacy.engine.map import Map

from entente.game.rules import ENGINE_VERSION, MAP

SAVED_EVERY_S = 1


class StandardServer(Server):
    """The package's server, which knows the standard map only."""

    def _load_available_maps(self) -> None:
        # Private, so `main` checks the release: no argument of the server chooses its maps.
        known = Map(MAP)
        maps: dict[str, Any] = self.available_maps  # the package calls it a list
        maps[MAP] = {
            "powers": list(known.powers),
            "supply_centers": list(known.scs),
            "loc_type": known.loc_type.copy(),
            "loc_abut": known.loc_abut.copy(),
            "aliases": known.aliases.copy(),
        }


def main() -> None:
    """Serve until a signal ends it; SIGINT saves all games first."""
    parser = argparse.ArgumentParser(description="The diplomacy package's server, with the standard map alone.")
    parser.add_argument("folder", type=Path, help="where accounts and games are saved; made if it is missing")
    parser.add_argument("--port", type=int, default=8432)
    given = parser.parse_args()
    if (installed := version("diplomacy")) != ENGINE_VERSION:
        sys.exit(f"this starts the server of diplomacy {ENGINE_VERSION}, and {installed} is installed")
    given.folder.mkdir(parents=True, exist_ok=True)
    try:
        StandardServer(str(given.folder), backup_delay_seconds=SAVED_EVERY_S).start(port=given.port)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
