"""A bot of the DAIDE kind: it takes a seat at a game's DAIDE port, in the package's own codec."""

import asyncio

from diplomacy.daide.messages import DiplomacyMessage, InitialMessage
from diplomacy.daide.utils import bytes_to_str, str_to_bytes


class DaideBot:
    """A connection to a DAIDE port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "DaideBot":
        """Connect and shake hands."""
        bot = cls(*await asyncio.open_connection("127.0.0.1", port))
        bot._writer.write(bytes(InitialMessage()))
        await bot.hear()
        return bot

    def say(self, text: str) -> None:
        """Send a message, as 'HLO' or 'SUB ( ( AUS AMY VIE ) HLD )'."""
        message = DiplomacyMessage()
        message.content = str_to_bytes(text)
        self._writer.write(bytes(message))

    async def hear(self, word: str = "") -> str:
        """The next message that begins with `word`."""
        while True:
            header = await asyncio.wait_for(self._reader.readexactly(4), 60)
            content = await self._reader.readexactly(header[2] * 256 + header[3])
            if (text := bytes_to_str(content)).startswith(word):
                return text

    async def take_seat(self, prefix: str) -> None:
        """Take the power whose name begins with `prefix`."""
        self.say(f"NME ( {' '.join(f'{prefix}:bot')} ) ( v 1 )")
        await self.hear("YES ( NME")
        chart = await self.hear("MAP")
        self.say(f"YES ( {chart} )")

    def close(self) -> None:
        """Leave."""
        self._writer.close()
