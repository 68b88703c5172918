-- Advantage groups by how many different order sets their decisions hold: where all are alike there is nothing to learn.
SELECT distinct_sets, count(*) AS groups, avg(decisions) AS decisions_a_group
FROM (
    SELECT count(DISTINCT o.orders) AS distinct_sets, count(*) AS decisions
    FROM decisions AS d JOIN orders AS o USING (decision_id)
    WHERE d.producer = 'local'
    GROUP BY d.start_group, d.power, d.phase HAVING decisions >= 2
)
GROUP BY distinct_sets ORDER BY distinct_sets
