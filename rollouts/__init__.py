"""Play and record: forks of frozen positions, decisions drawn from the policy, rows with all that training will ask."""
