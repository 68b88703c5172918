-- Which rows a trainer step uses. Two statements; both are pure in the tables and their parameters.
--
-- 1. The standing of every advantage group for a trainer at $policy_version, by the first rule it breaks:
--      used       ledgers name it $max_uses times
--      unusable   fewer than 2 decisions, a failed one, a rejected order, or a return that is not a number
--      ahead      a row is of a version that the trainer has not reached (it went back to a checkpoint)
--      expired    its oldest row lies more than $max_policy_lag versions behind
--      no_spread  its returns differ by a millionth at most, which is rounding of float32 components: no gradient
--      eligible   none of these
CREATE OR REPLACE TEMP TABLE standings AS
WITH uses AS (
    SELECT shard, start_group, power, phase, count(DISTINCT step)::INTEGER AS uses FROM batches GROUP BY ALL
)
SELECT
    producer,
    shard,
    start_group,
    power,
    phase,
    $policy_version - oldest_version AS group_lag,
    spread > 1e-6 AS has_spread,
    CASE
        WHEN uses >= $max_uses THEN 'used'
        WHEN NOT usable THEN 'unusable'
        WHEN newest_version > $policy_version THEN 'ahead'
        WHEN group_lag > $max_policy_lag THEN 'expired'
        WHEN NOT has_spread THEN 'no_spread'
        ELSE 'eligible'
    END AS standing
FROM advantage_groups LEFT JOIN uses USING (shard, start_group, power, phase);

-- 2. The chosen start groups, each with all its eligible advantage groups, and their rows in the batch's order.
--    $start_groups of them are drawn without replacement with weight 0.5 ^ lag of the oldest eligible row, so that fresh ones come
--    first and older ones still come (Efraimidis and Spirakis: the smallest -ln(u) / weight are taken, here by their logarithms),
--    u a hash of seed, step and the start group's name (md5: DuckDB may change its own). Each power gets one before any gets a
--    second one, and so on, so that a step trains on as many powers as it can; start groups in which the policy plays several
--    powers are balanced by themselves and count as one power.
WITH drawable AS (
    SELECT
        producer,
        shard,
        start_group,
        CASE WHEN min(power) = max(power) THEN min(power) ELSE '' END AS power_played,
        max(group_lag) FILTER (standing = 'eligible') AS oldest_lag
    FROM standings
    WHERE group_lag BETWEEN 0 AND $max_policy_lag
    GROUP BY ALL
    HAVING oldest_lag IS NOT NULL
),
keyed AS (
    SELECT
        *,
        md5_number_upper(concat_ws(':', $seed, $step, producer, start_group)) AS hashed,
        ln(-ln((hashed // 4096 + 0.5) / 4503599627370496)) - oldest_lag * ln(0.5) AS draw_key
    FROM drawable
),
ranked AS (
    SELECT
        *,
        row_number() OVER (PARTITION BY power_played ORDER BY draw_key, producer, start_group) AS round
    FROM keyed
),
drawn AS (
    SELECT shard, start_group, row_number() OVER (ORDER BY round, draw_key, producer, start_group) AS place
    FROM ranked
    QUALIFY place <= $start_groups
),
chosen AS (
    SELECT shard, start_group, power, phase, place
    FROM drawn JOIN standings USING (shard, start_group)
    WHERE standing = 'eligible'
)
SELECT
    d.shard,
    d.row,
    d.decision_id,
    d.start_group,
    d.fork,
    d.ply,
    d.power,
    d.phase,
    d.policy_version,
    ($policy_version - d.policy_version)::INTEGER AS policy_lag,
    d.checksum,
    d.return,
    (dense_rank() OVER (ORDER BY c.place, d.power, d.phase) - 1)::INTEGER AS advantage_group
FROM chosen AS c
JOIN decisions AS d
    ON d.shard = c.shard AND d.start_group = c.start_group AND d.power = c.power AND d.phase = c.phase
ORDER BY advantage_group, d.fork, d.ply, d.row;
