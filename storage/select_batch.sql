-- Which rows a trainer step uses. Two statements; both are pure in the tables and their parameters.
--
-- 1. The standing of every advantage group for a trainer at $policy_version, by the first rule it breaks:
--      used       a row of it is in the ledger of $lineage: no decision is trained on twice
--      unusable   fewer than 2 decisions, a failed one, a rejected order, or a return that is not a number
--      ahead      a row is of a version that the trainer has not reached (it went back to a checkpoint)
--      expired    its oldest row lies more than $max_policy_lag versions behind
--      no_spread  its returns differ by a millionth at most (rounding of float32 components): no gradient
--      eligible   none of these
CREATE OR REPLACE TEMP TABLE standings AS
SELECT
    producer,
    shard,
    start_group,
    power,
    phase,
    $policy_version - oldest_version AS group_lag,
    CASE
        WHEN EXISTS (
            FROM used_groups AS u
            WHERE u.lineage = $lineage AND u.shard = g.shard AND u.start_group = g.start_group
                AND u.power = g.power AND u.phase = g.phase
        ) THEN 'used'
        WHEN NOT usable THEN 'unusable'
        WHEN newest_version > $policy_version THEN 'ahead'
        WHEN group_lag > $max_policy_lag THEN 'expired'
        WHEN spread <= 1e-6 THEN 'no_spread'
        ELSE 'eligible'
    END AS standing
FROM advantage_groups AS g;

-- 2. All eligible advantage groups of the $start_groups freshest start groups, in the batch's order.
--    A start group is as fresh as its oldest eligible row; then the lower number comes first; those of two
--    producers that tie in both are ordered by a hash of $seed and $step (md5: DuckDB may change its own).
WITH candidates AS (
    SELECT producer, shard, start_group, max(group_lag) AS oldest_lag
    FROM standings
    WHERE standing = 'eligible'
    GROUP BY producer, shard, start_group
),
chosen AS (
    SELECT
        shard,
        start_group,
        row_number() OVER (
            ORDER BY oldest_lag, start_group, md5(concat_ws(':', $seed, $step, producer)), producer
        ) AS place
    FROM candidates
    QUALIFY place <= $start_groups
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
JOIN standings AS s ON s.shard = c.shard AND s.start_group = c.start_group AND s.standing = 'eligible'
JOIN decisions AS d
    ON d.shard = s.shard AND d.start_group = s.start_group AND d.power = s.power AND d.phase = s.phase
ORDER BY advantage_group, d.fork, d.ply, d.row;
