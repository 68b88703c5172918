-- Positions whose forks' returns differ most: what there is left to learn from.
SELECT snapshot_id, start_groups, forks, mean_return, mean_spread FROM snapshots
WHERE mean_spread > 0 ORDER BY mean_spread DESC, snapshot_id LIMIT 20
