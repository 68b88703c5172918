"""The policy outside of training: a board in the browser, seats on others' servers, orders over HTTP. Read `game.py` first."""
