"""Search at play: proposals, playouts by scripted players, and sequential halving. Read `search.py` first.

This room owns how one decision is searched. It knows nothing of matches, training or files.
"""
