"""The game for other people's trainers: a PettingZoo environment."""
