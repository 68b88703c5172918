-- Which rows a trainer step uses. Two statements; both are pure in the tables and their parameters.
--
-- 1. The standing of every advantage group for a trainer at $policy_version, by the first rule it breaks:
--      used       ledgers name it $max_uses times
--      unusable   fewer than 2 decisions, a failed one, a rejected order, or a return that is not a number
--      ahead      a row is of a version that the trainer has not reached (it went back to a checkpoint)
--      expired    its oldest row lies more than $max_policy_lag versions behind
--      no_spread  its returns differ by $min_spread at most, or by a millionth (rounding of float32 components): no gradient
--      eligible   none of these
CREATE OR REPLACE TEMP TABLE standings AS
WITH uses AS (SELECT shard, start_group, power, phase, count(*)::INTEGER AS uses FROM used_groups GROUP BY ALL)
SELECT
    producer,
    shard,
    start_group,
    power,
    phase,
    $policy_version - oldest_version AS group_lag,
    CASE
        WHEN uses >= $max_uses THEN 'used'
        WHEN NOT usable THEN 'unusable'
        WHEN newest_version > $policy_version THEN 'ahead'
        WHEN group_lag > $max_policy_lag THEN 'expired'
        WHEN spread <= greatest($min_spread, 1e-6) THEN 'no_spread'
        ELSE 'eligible'
    END AS standing,
    spread > greatest($min_spread, 1e-6) AS has_spread
FROM advantage_groups LEFT JOIN uses USING (shard, start_group, power, phase);

-- 2. The chosen advantage groups, each whole, and their rows in the batch's order.
--    What is drawn ($draw) is a whole start group, with all its eligible advantage groups, or a single advantage group; as many
--    as $start_groups start groups, or as the advantage groups that so many of them hold on average.
--    Drawn without replacement with weight $freshness ^ lag of the oldest row (Efraimidis and Spirakis: the smallest -ln(u) / weight
--    are taken, here by their logarithms), u a hash of seed, step and the name of what is drawn (md5: DuckDB may change
--    its own). With $balance_powers each power gets one before any gets a second one, and so on; start groups in which the
--    policy plays several powers are balanced by themselves and count as one power.
WITH start_groups AS (
    SELECT
        producer,
        shard,
        start_group,
        CASE WHEN min(power) = max(power) THEN min(power) ELSE '' END AS power_played,
        count(*) FILTER (standing IN ('eligible', 'used')) AS teaches,
        count(*) FILTER (standing = 'eligible') AS eligible
    FROM standings
    WHERE group_lag BETWEEN 0 AND $max_policy_lag
    GROUP BY ALL
    HAVING eligible > 0
),
drawable AS (
    SELECT
        s.producer,
        s.shard,
        s.start_group,
        CASE WHEN $draw = 'start_group' THEN '' ELSE concat_ws(':', power, phase) END AS part,
        CASE WHEN $draw = 'start_group' THEN any_value(power_played) ELSE any_value(power) END AS balanced,
        max(group_lag) AS oldest_lag
    FROM standings AS s JOIN start_groups USING (shard, start_group)
    WHERE standing = 'eligible'
    GROUP BY ALL
),
keyed AS (
    SELECT
        *,
        md5_number_upper(concat_ws(':', $seed, $step, producer, start_group, part)) AS hashed,
        ln(-ln((hashed // 4096 + 0.5) / 4503599627370496)) - oldest_lag * ln($freshness) AS draw_key
    FROM drawable
),
ranked AS (
    SELECT
        *,
        CASE
            WHEN $balance_powers THEN row_number() OVER (PARTITION BY balanced ORDER BY draw_key, producer, start_group, part)
            ELSE 0
        END AS round
    FROM keyed
),
drawn AS (
    SELECT shard, start_group, part, row_number() OVER (ORDER BY round, draw_key, producer, start_group, part) AS place
    FROM ranked
    QUALIFY place <= (
        SELECT CASE WHEN $draw = 'start_group' THEN $start_groups ELSE ceil($start_groups * avg(teaches)) END FROM start_groups
    )
),
chosen AS (
    SELECT s.shard, s.start_group, s.power, s.phase, min(place) OVER (PARTITION BY s.shard, s.start_group) AS place
    FROM drawn JOIN standings AS s
        ON s.shard = drawn.shard AND s.start_group = drawn.start_group AND s.standing = 'eligible'
        AND (drawn.part = '' OR drawn.part = concat_ws(':', s.power, s.phase))
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
