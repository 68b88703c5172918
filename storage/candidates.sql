-- The start groups that a step can train on, as a query of `storage.selection` sees them: one row each, over its eligible advantage
-- groups (`standings`, see select_batch.sql). Sums have an order, so that they do not depend on the number of threads.
WITH played AS (
    SELECT shard, start_group, CASE WHEN min(power) = max(power) THEN min(power) ELSE '' END AS power
    FROM standings
    WHERE group_lag BETWEEN 0 AND $max_policy_lag
    GROUP BY ALL
),
eligible AS (
    SELECT * FROM standings JOIN advantage_groups USING (producer, shard, start_group, power, phase) WHERE standing = 'eligible'
),
whole AS (
    SELECT
        producer,
        shard,
        start_group,
        min(oldest_version) AS policy_version,
        max(group_lag) AS lag,
        count(*)::INTEGER AS advantage_groups,
        sum(n)::INTEGER AS decisions,
        avg(spread ORDER BY power, phase) AS spread
    FROM eligible
    GROUP BY ALL
),
rows AS (
    SELECT
        d.shard,
        d.start_group,
        count(DISTINCT d.fork)::INTEGER AS forks,
        avg(d.return ORDER BY d.row) AS mean_return,
        min(try_cast(substr(d.phase, 2, 4) AS INTEGER)) AS year,
        string_agg(DISTINCT d.opponents, ';' ORDER BY d.opponents) AS opponents,
        min(d.snapshot_id) AS snapshot_id,
        sum(d.n_branching)::INTEGER AS branching_tokens
    FROM eligible JOIN decisions AS d USING (shard, start_group, power, phase)
    GROUP BY ALL
)
SELECT
    shard,
    start_group,
    producer,
    $step::INTEGER AS step,
    policy_version,
    lag,
    power,
    year,
    opponents,
    snapshot_id,
    advantage_groups,
    decisions,
    forks,
    branching_tokens,
    mean_return,
    spread,
    (md5_number_upper(concat_ws(':', $seed, $step, producer, start_group)) // 4096 + 0.5) / 4503599627370496 AS uniform
FROM whole JOIN played USING (shard, start_group) JOIN rows USING (shard, start_group)
ORDER BY producer, start_group, shard;
