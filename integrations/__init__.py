"""The game for other people's trainers: a PettingZoo environment, TRL's GRPOTrainer, a taskset for verifiers."""
