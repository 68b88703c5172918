-- What one producer's start groups before $before found at each snapshot: one row per snapshot,
--   start_groups = their number
--   spread       = mean over the last $recent of them of the mean spread of their advantage groups
--   mean_return  = mean over the same of their mean returns
-- Advantage groups that cannot be trained on do not count.
SELECT
    snapshot_id,
    any_value(start_groups)::INTEGER AS start_groups,
    avg(spread ORDER BY start_group) AS spread,
    avg(mean_return ORDER BY start_group) AS mean_return
FROM (
    SELECT *, count(*) OVER (PARTITION BY snapshot_id) AS start_groups
    FROM start_groups
    WHERE producer = $producer AND start_group < $before AND spread IS NOT NULL
    QUALIFY row_number() OVER (PARTITION BY snapshot_id ORDER BY start_group DESC) <= $recent
)
GROUP BY snapshot_id ORDER BY snapshot_id
