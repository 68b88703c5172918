-- Which rows a trainer step uses. Four statements; all are pure in the tables and the variables step, policy_version, start_groups,
-- seed, max_policy_lag and max_uses.
--
-- 1. The eligibility of every advantage group for a trainer at `policy_version`, by the first rule it breaks:
--      used       ledgers name it `max_uses` times, or less often and it lies too far behind by now
--      unusable   fewer than 2 decisions, a failed one, a rejected order, or a return that is not a number
--      ahead      a row is of a version that the trainer has not reached (it went back to a checkpoint)
--      expired    its oldest row lies more than `max_policy_lag` versions behind
--      zero_std  its returns differ by a millionth at most, which is rounding of float32 components: no gradient
--      eligible   none of these
CREATE OR REPLACE TEMP TABLE group_eligibility AS
WITH uses AS (
    SELECT shard, start_group, power, phase, count(DISTINCT step)::INTEGER AS uses FROM batches GROUP BY ALL
)
SELECT
    producer,
    shard,
    start_group,
    power,
    phase,
    n,
    return_range,
    oldest_version,
    getvariable('policy_version') - oldest_version AS group_lag,
    return_range > 1e-6 AS has_range,
    CASE
        WHEN uses >= getvariable('max_uses') THEN 'used'
        WHEN NOT usable THEN 'unusable'
        WHEN newest_version > getvariable('policy_version') THEN 'ahead'
        WHEN group_lag > getvariable('max_policy_lag') THEN CASE WHEN uses > 0 THEN 'used' ELSE 'expired' END
        WHEN NOT has_range THEN 'zero_std'
        ELSE 'eligible'
    END AS eligibility
FROM advantage_groups LEFT JOIN uses USING (shard, start_group, power, phase);

-- 2. The start groups that the step can train on. Counts, lag, version and largest return_range are those of their eligible advantage
--    groups. Start groups in which the policy plays several powers have no `power`. `uniform` lies between 0 and 1 and follows from
--    seed, step and the start group's name (md5: DuckDB may change its own hash).
CREATE TEMP VIEW candidates AS
SELECT
    shard,
    start_group,
    producer,
    getvariable('step') AS step,
    min(oldest_version) FILTER (eligibility = 'eligible') AS policy_version,
    max(group_lag) FILTER (eligibility = 'eligible') AS lag,
    CASE WHEN min(power) = max(power) THEN min(power) ELSE '' END AS power,
    count(*) FILTER (eligibility = 'eligible') AS advantage_groups,
    sum(n) FILTER (eligibility = 'eligible') AS decisions,
    max(return_range) FILTER (eligibility = 'eligible') AS return_range,
    (md5_number_upper(concat_ws(':', getvariable('seed'), getvariable('step'), producer, start_group)) // 4096 + 0.5)
        / 4503599627370496 AS uniform
FROM group_eligibility
WHERE group_lag BETWEEN 0 AND getvariable('max_policy_lag')
GROUP BY shard, start_group, producer
HAVING lag IS NOT NULL;

-- 3. The draw, whose place the user's SQL of `storage.selection` takes: the order in which the step wants them. They are drawn
--    without replacement with weight 0.5 ^ lag, so that fresh ones come first and older ones still come (Efraimidis and Spirakis: the
--    smallest -ln(u) / weight are taken, here by their logarithms). Each power gets one before any gets a second one, and so on, so
--    that a step trains on as many powers as it can; those in which the policy plays several are balanced by themselves and count as
--    one power.
CREATE TEMP VIEW wanted AS
WITH keyed AS (
    SELECT *, ln(-ln(uniform)) - lag * ln(0.5) AS draw_key FROM candidates
),
ranked AS (
    SELECT *, row_number() OVER (PARTITION BY power ORDER BY draw_key, producer, start_group) AS round FROM keyed
)
SELECT shard, start_group, advantage_groups, row_number() OVER (ORDER BY round, draw_key, producer, start_group) AS place
FROM ranked;

-- 4. The first of them, each with all its eligible advantage groups, and their rows in the batch's order.
WITH chosen AS (
    SELECT shard, start_group, power, phase, place
    FROM wanted JOIN group_eligibility USING (shard, start_group)
    WHERE place <= getvariable('start_groups') AND eligibility = 'eligible'
)
SELECT
    d.shard,
    d.row,
    d.decision_id,
    d.start_group,
    d.fork,
    d.phase_index,
    d.power,
    d.phase,
    d.policy_version,
    (getvariable('policy_version') - d.policy_version)::INTEGER AS policy_lag,
    d.checksum,
    d.return,
    (dense_rank() OVER (ORDER BY c.place, d.power, d.phase) - 1)::INTEGER AS advantage_group
FROM chosen AS c
JOIN decisions AS d
    ON d.shard = c.shard AND d.start_group = c.start_group AND d.power = c.power AND d.phase = c.phase
ORDER BY advantage_group, d.fork, d.phase_index, d.row;
