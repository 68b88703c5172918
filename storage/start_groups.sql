-- The start groups of the decisions in `valued`, one row each: the snapshot that it began at, and the mean spread of its advantage
-- groups that can be trained on, null if there are none.
SELECT
    producer,
    start_group,
    any_value(snapshot_id) AS snapshot_id,
    avg(spread ORDER BY power, phase) FILTER (usable) AS spread
FROM (
    SELECT
        producer, shard, start_group, power, phase,
        any_value(snapshot_id) AS snapshot_id,
        max("return") - min("return") AS spread,
        count(*) >= 2 AND bool_and(status = 'complete') AND max(orders_rejected) = 0 AND bool_and(isfinite("return")) AS usable
    FROM valued
    GROUP BY producer, shard, start_group, power, phase
)
GROUP BY producer, shard, start_group
