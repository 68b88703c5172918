-- Positions after the first phase_index of a producer's forks, each once, newest start groups first.
--   Only complete forks of start groups from $before - $recent to $before - 1.
--   No held-out position, and no fork that began at one, because evaluation uses those.
SELECT p.shard, p."row", p.snapshot_id, p.phase, p.start_group, p.fork, f.policy_version, f.seed, f.power
FROM phases AS p
JOIN (
    SELECT
        producer, start_group, fork,
        any_value(snapshot_id) AS began, max(policy_version) AS policy_version, min(seed) AS seed,
        CASE WHEN min(power) = max(power) THEN min(power) ELSE '' END AS power
    FROM decisions
    WHERE producer = $producer AND start_group < $before AND start_group >= $before - $recent
    GROUP BY producer, start_group, fork
    HAVING bool_and(status = 'complete')
) AS f USING (producer, start_group, fork)
ANTI JOIN held_out AS h ON h.snapshot_id IN (p.snapshot_id, f.began)
WHERE producer = $producer AND p.phase_index > 0 AND start_group < $before AND start_group >= $before - $recent
QUALIFY row_number() OVER (PARTITION BY p.snapshot_id ORDER BY p.start_group DESC, p.fork, p.phase_index) = 1
ORDER BY p.start_group DESC, p.fork, p.phase_index
