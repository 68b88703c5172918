-- Positions whose forks' returns differ most: what there is left to learn from.
SELECT snapshot_id, start_groups, forks, mean_return, mean_return_range FROM snapshots
WHERE mean_return_range > 0 ORDER BY mean_return_range DESC, snapshot_id LIMIT 20
