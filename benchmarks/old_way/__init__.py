"""The system that Entente replaced, as a small program that runs: the baseline of `bench rollout`, `trainer` and `e2e`.

It was written from measurements and a list of features; no code was copied. Every module names the part of the old system that it
imitates. Model, machine, opponents, horizon, sampling, reward, learning rate and decisions a step are those of the run it is
compared with. Where two forms of the old system are known, or a cost was a bug, the cheaper form is used and the module says so.
"""
