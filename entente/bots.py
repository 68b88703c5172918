"""A bot: a function from the legal orders of one power to a legal order set. Settings name one as `module:attribute`."""

from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.game.scripted import Player as Bot

__all__ = ["WAIVE", "Bot", "LegalOrders", "OrderKind"]
