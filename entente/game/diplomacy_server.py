"""Starts the `diplomacy` package's own server with the standard map alone, saved every second.

    python -m entente.game.diplomacy_server FOLDER --port 8432

The package's own command first computes the convoys of every map, which takes very long, and saves every ten minutes, so a kill
loses up to ten minutes of play. NOTICE states the licence's duties towards network users of such a server.
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
    parser = argparse.ArgumentParser(description="The diplomacy package's server, with the standard map alone.")
    parser.add_argument("folder", type=Path, help="where the server saves accounts and games; created if missing")
    parser.add_argument("--port", type=int, default=8432)
    arguments = parser.parse_args()
    if (installed := version("diplomacy")) != ENGINE_VERSION:
        sys.exit(f"this starts the server of diplomacy {ENGINE_VERSION}, and {installed} is installed")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    try:
        StandardServer(str(arguments.folder), backup_delay_seconds=SAVED_EVERY_S).start(port=arguments.port)
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
