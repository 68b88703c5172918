-- The advantage groups of the shards in `going`, counted by what a selection says about them once they are too old for any step:
--   usable      as in advantage_groups.sql
--   has_spread  as in select_batch.sql, for a $min_spread of 0
--   uses        how many steps used it
SELECT usable, has_spread, uses, count(*) AS "groups"
FROM (
    SELECT usable, spread > 1e-6 AS has_spread, coalesce(uses, 0) AS uses
    FROM advantage_groups SEMI JOIN going USING (shard)
    LEFT JOIN (
        SELECT shard, start_group, power, phase, count(*)::INTEGER AS uses
        FROM used_groups SEMI JOIN going USING (shard)
        GROUP BY ALL
    ) USING (shard, start_group, power, phase)
)
GROUP BY ALL
