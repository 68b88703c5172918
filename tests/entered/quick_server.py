"""The diplomacy package's real server, with passwords that are cheap to check.

The package hashes each password for about a second on purpose, and blocks everybody meanwhile; no test is about that second.
"""

import bcrypt

from entente.game.diplomacy_server import main

if __name__ == "__main__":
    salt = bcrypt.gensalt
    bcrypt.gensalt = lambda rounds=12, prefix=b"2b": salt(4, prefix)
    main()
