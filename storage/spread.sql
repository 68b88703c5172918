-- The spread that one producer's start groups before $before had at each snapshot: the mean over the last $recent of them of the
-- mean spread of their advantage groups. Advantage groups that cannot be trained on do not count.
SELECT snapshot_id, avg(spread ORDER BY start_group) AS spread
FROM (
    SELECT snapshot_id, start_group, avg(spread ORDER BY power, phase) AS spread
    FROM groups
    WHERE producer = $producer AND start_group < $before AND usable
    GROUP BY snapshot_id, start_group
    QUALIFY row_number() OVER (PARTITION BY snapshot_id ORDER BY start_group DESC) <= $recent
)
GROUP BY snapshot_id ORDER BY snapshot_id
