"""The system that Entente replaced, as a small program that really runs: the baseline of `bench rollout` and `bench e2e`.

What is known of it stands in the pages that the design rests on (features, measured figures, faults); nothing here was taken
over as code. Each module says which part of it it stands for. Model, machine, opponents, horizon, sampling, reward, learning rate
and the number of decisions that a step trains on are those of the run it is held against: only the way differs. Where the old
system is known in two forms, or paid for a fault and not for its design, the cheaper form is taken, and the module says so.

Every part is a switch of `Way`, so that each improvement can be measured alone: on in the old way, or off in the new one.
Only benchmarks use it.
"""
