"""What is between rollouts and training: start groups in flight, how many, where they are played, and what is published."""
