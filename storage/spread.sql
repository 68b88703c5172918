-- The mean spread of the returns from each snapshot, for one producer: one row per snapshot,
--   spread = mean over its last $recent start groups before $before of the mean spread of their advantage groups
-- Advantage groups that cannot be trained on do not count.
WITH start_groups AS (
    SELECT start_group, any_value(snapshot_id) AS snapshot_id
    FROM decisions WHERE producer = $producer AND start_group < $before GROUP BY start_group
),
taught AS (
    SELECT snapshot_id, start_group, avg(spread ORDER BY power, phase) AS spread
    FROM advantage_groups JOIN start_groups USING (start_group)
    WHERE producer = $producer AND usable
    GROUP BY snapshot_id, start_group
    QUALIFY row_number() OVER (PARTITION BY snapshot_id ORDER BY start_group DESC) <= $recent
)
SELECT snapshot_id, avg(spread ORDER BY start_group) AS spread, count(*)::INTEGER AS start_groups
FROM taught GROUP BY snapshot_id ORDER BY snapshot_id
