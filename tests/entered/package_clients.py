"""Other people's programs: each account plays one power of some games with the package's own client and random legal orders.

    python -m tests.entered.package_clients PORT GAME[,GAME] LAST_YEAR ACCOUNT:POWER...

After LAST_YEAR they vote for a draw.
"""

import asyncio
import random
import sys

from diplomacy.client.connection import connect

SLOWNESS_S = 0.3
"""Seconds that they think about each phase, so that there is time to kill somebody."""


async def play(port: int, game_id: str, last_year: int, account: str, power: str) -> None:
    """Play one power until the game is over."""
    channel = await (await connect("127.0.0.1", port)).authenticate(account, "another secret")
    game = await channel.join_game(game_id=game_id, power_name=power)
    rng, ordered = random.Random(account), ""
    while not game.is_game_done:
        await asyncio.sleep(SLOWNESS_S)
        phase = game.get_current_phase()
        if not game.is_game_active or phase == ordered or game.is_game_done:
            continue
        try:
            if int(phase[1:5]) > last_year:
                await game.vote(vote="yes")
            possible = game.get_all_possible_orders()
            places = game.get_orderable_locations(power)
            await game.set_orders(orders=[rng.choice(sorted(possible[place])) for place in places if possible[place]], wait=False)
            ordered = phase
        except Exception as error:  # as somebody else's program may do: say it, and try again
            sys.stderr.write(f"{account} {phase}: {type(error).__name__} {error}\n")


async def main() -> None:
    """Play all seats at once."""
    port, games, last_year, *seats = sys.argv[1:]
    await asyncio.gather(
        *(play(int(port), game, int(last_year), *seat.split(":")) for seat in seats for game in games.split(","))
    )


if __name__ == "__main__":
    asyncio.run(main())
