-- Share of each step's wall time outside the train task: waiting for rows, comparing, scoring, publishing and the flow.
SELECT w.step, w.value AS waited_s, s.value AS step_s, w.value / s.value AS idle_share
FROM metrics AS w JOIN metrics AS s ON s.step = w.step AND s.name = 'time/step_s'
WHERE w.name = 'time/trainer_wait_s' ORDER BY w.step
