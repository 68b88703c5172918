-- Shards whose rows are not needed any more, those of the oldest policy first:
--   every row is more than $behind versions behind $policy_version: the staleness budget and its grace
--   no ledger of any lineage names them in a step after $replay_from: the window in which steps are replayed or repeated
SELECT shard
FROM decisions
GROUP BY shard
HAVING max(policy_version) < $policy_version - $behind
    AND shard NOT IN (SELECT shard FROM batches WHERE step > $replay_from)
ORDER BY max(policy_version), min(start_group), shard
