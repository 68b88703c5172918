-- How much a policy version varies what it orders: entropy (nats) of the order sets that one group's forks gave, by version.
WITH drawn AS (
    SELECT start_group, power, phase, decision_id, policy_version FROM decisions
    WHERE phase_index = 0 AND producer = 'local'
),
sets AS (
    SELECT d.start_group, d.power, d.phase, min(d.policy_version) AS policy_version, o.orders, count(*) AS forks
    FROM drawn AS d JOIN orders AS o USING (decision_id) GROUP BY ALL
),
shares AS (
    SELECT *, forks / sum(forks) OVER (PARTITION BY start_group, power, phase) AS share FROM sets
)
SELECT policy_version, avg(entropy) AS mean_entropy, count(*) AS groups
FROM (
    SELECT min(policy_version) AS policy_version, -sum(share * ln(share)) AS entropy
    FROM shares GROUP BY start_group, power, phase HAVING sum(forks) >= 2
)
GROUP BY policy_version ORDER BY policy_version
