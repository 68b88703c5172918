-- How many decisions were trained on at each policy lag, and at which share.
SELECT policy_lag, sum(decisions) AS decisions, sum(decisions) / sum(sum(decisions)) OVER () AS share
FROM lag GROUP BY policy_lag ORDER BY policy_lag
