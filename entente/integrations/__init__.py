"""The game for other people's trainers: a PettingZoo environment. Read `pettingzoo_env.py` first."""
