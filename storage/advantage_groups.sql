-- The advantage groups of the decisions in `given` (equal start group, power and phase name), one row each:
--   n, oldest_version, newest_version
--   return_range  = largest minus smallest return
--   usable  = at least 2 decisions, all complete, no order rejected, every return a number
SELECT
    shard,
    producer,
    start_group,
    power,
    phase,
    any_value(snapshot_id) AS snapshot_id,
    count(*)::INTEGER AS n,
    max("return") - min("return") AS return_range,
    min(policy_version) AS oldest_version,
    max(policy_version) AS newest_version,
    count(*) >= 2 AND bool_and(status = 'complete') AND max(orders_rejected) = 0
        AND bool_and(isfinite("return")) AS usable
FROM given
GROUP BY shard, producer, start_group, power, phase
ORDER BY shard, start_group, power, phase
